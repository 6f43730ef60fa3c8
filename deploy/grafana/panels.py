"""What the board shows: rows of panels, each with its queries.

Must not know: how Grafana lays panels out or stores them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL; `legend` may hold {{labels}}."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph, or one number (`is_stat`). `unit` is Grafana's id of it."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    text: str = ""
    is_stat: bool = False
    is_stacked: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


_TOKENIZER = "tokenwire_tokenizer"
_ENGINE = "tokenwire_engine"
_THIS_ENGINE = '{instance=~"$engine"}'


def _stat(title: str, unit: str, expression: str, text: str = "") -> Panel:
    return Panel(title, unit, (Query(expression, ""),), text, is_stat=True)


def _rate(metric: str, by: str = "", labels: str = "") -> str:
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({metric}{labels}[$__rate_interval]))"


def _or_zero(expression: str) -> str:
    """For what has no series until it happens for the first time."""
    return f"{expression} or vector(0)"


def _quantiles(metric: str, *quantiles: float, labels: str = "") -> tuple[Query, ...]:
    counts = f"sum by (le) (rate({metric}_bucket{labels}[$__rate_interval]))"
    return tuple(Query(f"histogram_quantile({quantile}, {counts})", f"p{quantile * 100:g}") for quantile in quantiles)


OVERVIEW = Row(
    "Overview",
    (
        _stat("Engines", "none", f"max({_TOKENIZER}_engines_connected)", "That a tokenizer service can use."),
        _stat("Requests being served", "none", f"sum({_TOKENIZER}_active_requests)"),
        _stat("Requests", "reqps", "tokenwire:requests:rate1m"),
        _stat(
            "Generated tokens",
            "suffix: tokens/s",
            "tokenwire:generated_tokens:rate1m",
            "Delivered to clients, a second.",
        ),
        _stat("TTFT p99", "s", "tokenwire:time_to_first_token_seconds:p99_5m", "Of the last 5 minutes."),
        _stat(
            "Failed", "percentunit", "tokenwire:failed_requests:ratio5m", "By no client's fault, in the last 5 minutes."
        ),
    ),
)

USERS = Row(
    "What users see",
    (
        Panel("Time to first token", "s", _quantiles(f"{_TOKENIZER}_time_to_first_token_seconds", 0.5, 0.9, 0.99)),
        Panel("Inter-token latency", "s", _quantiles(f"{_TOKENIZER}_inter_token_latency_seconds", 0.5, 0.9, 0.99)),
        Panel("Time of a whole request", "s", _quantiles(f"{_TOKENIZER}_request_seconds", 0.5, 0.9, 0.99)),
        Panel(
            "Requests by status",
            "reqps",
            (Query(_rate(f"{_TOKENIZER}_requests_total", "code"), "{{code}}"),),
            "gRPC status codes, also of what came over HTTP.",
            is_stacked=True,
        ),
        Panel(
            "Tokens",
            "suffix: tokens/s",
            (
                Query(_rate(f"{_TOKENIZER}_prompt_tokens_total"), "prompt"),
                Query(_rate(f"{_TOKENIZER}_generated_tokens_total"), "generated"),
            ),
        ),
        Panel(
            "HTTP answers",
            "reqps",
            (Query(_rate(f"{_TOKENIZER}_http_responses_total", "route, status"), "{{route}} {{status}}"),),
            is_stacked=True,
        ),
    ),
)

ENGINES = Row(
    "Engines",
    (
        Panel(
            "Requests in engines",
            "none",
            (
                Query(f"sum({_ENGINE}_running_requests{_THIS_ENGINE})", "running"),
                Query(f"sum({_ENGINE}_waiting_requests{_THIS_ENGINE})", "waiting"),
            ),
            is_stacked=True,
        ),
        Panel(
            "KV blocks by state",
            "none",
            (Query(f"sum by (state) ({_ENGINE}_kv_blocks{_THIS_ENGINE})", "{{state}}"),),
            "used: held by requests. cached: free, and reusable by content. free: empty.",
            is_stacked=True,
        ),
        Panel(
            "KV cache in use",
            "percentunit",
            (Query(f"{_ENGINE}_kv_cache_usage_ratio{_THIS_ENGINE}", "{{instance}}"),),
        ),
        Panel(
            "Where a request's time goes (p90)",
            "s",
            tuple(
                Query(_quantiles(f"{_ENGINE}_{stage}_seconds", 0.9, labels=_THIS_ENGINE)[0].expression, stage)
                for stage in ("queue", "prefill", "decode")
            ),
        ),
        Panel(
            "Time of a step (p99)",
            "s",
            (
                Query(
                    "histogram_quantile(0.99, sum by (le, kind) "
                    f"(rate({_ENGINE}_step_seconds_bucket{_THIS_ENGINE}[$__rate_interval])))",
                    "{{kind}}",
                ),
            ),
            "decode: answers only. prefill: prompts only. mixed: both.",
        ),
        Panel("Tokens in a step", "none", _quantiles(f"{_ENGINE}_step_tokens", 0.5, 0.99, labels=_THIS_ENGINE)),
        Panel(
            "Tokens computed",
            "suffix: tokens/s",
            (
                Query(_rate(f"{_ENGINE}_prompt_tokens_total", labels=_THIS_ENGINE), "prompt"),
                Query(_rate(f"{_ENGINE}_generated_tokens_total", labels=_THIS_ENGINE), "generated"),
            ),
        ),
        Panel(
            "Prompt tokens from the prefix cache",
            "percentunit",
            (
                Query(
                    f"{_rate(f'{_ENGINE}_prefix_hit_tokens_total', 'instance', _THIS_ENGINE)}"
                    f" / {_rate(f'{_ENGINE}_prefix_lookup_tokens_total', 'instance', _THIS_ENGINE)}",
                    "{{instance}}",
                ),
            ),
        ),
        Panel(
            "Memory pressure",
            "cps",
            (
                Query(_rate(f"{_ENGINE}_preemptions_total", labels=_THIS_ENGINE), "preemptions"),
                Query(_rate(f"{_ENGINE}_kv_block_evictions_total", labels=_THIS_ENGINE), "evicted blocks"),
            ),
            "Preempted requests are computed again; an evicted block's content can be reused no longer.",
        ),
    ),
)

ROUTING = Row(
    "Routing, failover, tokenizing",
    (
        Panel(
            "Why a request went to its engine",
            "reqps",
            (Query(_rate(f"{_TOKENIZER}_routed_requests_total", "reason"), "{{reason}}"),),
            is_stacked=True,
        ),
        Panel(
            "Requests at each engine",
            "none",
            (Query(f"sum by (engine) ({_TOKENIZER}_engine_live_requests)", "{{engine}}"),),
            is_stacked=True,
        ),
        Panel(
            "Turned away",
            "reqps",
            (Query(_or_zero(_rate(f"{_TOKENIZER}_rejected_requests_total", "reason")), "{{reason}}"),),
            "Before work was done for them.",
        ),
        Panel(
            "Where a request's time goes before an engine has it (p99)",
            "s",
            (
                Query(_quantiles(f"{_TOKENIZER}_validation_seconds", 0.99)[0].expression, "checks, template, encoding"),
                Query(_quantiles(f"{_TOKENIZER}_encode_seconds", 0.99)[0].expression, "of it template, encoding"),
            ),
        ),
        Panel(
            "Failovers",
            "cps",
            (
                Query(_or_zero(_rate(f"{_TOKENIZER}_failovers_total")), "taken over"),
                Query(_or_zero(_rate(f"{_TOKENIZER}_failed_failovers_total")), "lost"),
            ),
        ),
        Panel(
            "Circuit breakers",
            "none",
            (Query(f"max by (engine) ({_TOKENIZER}_engine_breaker_state)", "{{engine}}"),),
            "0: requests pass. 1: one may try. 2: none passes.",
        ),
        Panel("Texts that wait to be encoded", "none", (Query(f"sum({_TOKENIZER}_encode_queue)", "waiting"),)),
    ),
)

TENANTS = Row(
    "Tenants",
    (
        Panel(
            "Requests being served",
            "none",
            (Query(_or_zero(f"sum by (tenant) ({_TOKENIZER}_tenant_active_requests)"), "{{tenant}}"),),
            is_stacked=True,
        ),
        Panel(
            "Tokens",
            "suffix: tokens/s",
            (Query(_or_zero(_rate(f"{_TOKENIZER}_tenant_tokens_total", "tenant, kind")), "{{tenant}} {{kind}}"),),
            is_stacked=True,
        ),
        Panel(
            "Refused by a limit of the tenant",
            "reqps",
            (Query(_or_zero(_rate(f"{_TOKENIZER}_tenant_refusals_total", "tenant, limit")), "{{tenant}} {{limit}}"),),
        ),
    ),
)

PROCESSES = Row(
    "Processes",
    (
        Panel(
            "CPU",
            "suffix: cores",
            (
                Query(_rate(f"{_ENGINE}_process_cpu_seconds_total", "instance"), "engine {{instance}}"),
                Query(_rate("process_cpu_seconds_total", "job, instance"), "{{job}} {{instance}}"),
            ),
            "An engine service is two processes: the engine, and its front.",
        ),
        Panel(
            "Memory",
            "bytes",
            (
                Query(f"sum by (instance) ({_ENGINE}_process_resident_memory_bytes)", "engine {{instance}}"),
                Query("sum by (job, instance) (process_resident_memory_bytes)", "{{job}} {{instance}}"),
            ),
        ),
        Panel(
            "Starts",
            "none",
            (Query('changes(process_start_time_seconds{job=~"tokenwire-.*"}[1h])', "{{job}} {{instance}}"),),
            "In the last hour, the first one not counted.",
        ),
    ),
)

ROWS = (OVERVIEW, USERS, ENGINES, ROUTING, TENANTS, PROCESSES)
