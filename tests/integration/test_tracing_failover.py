"""The trace of a request whose engine is killed: both engines are in it, and what lay between."""

import asyncio
import secrets
from pathlib import Path

import pytest

from benchmarks.serving.trace_collector import collector
from tests.fixtures.fleet import Fleet, FleetEngine, running_fleet
from tokenwire_client import NO_RETRIES, AsyncClient, Sampling

LENGTH = 800
REQUEST = "text_completion hist"


async def busy(fleet: Fleet) -> FleetEngine:
    loads = [(await engine.load()).running_requests for engine in fleet.engines]
    assert max(loads) > 0
    return fleet.engines[loads.index(max(loads))]


async def test_a_killed_engine_is_in_the_trace(hist_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    trace_id = secrets.token_hex(16)
    logs = tmp_path_factory.mktemp("fleet")
    with collector() as made:
        flags = ("--otlp-endpoint", made.endpoint, "--served-model-name", "hist")
        engine_flags = (*flags, "--num-blocks", "2048", "--threads", "1")
        async with (
            running_fleet(hist_folder, logs, 2, engine_flags=engine_flags, tokenizer_flags=flags) as fleet,
            AsyncClient(fleet.target, retry=NO_RETRIES, timeout=60) as client,
        ):
            sampling = Sampling(max_tokens=LENGTH, ignore_eos=True, seed=1)
            parent = f"00-{trace_id}-{secrets.token_hex(8)}-01"
            stream = client.generate([5, 6, 7], sampling, traceparent=parent)
            deltas = aiter(stream)
            await anext(deltas)
            killed = await busy(fleet)
            await killed.kill()
            completion = await stream.result()
            assert len(completion.token_ids) == LENGTH
            tree = await asyncio.to_thread(made.wait_trace, trace_id, REQUEST, "generate", "generate", "engine")

    request = tree.named(REQUEST)
    assert sorted(tree.children(request)) == sorted(
        ["validate", "encode", "route", "generate", "wait for engine", "generate", "deliver"]
    )
    first, second = tree.all_named("generate")
    assert (first.attributes["server.address"], first.attributes["tokenwire.loss"]) == (killed.address, "lost")
    assert (first.attributes["error.type"], first.is_error) == ("UNAVAILABLE", True)
    resumed = second.attributes["tokenwire.resumed_tokens"]
    assert 0 < resumed < LENGTH
    assert (second.is_error, second.attributes["server.address"] != killed.address) == (False, True)
    wait = tree.named("wait for engine")
    assert (wait.attributes["tokenwire.loss"], wait.attributes["tokenwire.resumed_tokens"]) == ("lost", resumed)
    assert first.ended <= wait.began + 0.005
    assert abs(wait.ended - second.began) < 0.05
    # The killed engine had no time to tell its own; the other's is under the attempt that it served.
    (engine,) = tree.all_named("engine")
    assert engine.parent_id == second.span_id
    assert engine.attributes["tokenwire.resumed_tokens"] == resumed
    assert (request.is_error, request.attributes["gen_ai.usage.output_tokens"]) == (False, LENGTH)
