"""`tokenwire load run` and `tokenwire load sweep`: flags to settings, then the test, then the report.

Must not know: transports, how figures are made.
"""

import asyncio
import dataclasses
from collections.abc import Coroutine, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from tokenwire_client import cli_options as flags
from tokenwire_client.cli_output import EXIT_FAILED, EXIT_INTERRUPTED, show_table, terminal_text
from tokenwire_client.load import options as own
from tokenwire_client.load.arrivals import ArrivalKind
from tokenwire_client.load.assemble import rates_of, settings_of, targets_in, words_of
from tokenwire_client.load.console import STEP_HEADS, knee_line, step_row, summary_lines
from tokenwire_client.load.execute import Interrupts, connected, run_round, run_rounds
from tokenwire_client.load.lengths import MAX_TOKENS
from tokenwire_client.load.outcomes import RequestFailed
from tokenwire_client.load.output import Output
from tokenwire_client.load.progress import progress_for_stderr
from tokenwire_client.load.results import Knee, Report, Round
from tokenwire_client.load.settings import RunSettings, TargetKind, described, machine
from tokenwire_client.load.sweep import Plan, Rule, sweep
from tokenwire_client.load.traces import TraceFormat

T = TypeVar("T")
_SEED_STRIDE = 1_000_003


def run(
    kind: own.Kind = TargetKind.GRPC,
    target: own.TargetFlag = None,
    arrivals: Annotated[ArrivalKind, typer.Option(help="How requests come.")] = ArrivalKind.POISSON,
    rate: Annotated[float, typer.Option(help="Requests per second of an open loop.")] = 1.0,
    burstiness: Annotated[float, typer.Option(help="Of bursty: deviation / mean of the gaps; 1 is Poisson.")] = 3.0,
    concurrency: Annotated[int, typer.Option(min=1, max=100_000, help="Clients of a closed loop.")] = 8,
    duration: Annotated[
        float | None, typer.Option(help="Seconds in which requests are sent. Unset without --requests: 60.")
    ] = None,
    requests: own.Requests = None,
    warmup: Annotated[float, typer.Option(min=0, help="Seconds at the beginning that count in no figure.")] = 0.0,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Repeat, each with the next seed.")] = 1,
    input_tokens: own.InputTokens = "100",
    output_tokens: own.OutputTokens = "64",
    prefixes: own.Prefixes = 0,
    prefix_tokens: own.PrefixTokens = 0,
    cancel_share: own.CancelShare = 0.0,
    trace: own.TraceFile = None,
    trace_format: own.TraceKind = TraceFormat.AZURE,
    time_scale: own.TimeScale = 1.0,
    max_input: own.MaxInput = MAX_TOKENS,
    max_output: own.MaxOutput = MAX_TOKENS,
    seed: own.Seed = 0,
    tenant: own.TenantFlags = None,
    model: own.ModelFlag = "",
    chat: own.Chat = False,
    natural_end: own.NaturalEnd = False,
    extra_body: own.ExtraBody = None,
    api_key: flags.ApiKey = None,
    tls: flags.UseTls = False,
    ca_file: flags.CaFile = None,
    cert_file: flags.CertFile = None,
    key_file: flags.KeyFile = None,
    server_name: flags.ServerName = None,
    ttft: own.TtftGoal = None,
    tpot: own.TpotGoal = None,
    e2e: own.E2eGoal = None,
    max_in_flight: own.InFlight = 4096,
    request_timeout: own.RequestTimeout = 600.0,
    drain: own.Drain = 120.0,
    json_out: own.JsonOut = Path(".run/load/report.json"),
    html_out: own.PageOut = Path(".run/load/report.html"),
) -> None:
    """One load: what the server does under it. Writes JSON and a page, prints the main figures."""
    given = dict(locals())
    settings = settings_of(given, arrivals, rate)
    output = Output(json_out, html_out)
    output.check()
    interrupts = Interrupts()
    found = _run(run_rounds(settings, progress_for_stderr(), interrupts), interrupts)
    words = described(settings, words_of(given))
    report = Report("run", _now(), words, machine(), tuple(found), targets=targets_in(settings.targets))
    for line in summary_lines(found):
        typer.echo(terminal_text(line))
    output.write(report)
    _finish(found, interrupts)


