"""From the flags of `run` and `sweep`, as given, to checked settings; and to words for the report.

Must not know: how a test is done.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import typer

from tokenwire_client import cli_options as flags
from tokenwire_client.channels import DEFAULT_TARGET
from tokenwire_client.load import options as own
from tokenwire_client.load.arrivals import ArrivalKind, Pace
from tokenwire_client.load.generator import Limits
from tokenwire_client.load.lengths import parse_lengths
from tokenwire_client.load.recorder import Targets
from tokenwire_client.load.settings import RunSettings, Server, TargetKind
from tokenwire_client.load.traces import MAX_ENTRIES, TraceFormat, read_trace
from tokenwire_client.load.workload import Shape, TraceEntry

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_DURATION_S = 60.0


def settings_of(given: dict[str, Any], arrivals: ArrivalKind, rate: float) -> RunSettings:
    """BadParameter for what does not fit together."""
    try:
        tenants = own.tenants_of(given["tenant"], given["api_key"], own.environment())
        limits = _limits(given, arrivals)
        entries = _entries(given, arrivals, limits)
        has_pace = arrivals not in (ArrivalKind.CLOSED, ArrivalKind.TRACE)
        return RunSettings(
            server=_server(given),
            arrivals=arrivals,
            shape=Shape(
                input=parse_lengths(given["input_tokens"]),
                output=parse_lengths(given["output_tokens"]),
                prefixes=given["prefixes"],
                prefix_tokens=given["prefix_tokens"],
                cancel_share=given["cancel_share"],
                tenant_weights=tuple(each.weight for each in tenants),
                most_input=given["max_input"],
                most_output=given["max_output"],
            ),
            limits=_ending_with(entries, limits) if arrivals is ArrivalKind.TRACE else limits,
            targets=Targets(given["ttft"], given["tpot"], given["e2e"]),
            tenants=tenants,
            seed=given["seed"],
            warmup_s=given["warmup"],
            rounds=given.get("rounds", 1),
            pace=Pace(arrivals, rate, given["burstiness"]) if has_pace else None,
            clients=given["concurrency"] if arrivals is ArrivalKind.CLOSED else 0,
            entries=entries,
            time_scale=given.get("time_scale", 1.0),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _limits(given: dict[str, Any], arrivals: ArrivalKind) -> Limits:
    requests, seconds = given.get("requests"), given["duration"]
    if requests is None and seconds is None:
        requests, seconds = (MAX_ENTRIES, None) if arrivals is ArrivalKind.TRACE else (None, DEFAULT_DURATION_S)
    return Limits(requests, seconds, given["max_in_flight"], given["request_timeout"], given["drain"])


def _ending_with(entries: Sequence[TraceEntry], limits: Limits) -> Limits:
    """A replay does not begin again at the end of its trace."""
    return dataclasses.replace(limits, requests=min(limits.requests or len(entries), len(entries)))


def _entries(given: dict[str, Any], arrivals: ArrivalKind, limits: Limits) -> tuple[TraceEntry, ...]:
    path, kind = given["trace"], given["trace_format"]
    if path is None:
        if arrivals is ArrivalKind.TRACE:
            raise ValueError("arrivals by a trace need --trace")
        return ()
    if arrivals is not ArrivalKind.TRACE:
        return tuple(read_trace(path, kind, limits.requests or MAX_ENTRIES))
    if kind is TraceFormat.SHAREGPT:
        raise ValueError("ShareGPT files hold no times; choose other arrivals, the file gives the requests")
    seconds = float("inf") if limits.seconds is None else limits.seconds * given["time_scale"]
    return tuple(read_trace(path, kind, limits.requests or MAX_ENTRIES, seconds))


def _server(given: dict[str, Any]) -> Server:
    kind = given["kind"]
    return Server(
        kind,
        given["target"] or _usual_address(kind),
        given["model"],
        given["chat"],
        not given["natural_end"],
        flags.tls(*(given[name] for name in ("tls", "ca_file", "cert_file", "key_file", "server_name"))),
        own.extra_of(given["extra_body"]),
    )


def _usual_address(kind: TargetKind) -> str:
    """Where the other commands go; they speak gRPC, so for HTTP the variable says nothing."""
    if kind is TargetKind.HTTP:
        return DEFAULT_URL
    return own.environment().get(flags.TARGET_VARIABLE) or DEFAULT_TARGET


def rates_of(text: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise ValueError(f"rates {text!r} are not numbers separated by commas") from None


_SHOWN = (
    "duration", "requests", "warmup", "rounds", "rate", "burstiness", "input_tokens", "output_tokens", "prefixes",
    "prefix_tokens", "cancel_share", "trace_format", "max_in_flight", "request_timeout", "drain", "seed", "natural_end",
)  # fmt: skip


def words_of(given: dict[str, Any]) -> dict[str, str]:
    """Flags of the report, without keys and paths."""
    words = {name: str(getattr(given[name], "value", given[name])) for name in _SHOWN if given.get(name) is not None}
    unused = set() if given["trace"] else {"trace_format"}
    unused |= set() if given["arrivals"] is ArrivalKind.BURSTY else {"burstiness"}
    unused |= {"rate"} if given["arrivals"] in (ArrivalKind.CLOSED, ArrivalKind.TRACE) else set()
    words = {name: value for name, value in words.items() if name not in unused}
    goals = [f"{name} {given[name]:g} s" for name in ("ttft", "tpot", "e2e") if given[name] is not None]
    return words | ({"targets": ", ".join(goals)} if goals else {})


def targets_in(targets: Targets) -> dict[str, float]:
    """Seconds, of those that there are."""
    found = {"ttft": targets.ttft, "tpot": targets.tpot, "e2e": targets.e2e}
    return {name: value for name, value in found.items() if value is not None}
