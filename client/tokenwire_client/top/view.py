"""A frame as tables and bars for a terminal.

Must not know: how it was read, keys, time.
"""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tokenwire_client.cli_output import terminal_text
from tokenwire_client.operator_status import EngineFigures, EngineStatus, LiveRequest, ServiceFigures
from tokenwire_client.top.rates import EngineRates, Frame, hit_ratio

_BARS = "▁▂▃▄▅▆▇█"
_BLOCK_BAR_CHARS = 20
_NONE = "-"
_STATE_STYLES = {"connected": "green", "connecting": "yellow", "draining": "yellow", "leaving": "dim"}
_REQUEST_STYLES = {"generating": "green", "waiting": "yellow", "moving": "magenta", "encoding": "cyan"}
_REQUEST_ID_CHARS, _ENGINE_CHARS = 36, 24


def render(frame: Frame, max_requests: int) -> RenderableType:
    """The whole view, with the oldest requests, so many."""
    parts: list[RenderableType] = [_title(frame)]
    if frame.problem:
        parts.append(_problem(frame))
    if frame.status is not None:
        parts += [
            _totals(frame),
            _service(frame.status.service),
            Text(),
            _engines(frame.status.engines, frame.rates),
            Text(),
            _requests(frame.status.requests[:max_requests], frame.status.service.active_requests),
        ]
    return Group(*parts)


def sparkline(values: Sequence[float]) -> str:
    """One character each, from nothing to the largest."""
    most = max(values, default=0.0)
    if most <= 0:
        return _BARS[0] * len(values)
    return "".join(_BARS[min(len(_BARS) - 1, int(value / most * len(_BARS)))] for value in values)


def block_bar(figures: EngineFigures, chars: int = _BLOCK_BAR_CHARS) -> Text:
    """The KV pool: used, cached and free blocks."""
    total = max(1, figures.total_blocks)
    used = _share(figures.used_blocks, total, chars)
    cached = min(_share(figures.cached_blocks, total, chars), chars - used)
    bar = Text("█" * used, "red" if figures.used_blocks > 0.9 * total else "green")
    return bar.append("▒" * cached, "blue").append("·" * (chars - used - cached), "dim")


def _share(part: int, total: int, chars: int) -> int:
    """Something is never shown as nothing."""
    return 0 if part <= 0 else min(chars, max(1, round(chars * part / total)))


def _title(frame: Frame) -> Text:
    title = Text("tokenwire top", "bold").append(f"  {terminal_text(frame.target)}", "not bold")
    if frame.status is not None:
        service = frame.status.service
        title.append(f"  model {terminal_text(service.model_name)}  up {duration(service.uptime)}", "not bold")
        if service.is_draining:
            title.append("  draining", "yellow")
    return title


def _problem(frame: Frame) -> Text:
    shown = f"; shown is what it said {duration(frame.age)} ago" if frame.status is not None else ""
    return Text(f"the service is away: {terminal_text(frame.problem)}{shown}", "bold red")


def _totals(frame: Frame) -> Text:
    line = Text(f"tokens/s  out {frame.generated_tokens_per_second:,.1f}  in {frame.prompt_tokens_per_second:,.1f}  ")
    return line.append(sparkline(frame.history), "green")


def _service(service: ServiceFigures) -> Text:
    line = (
        f"requests  active {service.active_requests:,} of {service.max_requests:,}  to encode {service.encode_queue:,}"
    )
    for name, counts in (
        ("routed", service.routed_requests_total),
        ("failovers", service.failovers_total),
        ("given up", service.failed_failovers_total),
    ):
        told = " ".join(f"{key} {count:,}" for key, count in sorted(counts.items()) if count)
        line += f"  {name}: {told or 0}"
    return Text(line)


def _engines(engines: Sequence[EngineStatus], rates: dict[str, EngineRates]) -> Table:
    table = _table("engine", "state")
    for name in ("run", "wait", "step ms", "tok/step", "out/s", "in/s", "KV used/cached/free", "hit", "preempt"):
        table.add_column(name, justify="left" if name.startswith("KV") else "right", no_wrap=True)
    for each in engines:
        table.add_row(*_engine_row(each, rates.get(each.engine.address)))
    if not engines:
        table.add_row("none")
    return table


def _engine_row(each: EngineStatus, rates: EngineRates | None) -> list[RenderableType]:
    address = terminal_text(each.engine.address)
    state = Text(each.engine.state, _STATE_STYLES.get(each.engine.state, ""))
    figures = each.figures
    if figures is None:
        return [address, state, *[_NONE] * 6, Text(terminal_text(each.error) or "no answer", "red")]
    bar = block_bar(figures).append(f" {figures.used_blocks:,}/{figures.cached_blocks:,}/{figures.free_blocks:,}")
    hit = rates.prefix_hit_ratio if rates is not None and rates.prefix_hit_ratio is not None else hit_ratio(figures)
    return [
        address,
        state,
        f"{figures.running_requests:,}",
        f"{figures.waiting_requests:,}",
        *_rate_cells(rates),
        bar,
        _NONE if hit is None else f"{hit:.0%}",
        f"{figures.preemptions_total:,}",
    ]


def _rate_cells(rates: EngineRates | None) -> list[str]:
    if rates is None:
        return [_NONE] * 4
    per_second = rates.generated_tokens_per_second, rates.prompt_tokens_per_second
    return [_number(value) for value in (rates.step_ms, rates.tokens_per_step, *per_second)]


def _requests(requests: Sequence[LiveRequest], active: int) -> RenderableType:
    table = _table("request", "tenant", "state")
    for name in ("prompt", "generated", "age", "TTFT", "tok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("engine", overflow="ellipsis")
    for each in requests:
        table.add_row(
            _short(each.request_id or each.method, _REQUEST_ID_CHARS),
            _short(each.tenant or _NONE, _ENGINE_CHARS),
            Text(each.state, _REQUEST_STYLES.get(each.state, "")),
            _NONE if each.prompt_tokens is None else f"{each.prompt_tokens:,}",
            f"{each.generated_tokens:,}",
            duration(each.age),
            _NONE if each.time_to_first_token is None else duration(each.time_to_first_token),
            _number(each.tokens_per_second),
            _short(" ".join(each.engines) or _NONE, _ENGINE_CHARS),
        )
    if active > len(requests):
        return Group(table, Text(f"and {active - len(requests):,} more", "dim"))
    return Group(table, Text("idle", "dim")) if not requests else table


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold reverse", expand=False)
    for head in heads:
        # Where the terminal is narrow, names are cut before numbers.
        table.add_column(head, overflow="ellipsis")
    return table


def duration(seconds: float) -> str:
    """As short as it can be told: `12ms`, `3.4s`, `5m07s`, `2h05m`, `3d04h`."""
    if seconds < 1:
        return f"{1000 * seconds:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours < 24 else f"{hours // 24}d{hours % 24:02}h"


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.1f}"


def _short(text: str, chars: int) -> str:
    text = terminal_text(text)
    return text if len(text) <= chars else text[: chars - 1] + "…"
