"""`python -m deploy.grafana.dashboard` writes the board of `panels.py` as Grafana's JSON.

Must not know: which metrics there are.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.grafana.panels import ROWS, Panel, Row

TARGET = Path(__file__).parent / "dashboards" / "tokenwire.json"
_SOURCE = {"type": "prometheus", "uid": "prometheus"}
_WIDTH = 24
_GRAPH_WIDTH, _GRAPH_HEIGHT, _STAT_HEIGHT = 8, 8, 4


def render() -> str:
    """The board's file."""
    board = {
        "uid": "tokenwire",
        "title": "Tokenwire",
        "description": "Tokenizer services and engines. Alerts are explained in docs/runbook.md.",
        "schemaVersion": 39,
        "editable": False,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "tags": ["tokenwire"],
        "annotations": {"list": [_alerts()]},
        "templating": {"list": [_engine_choice()]},
        "panels": list(_panels()),
    }
    return json.dumps(board, indent=1) + "\n"


def _alerts() -> dict[str, Any]:
    """Firing alerts as marks on every graph."""
    return {
        "name": "Alerts",
        "datasource": _SOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": 'ALERTS{alertname=~"Tokenwire.*", alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "step": "15s",
    }


def _engine_choice() -> dict[str, Any]:
    query = "label_values(tokenwire_engine_up, instance)"
    return {
        "name": "engine",
        "label": "Engine",
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": "engines"},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panels() -> Iterator[dict[str, Any]]:
    top = number = 0
    for row in ROWS:
        yield {
            "id": (number := number + 1),
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": top, "w": _WIDTH, "h": 1},
            "panels": [],
        }
        top += 1
        width, height = _size(row)
        for index, panel in enumerate(row.panels):
            line, column = divmod(index, _WIDTH // width)
            position = {"x": column * width, "y": top + line * height, "w": width, "h": height}
            yield _panel(panel, (number := number + 1), position)
        top += height * -(-len(row.panels) // (_WIDTH // width))


def _size(row: Row) -> tuple[int, int]:
    """Numbers share one line; graphs stand three in a line."""
    if all(panel.is_stat for panel in row.panels):
        return _WIDTH // len(row.panels), _STAT_HEIGHT
    return _GRAPH_WIDTH, _GRAPH_HEIGHT


def _panel(panel: Panel, number: int, position: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "stat" if panel.is_stat else "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": position,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for index, query in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": _options(panel),
    }


def _field(panel: Panel) -> dict[str, Any]:
    if panel.is_stat:
        return {"unit": panel.unit}
    custom = {"fillOpacity": 20 if panel.is_stacked else 0, "lineWidth": 1, "showPoints": "never"}
    return {
        "unit": panel.unit,
        "min": 0,
        "custom": custom | {"stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"}},
    }


def _options(panel: Panel) -> dict[str, Any]:
    if panel.is_stat:
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area", "colorMode": "none"}
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


if __name__ == "__main__":
    TARGET.write_text(render())
