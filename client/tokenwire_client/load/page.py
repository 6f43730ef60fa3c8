"""A report as one HTML file that needs nothing else: no scripts, no network.

Must not know: how figures were measured. Everything that comes from outside is escaped.
"""

import html
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tokenwire_client.load import charts
from tokenwire_client.load.histogram import Latency, merged
from tokenwire_client.load.results import Report, Round

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff; max-width: 1180px; margin: 2em auto;
  padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid #ddd }
table { border-collapse: collapse; margin: 0.7em 0 }
th, td { padding: 0.25em 0.8em; text-align: right; border-bottom: 1px solid #eee }
th { font-weight: 600; background: #f6f6f6 } td:first-child, th:first-child { text-align: left }
table.words td { text-align: left } .plots { display: flex; flex-wrap: wrap; gap: 1em }
.plots svg { width: 560px; height: auto } .notes li { color: #8a3b00 } .big { font-size: 1.25em } small { color: #666 }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_LATENCY_HEADS = ("", "p50", "p90", "p99", "p99.9", "mean", "max", "values")


def write_page(report: Report, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(report), encoding="utf-8")


def render(report: Report) -> str:
    title = f"Load {report.kind}: {report.settings.get('target', '')}"
    body = _sweep(report) if report.kind == "sweep" else _run(report)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{html.escape(title)}</h1><p><small>{html.escape(report.created)}</small></p>"
        f"{body}{_about(report)}</body></html>\n"
    )


def _run(report: Report) -> str:
    rounds = report.rounds
    parts = [_notes(rounds), "<h2>Requests</h2>", _counts(rounds), "<h2>Rates</h2>", _rates(rounds)]
    ttft, itl, tpot, e2e = (merged([pick(each) for each in rounds]) for pick in _PICKS)
    lag = merged([each.lag for each in rounds])
    rows = [_latency("time to first token", ttft), _latency("inter-token", itl), _latency("per output token", tpot)]
    rows += [_latency("end to end", e2e), _latency("generator's lag", lag)]
    parts += ["<h2>Latency, milliseconds</h2>", _table(_LATENCY_HEADS, rows), _definitions(report), _tenants(rounds)]
    parts += ['<div class="plots">']
    parts += [charts.percentiles("Latency from the intended start", [("end to end", e2e), ("first token", ttft)])]
    parts += [charts.percentiles("Between tokens", [("inter-token", itl), ("per output token", tpot)])]
    for number, each in enumerate(rounds):
        parts += _round_plots(each, f" (round {number + 1})" if len(rounds) > 1 else "")
    return "".join([*parts, "</div>"])


def _round_plots(each: Round, suffix: str) -> list[str]:
    series = each.series
    return [
        charts.over_time(f"Tokens per second{suffix}", "tokens", [("generated", series.tokens)]),
        charts.over_time(
            f"Requests{suffix}",
            "requests",
            [
                ("in flight", series.in_flight),
                ("started", series.started),
                ("ended", series.finished),
                ("failed", series.failed),
            ],
        ),
        charts.dots(f"Time to first token{suffix}", each.dots),
    ]


def _sweep(report: Report) -> str:
    rounds, knee = report.rounds, report.knee
    if knee is None:
        return _run(report)
    goals = {name: seconds * 1e3 for name, seconds in report.targets.items()}
    ttft, tpot = _lines(lambda each: each.ttft), _lines(lambda each: each.tpot)
    found = "none of the rates was sustained" if math.isnan(knee.rate) else f"{knee.rate:g} requests per second"
    above = "" if math.isnan(knee.first_failed) else f"; {knee.first_failed:g} were too many"
    plots = [
        charts.over_rate("Throughput", "requests per second", rounds, _RATE_LINES, knee, diagonal=True),
        charts.over_rate("Tokens", "tokens per second", rounds, [("generated", lambda each: each.rates.tokens)], knee),
        charts.over_rate("Time to first token", "milliseconds", rounds, ttft, knee, limit=goals.get("ttft"), log=True),
        charts.over_rate(
            "Time per output token", "milliseconds", rounds, tpot, knee, limit=goals.get("tpot"), log=True
        ),
    ]
    return (
        f'<p class="big">Knee: <b>{found}</b>{above}.</p><p>Sustained means: {html.escape(knee.rule)}.</p>'
        f'{_notes(rounds)}<div class="plots">{"".join(plots)}</div>'
        f"<h2>Rates tried</h2>{_steps(rounds)}{_definitions(report)}"
    )


def _steps(rounds: Sequence[Round]) -> str:
    heads = (
        "offered/s",
        "ok/s",
        "good/s",
        "good",
        "tokens/s",
        "TTFT p50",
        "p99",
        "ITL p50",
        "p99",
        "TPOT p50",
        "errors",
        "not sent",
    )
    rows = [
        (
            f"{each.rate:g}",
            _number(each.rates.ok),
            _number(each.rates.good),
            _share(each.counts.good_share),
            _number(each.rates.tokens),
            _ms(each.ttft.p50),
            _ms(each.ttft.p99),
            _ms(each.itl.p50),
            _ms(each.itl.p99),
            _ms(each.tpot.p50),
            str(each.counts.failed + each.counts.abandoned),
            str(each.counts.not_sent),
        )
        for each in rounds
    ]
    return _table(heads, rows)


def _counts(rounds: Sequence[Round]) -> str:
    heads = ("round", "intended", "sent", "ok", "good", "cancelled", "errors", "abandoned", "not sent", "in warm-up")
    rows = []
    for number, each in enumerate(rounds):
        c = each.counts
        values = (c.intended, c.sent, c.ok, c.good, c.cancelled, c.failed, c.abandoned, c.not_sent, each.warmup)
        rows.append((f"{number + 1} (seed {each.seed})", *map(str, values)))
    return _table(heads, rows) + _errors(rounds)


def _errors(rounds: Sequence[Round]) -> str:
    kinds = sorted({kind for each in rounds for kind in each.counts.errors})
    if not kinds:
        return ""
    rows = []
    for kind in kinds:
        number = sum(each.counts.errors.get(kind, 0) for each in rounds)
        example = next((each.error_examples[kind] for each in rounds if kind in each.error_examples), "")
        rows.append((kind, str(number), example))
    return _table(("error", "requests", "an example"), rows, css="words")


def _rates(rounds: Sequence[Round]) -> str:
    heads = (
        "round",
        "window, s",
        "offered/s",
        "ok/s",
        "good/s",
        "good",
        "tokens/s",
        "prompt tokens/s",
        "tokens a message",
    )
    rows = []
    for number, each in enumerate(rounds):
        r, t = each.rates, each.tokens
        values = (r.offered, r.ok, r.good)
        rows.append(
            (
                str(number + 1),
                f"{each.window_s:.1f}",
                *map(_number, values),
                _share(each.counts.good_share),
                _number(r.tokens),
                _number(r.prompt_tokens),
                f"{t.completion / t.messages:.2f}" if t.messages else "-",
            )
        )
    tokens = rounds[0].tokens
    cached = f", {tokens.cached} of them from the prefix cache" if tokens.cached else ""
    words = (
        f"Prompts of round 1: {tokens.prompt} tokens by the server's count{cached}; {tokens.asked_prompt} were meant."
    )
    return _table(heads, rows) + f"<p><small>{words}</small></p>"


def _tenants(rounds: Sequence[Round]) -> str:
    if not rounds[0].tenants:
        return ""
    heads = (
        "tenant",
        "round",
        "intended",
        "ok",
        "good",
        "errors",
        "not sent",
        "TTFT p50",
        "p99",
        "end to end p50",
        "p99",
    )
    rows = [
        (
            tenant.name,
            str(number + 1),
            *map(str, (tenant.counts.intended, tenant.counts.ok, tenant.counts.good)),
            *map(str, (tenant.counts.failed, tenant.counts.not_sent)),
            *map(_ms, (tenant.ttft.p50, tenant.ttft.p99, tenant.e2e.p50, tenant.e2e.p99)),
        )
        for number, each in enumerate(rounds)
        for tenant in each.tenants
    ]
    return "<h2>Tenants</h2>" + _table(heads, rows)


def _notes(rounds: Sequence[Round]) -> str:
    notes = list(dict.fromkeys(_at(each) + note for each in rounds for note in each.notes))
    return f'<ul class="notes">{"".join(f"<li>{html.escape(note)}</li>" for note in notes)}</ul>' if notes else ""


def _at(each: Round) -> str:
    return "" if math.isnan(each.rate) else f"At {each.rate:g}/s: "


def _definitions(report: Report) -> str:
    targets = report.settings.get("targets", "none: every whole answer is good")
    return (
        "<p><small>Time to first token and end to end count from the intended start. Inter-token: between two messages "
        "with tokens of one request. Per output token: (last - first) / tokens after the first message. Good: a whole "
        f"answer within the targets ({html.escape(targets)}); the share is of all that were intended and not left on "
        "purpose."
        "</small></p>"
    )


def _about(report: Report) -> str:
    rows = [*report.settings.items(), *report.machine.items()]
    return "<h2>Settings and generator</h2>" + _table(("", ""), rows, css="words")


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]], css: str = "") -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<table class="{css}"><tr>{head}</tr>{body}</table>'


def _latency(name: str, latency: Latency) -> tuple[str, ...]:
    values = (latency.p50, latency.p90, latency.p99, latency.p999, latency.mean, latency.most)
    return (name, *map(_ms, values), str(latency.count))


def _lines(pick: Callable[[Round], Latency]) -> list[tuple[str, Callable[[Round], float]]]:
    return [
        ("p50", lambda each: pick(each).p50 * 1e3),
        ("p90", lambda each: pick(each).p90 * 1e3),
        ("p99", lambda each: pick(each).p99 * 1e3),
    ]


_PICKS: tuple[Callable[[Round], Latency], ...] = (
    lambda each: each.ttft,
    lambda each: each.itl,
    lambda each: each.tpot,
    lambda each: each.e2e,
)
_RATE_LINES: list[tuple[str, Callable[[Round], float]]] = [
    ("answered", lambda each: each.rates.ok),
    ("good", lambda each: each.rates.good),
]


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1e3:.1f}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"
