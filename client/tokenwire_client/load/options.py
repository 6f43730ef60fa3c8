"""The flags of `tokenwire load run` and `sweep`, and the settings they mean.

Must not know: how a test is done. A flag that does not fit is a BadParameter before anything is sent.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenwire_client import cli_options as flags
from tokenwire_client.load.settings import TargetKind, Tenant
from tokenwire_client.load.traces import TraceFormat

_SERVER, _WORK, _GOALS = "Server", "Workload", "Targets of a good answer"

Kind = Annotated[
    TargetKind,
    typer.Option("--kind", help="grpc: Tokenwire. http: any OpenAI-compatible server.", rich_help_panel=_SERVER),
]
TargetFlag = Annotated[
    str | None,
    typer.Option(
        "--target",
        help=f"host:port, or a URL without /v1. Unset: {flags.TARGET_VARIABLE} (gRPC) or this machine's port.",
        rich_help_panel=_SERVER,
    ),
]
ModelFlag = Annotated[str, typer.Option("--model", help="Unset: the first that is served.", rich_help_panel=_SERVER)]
Chat = Annotated[bool, typer.Option("--chat", help="Chat instead of completions.", rich_help_panel=_SERVER)]
NaturalEnd = Annotated[
    bool,
    typer.Option(
        "--natural-end",
        help="Let answers end where the model ends them; unset: each has exactly the length drawn (ignore_eos).",
        rich_help_panel=_SERVER,
    ),
]
ExtraBody = Annotated[
    str | None,
    typer.Option("--extra-body", help="A JSON object added to each body of HTTP requests.", rich_help_panel=_SERVER),
]
TenantFlags = Annotated[
    list[str] | None,
    typer.Option(
        "--tenant",
        help="NAME:WEIGHT:VARIABLE, may be repeated: part of the requests, with the key in that environment variable.",
        rich_help_panel=_SERVER,
    ),
]
Requests = Annotated[int | None, typer.Option(min=1, help="End after so many requests.", rich_help_panel=_WORK)]
InputTokens = Annotated[
    str,
    typer.Option(
        "--input",
        help="Length of prompts (after a shared prefix): N, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA[,MOST].",
        rich_help_panel=_WORK,
    ),
]
OutputTokens = Annotated[str, typer.Option("--output", help="Length of answers, likewise.", rich_help_panel=_WORK)]
Prefixes = Annotated[
    int, typer.Option(min=0, max=100_000, help="Shared prefixes; each prompt begins with one.", rich_help_panel=_WORK)
]
PrefixTokens = Annotated[
    int, typer.Option(min=0, max=1_000_000, help="Length of each shared prefix.", rich_help_panel=_WORK)
]
CancelShare = Annotated[
    float, typer.Option(min=0, max=1, help="Share of requests that are left early.", rich_help_panel=_WORK)
]
TraceFile = Annotated[Path | None, typer.Option("--trace", help="Recorded requests.", rich_help_panel=_WORK)]
TraceKind = Annotated[TraceFormat, typer.Option("--trace-format", help="Of that file.", rich_help_panel=_WORK)]
TimeScale = Annotated[float, typer.Option(help="Replay so many times as fast.", rich_help_panel=_WORK)]
MaxInput = Annotated[
    int, typer.Option(min=1, max=1_000_000, help="Longer prompts of a trace are cut.", rich_help_panel=_WORK)
]
MaxOutput = Annotated[
    int, typer.Option(min=1, max=1_000_000, help="Longer answers of a trace are cut.", rich_help_panel=_WORK)
]
Seed = Annotated[
    int, typer.Option(help="The same seed gives the same requests at the same times.", rich_help_panel=_WORK)
]
InFlight = Annotated[
    int, typer.Option("--max-in-flight", min=1, max=100_000, help="Beyond it requests are counted as not sent.")
]
RequestTimeout = Annotated[float, typer.Option(help="Seconds until a request without an end is an error.")]
Drain = Annotated[float, typer.Option(help="Seconds to wait for answers at the end.")]
TtftGoal = Annotated[
    float | None, typer.Option("--ttft", help="Seconds to the first token, at most.", rich_help_panel=_GOALS)
]
TpotGoal = Annotated[
    float | None, typer.Option("--tpot", help="Seconds for each further token, at most.", rich_help_panel=_GOALS)
]
E2eGoal = Annotated[
    float | None, typer.Option("--e2e", help="Seconds for the whole answer, at most.", rich_help_panel=_GOALS)
]
JsonOut = Annotated[Path, typer.Option("--json-file", help="Where the figures go.")]
PageOut = Annotated[Path, typer.Option("--html-file", help="Where the page goes.")]


def tenants_of(flags: list[str] | None, api_key: str | None, environment: Mapping[str, str]) -> tuple[Tenant, ...]:
    """One without a name unless some are given."""
    if not flags:
        return (Tenant("", 1.0, api_key),)
    return tuple(_tenant(flag, environment) for flag in flags)


def _tenant(flag: str, environment: Mapping[str, str]) -> Tenant:
    parts = flag.split(":")
    if len(parts) != 3 or not parts[0]:
        raise typer.BadParameter(f"{flag!r} is not NAME:WEIGHT:VARIABLE", param_hint="--tenant")
    name, weight, variable = parts
    try:
        value = float(weight)
    except ValueError:
        raise typer.BadParameter(f"weight {weight!r} of {name} is no number", param_hint="--tenant") from None
    if variable and variable not in environment:
        raise typer.BadParameter(f"the environment variable {variable} is not set", param_hint="--tenant")
    return Tenant(name, value, environment[variable] if variable else None)


def extra_of(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint="--extra-body") from None
    if not isinstance(value, dict):
        raise typer.BadParameter("must be a JSON object", param_hint="--extra-body")
    return value


def environment() -> Mapping[str, str]:
    return os.environ
