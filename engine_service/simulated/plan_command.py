"""`tokenwire load plan`: how many engines for a rate, or what rate for some engines, from a step model.

A plugin of the client's command line (entry point group `tokenwire.load`), since it needs the engine's scheduler.
Must not know: sockets, running services.
"""

from pathlib import Path
from typing import Annotated

import typer

from engine_service.core.admission import servable_model_len
from engine_service.core.scheduler import SchedulerConfig
from engine_service.simulated.capacity import CapacityPlanner, Goal, Outcome, Workload
from engine_service.simulated.step_model import BadStepModel, StepModel

_BLOCK_SIZE = 32
_HEADER = "engines  requests/s    good  TTFT p50     p99  TPOT p50     p99  tokens/s  busy  refused"


def plan(
    step_model: Annotated[Path, typer.Option(help="File of a step model (python -m benchmarks.engine.fit_steps).")],
    rate: Annotated[
        float | None, typer.Option(min=0.001, max=1e6, help="Requests per second: how many engines do they need?")
    ] = None,
    engines: Annotated[
        int | None, typer.Option(min=1, max=256, help="Engines: what rate do they serve? Unset with --rate.")
    ] = None,
    input_tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="Mean length of a prompt.")] = 500,
    output_tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="Mean length of a completion.")] = 128,
    shared_tokens: Annotated[int, typer.Option(min=0, max=1_000_000, help="Common first part of all prompts.")] = 0,
    spread: Annotated[float, typer.Option(min=0, max=1, help="Lengths differ by this share of the mean.")] = 0.5,
    ttft: Annotated[float, typer.Option(min=0.001, max=3600, help="Seconds to the first token, at most.")] = 1.0,
    tpot: Annotated[float, typer.Option(min=0.0001, max=60, help="Seconds for each further token, at most.")] = 0.1,
    share: Annotated[float, typer.Option(min=0.01, max=1, help="Share of requests that must keep both.")] = 0.99,
    requests: Annotated[int, typer.Option(min=10, max=100_000, help="Requests of a simulated run.")] = 500,
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths.")] = 0,
    kv_tokens: Annotated[int, typer.Option(min=64, help="Token positions in the KV cache of an engine.")] = 65_536,
    max_num_requests: Annotated[int, typer.Option(min=1, max=65_536, help="As the engine's flag.")] = 256,
    step_token_budget: Annotated[int, typer.Option(min=1, max=1_048_576, help="As the engine's flag.")] = 512,
    prefill_per_decode: Annotated[int, typer.Option(min=0, max=1_048_576, help="As the engine's flag.")] = 4,
) -> None:
    """Capacity by simulation: the engine's own scheduler in virtual time. Give --rate or --engines, or both."""
    if rate is None and engines is None:
        raise typer.BadParameter("give --rate, --engines or both")
    try:
        planner = CapacityPlanner(
            StepModel.load(step_model),
            _scheduler(kv_tokens, max_num_requests, step_token_budget, prefill_per_decode),
            Workload(input_tokens, output_tokens, spread, shared_tokens, requests, seed),
            Goal(ttft, tpot, share),
        )
    except (BadStepModel, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(_HEADER)
    typer.echo(_answer(planner, rate, engines))


def _scheduler(kv_tokens: int, max_num_requests: int, budget: int, prefill_per_decode: int) -> SchedulerConfig:
    num_blocks = kv_tokens // _BLOCK_SIZE
    return SchedulerConfig(
        block_size=_BLOCK_SIZE,
        num_blocks=num_blocks,
        step_token_budget=budget,
        prefill_chunk_size=budget,
        max_num_requests=max_num_requests,
        max_waiting_requests=2048,
        max_waiting_tokens=4_000_000,
        max_model_len=servable_model_len(1_000_000, _BLOCK_SIZE, num_blocks),
        eos_token_ids=frozenset(),
        prefix_cache=True,
        prefill_per_decode=prefill_per_decode,
    )


def _answer(planner: CapacityPlanner, rate: float | None, engines: int | None) -> str:
    if rate is not None and engines is not None:
        outcome = planner.outcome(engines, rate)
        _show(outcome)
        return "goal met" if outcome.meets(planner.goal) else "goal missed"
    if rate is not None:
        needed = planner.engines_for(rate, _show)
        return (
            f"{rate:g} requests/s need {needed} engines" if needed else f"256 engines do not serve {rate:g} requests/s"
        )
    assert engines is not None
    return f"{engines} engines serve {planner.highest_rate(engines, _show):.3g} requests/s"


def _show(outcome: Outcome) -> None:
    typer.echo(
        f"{outcome.engines:7d}  {outcome.rate:10.3g}  {outcome.good_share:6.1%}"
        f"  {outcome.ttft_p50 * 1e3:5.0f} ms{outcome.ttft_p99 * 1e3:5.0f} ms"
        f"  {outcome.tpot_p50 * 1e3:5.1f} ms{outcome.tpot_p99 * 1e3:5.1f} ms"
        f"  {outcome.output_tokens_per_s:8.0f}  {outcome.busy:4.0%}  {outcome.refused:7d}"
    )
