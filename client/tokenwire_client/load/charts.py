"""Plots as SVG text for a page: no scripts, no fonts, nothing to fetch.

Must not know: pages, files, how figures were measured.
"""

import io
import math
import re
from collections.abc import Callable, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter

from tokenwire_client.load.histogram import Latency
from tokenwire_client.load.results import Knee, Round

_COLORS = ("#1f5fa8", "#d1495b", "#2e933c", "#8a5a9c", "#e08e26")
_SIZE = (6.4, 3.6)
# Percentiles whose distance from 100 shrinks evenly on a logarithmic axis.
_GRID = tuple(100 - 10 ** (-exponent / 12) * 100 for exponent in range(49))
_TICKS = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99)


def percentiles(title: str, latencies: Sequence[tuple[str, Latency]]) -> str:
    """Milliseconds over percentiles: the tail is as wide as the middle."""

    def draw(axes: Axes) -> None:
        for (name, latency), color in zip(latencies, _COLORS, strict=False):
            if latency.count:
                values = latency.decoded()
                seen = [p for p in _GRID if 100 - p >= 50 / latency.count] or [50.0]
                axes.plot(
                    [_nines(p) for p in seen], [values.percentile(p) * 1e3 for p in seen], label=name, color=color
                )
        axes.set_xticks([_nines(tick) for tick in _TICKS], [f"{tick:g}" for tick in _TICKS])
        axes.set_xlabel("percentile")
        axes.set_ylabel("milliseconds")
        _log_scale(axes)

    return _svg(title, draw)


def over_time(title: str, unit: str, series: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Values of each second of the run."""

    def draw(axes: Axes) -> None:
        for (name, values), color in zip(series, _COLORS, strict=False):
            axes.step(range(len(values)), values, where="post", label=name, color=color)
        axes.set_xlabel("second of the run")
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)

    return _svg(title, draw)


def dots(title: str, points: Sequence[tuple[float, float]]) -> str:
    """(second, seconds): each a request."""

    def draw(axes: Axes) -> None:
        axes.scatter([at for at, _ in points], [value * 1e3 for _, value in points], s=5, alpha=0.5, color=_COLORS[0])
        axes.set_xlabel("second of the intended start")
        axes.set_ylabel("milliseconds")
        axes.set_ylim(bottom=0)

    return _svg(title, draw)


def over_rate(
    title: str,
    unit: str,
    rounds: Sequence[Round],
    lines: Sequence[tuple[str, Callable[[Round], float]]],
    knee: Knee,
    *,
    limit: float | None = None,
    log: bool = False,
    diagonal: bool = False,
) -> str:
    """Figures of a sweep by offered rate, the knee as a line; `limit` is a target, drawn across."""

    def draw(axes: Axes) -> None:
        rates = [each.rate for each in rounds]
        if diagonal:
            axes.plot(rates, rates, color="#999999", linestyle=":", label="offered")
        for (name, pick), color in zip(lines, _COLORS, strict=False):
            axes.plot(rates, [pick(each) for each in rounds], marker="o", markersize=4, label=name, color=color)
        if limit is not None:
            axes.axhline(limit, color="#555555", linestyle="--", linewidth=1, label="target")
        if not math.isnan(knee.rate):
            axes.axvline(knee.rate, color="#000000", linewidth=1, label=f"knee: {knee.rate:g}/s")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates], rotation=45)
        axes.set_xlabel("offered requests per second")
        axes.set_ylabel(unit)
        if log:
            _log_scale(axes)
        else:
            axes.set_ylim(bottom=0)

    return _svg(title, draw)


def _nines(percent: float) -> float:
    return -math.log10(max(1e-6, 1 - percent / 100))


def _log_scale(axes: Axes) -> None:
    """Where there is something to show: a rate at which nothing was answered has no latency."""
    if math.isfinite(axes.dataLim.minposy):  # the least value above 0
        axes.set_yscale("log")
        for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            set_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.4)))


def _svg(title: str, draw: Callable[[Axes], None]) -> str:
    """Text stays text; ids are a function of the title, so that plots on one page do not mix theirs."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif"}):
        figure = Figure(figsize=_SIZE, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        draw(axes)
        axes.set_title(title, fontsize=11)
        axes.grid(visible=True, alpha=0.25)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize=8, frameon=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return _embedded(file.getvalue())


def _embedded(svg: str) -> str:
    """As an element of a page: without the document type (which names an address) and name spaces."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    return re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", element)