def sweep_rates(
    kind: own.Kind = TargetKind.GRPC,
    target: own.TargetFlag = None,
    arrivals: Annotated[ArrivalKind, typer.Option(help="constant, poisson or bursty.")] = ArrivalKind.POISSON,
    burstiness: Annotated[float, typer.Option(help="Of bursty: deviation / mean of the gaps.")] = 3.0,
    rates: Annotated[str | None, typer.Option(help="Requests per second to try, as in 1,2,4. Unset: search.")] = None,
    first_rate: Annotated[float, typer.Option(help="Where the search begins.")] = 1.0,
    factor: Annotated[float, typer.Option(help="By which the rate grows while it is sustained.")] = 2.0,
    max_rate: Annotated[float, typer.Option(help="The search goes no higher.")] = 1024.0,
    refine: Annotated[int, typer.Option(min=0, max=20, help="Halvings between the last good and the first bad.")] = 3,
    duration: Annotated[float, typer.Option(help="Seconds for each rate.")] = 20.0,
    warmup: Annotated[float, typer.Option(min=0, help="Of them, at the beginning, in no figure.")] = 4.0,
    good_share: Annotated[float, typer.Option(help="With targets: share of good requests of a sustained rate.")] = 0.95,
    kept_share: Annotated[float, typer.Option(help="Without: ends / begins of a sustained rate.")] = 0.9,
    input_tokens: own.InputTokens = "100",
    output_tokens: own.OutputTokens = "64",
    prefixes: own.Prefixes = 0,
    prefix_tokens: own.PrefixTokens = 0,
    cancel_share: own.CancelShare = 0.0,
    trace: own.TraceFile = None,
    trace_format: own.TraceKind = TraceFormat.SHAREGPT,
    max_input: own.MaxInput = MAX_TOKENS,
    max_output: own.MaxOutput = MAX_TOKENS,
    seed: own.Seed = 0,
    tenant: own.TenantFlags = None,
    model: own.ModelFlag = "",
    chat: own.Chat = False,
    natural_end: own.NaturalEnd = False,
    extra_body: own.ExtraBody = None,
    api_key: flags.ApiKey = None,
    tls: flags.UseTls = False,
    ca_file: flags.CaFile = None,
    cert_file: flags.CertFile = None,
    key_file: flags.KeyFile = None,
    server_name: flags.ServerName = None,
    ttft: own.TtftGoal = None,
    tpot: own.TpotGoal = None,
    e2e: own.E2eGoal = None,
    max_in_flight: own.InFlight = 4096,
    request_timeout: own.RequestTimeout = 600.0,
    drain: own.Drain = 30.0,
    json_out: own.JsonOut = Path(".run/load/report.json"),
    html_out: own.PageOut = Path(".run/load/report.html"),
) -> None:
    """Rates up to the knee: the highest one that the server sustains."""
    given = dict(locals())
    if arrivals in (ArrivalKind.CLOSED, ArrivalKind.TRACE):
        raise typer.BadParameter(f"{arrivals.value} arrivals have no rate to sweep", param_hint="--arrivals")
    settings = settings_of(given, arrivals, first_rate)
    plan, rule = _plan_of(given, settings)
    output = Output(json_out, html_out)
    output.check()
    interrupts = Interrupts()
    found, knee = _run(_sweep(settings, plan, rule, interrupts), interrupts)
    own_words = {"arrivals": f"open loop, {arrivals.value}", "sustained": rule.words()}
    words = described(settings, words_of(given)) | own_words
    report = Report("sweep", _now(), words, machine(), tuple(found), knee, targets_in(settings.targets))
    show_table(STEP_HEADS, [step_row(each) for each in found])
    typer.echo(knee_line(knee))
    output.write(report)
    _finish(found, interrupts)


def _plan_of(given: dict[str, Any], settings: RunSettings) -> tuple[Plan, Rule]:
    """Which rates are tried, and which of them are sustained. BadParameter for what cannot be."""
    try:
        rates = rates_of(given["rates"])
        plan = Plan(given["first_rate"], given["factor"], given["max_rate"], given["refine"], rates)
        return plan, Rule(bool(settings.targets), given["good_share"], given["kept_share"])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


async def _sweep(settings: RunSettings, plan: Plan, rule: Rule, interrupts: Interrupts) -> tuple[list[Round], Knee]:
    watcher = progress_for_stderr()
    async with connected(settings.server, [tenant.key for tenant in settings.tenants]) as target:

        async def measure(rate: float) -> Round:
            assert settings.pace is not None
            # Prompts of its own for each rate: the server's prefix cache may know those of the others.
            seed = settings.seed * _SEED_STRIDE + round(rate * 1000)
            one = dataclasses.replace(settings, pace=dataclasses.replace(settings.pace, rate=rate), seed=seed)
            found = await run_round(one, target, watcher, interrupts, f"{rate:g} requests/s")
            verdict = "sustained" if rule.holds(found) else "not sustained"
            typer.echo(f"{rate:g} requests/s: {verdict} ({found.rates.ok:.2f} ok/s)", err=True)
            return found

        return await sweep(plan, rule, measure)


def _run(work: Coroutine[Any, Any, T], interrupts: Interrupts) -> T:
    async def with_signals() -> T:
        with interrupts.installed():
            return await work

    try:
        return asyncio.run(with_signals())
    except RequestFailed as failure:
        typer.echo(terminal_text(f"tokenwire: {failure.message}"), err=True)
        raise typer.Exit(EXIT_FAILED) from None


def _finish(rounds: Sequence[Round], interrupts: Interrupts) -> None:
    """Exit codes: 130 when interrupted, 1 when requests failed and not a single one ended well."""
    if interrupts.seen:
        raise typer.Exit(EXIT_INTERRUPTED)
    if not any(each.counts.ok for each in rounds) and any(not each.counts.all_left for each in rounds):
        raise typer.Exit(EXIT_FAILED)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
