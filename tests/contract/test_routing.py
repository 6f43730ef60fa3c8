"""The tokenizer service over two engines with real schedulers, caches and event streams; only the model is scripted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.fixtures.scripted_engine import SMALL, VOCAB, ScriptedService, scripted_service
from tests.fixtures.tokenizer_app import Service, collect, default_model, eventually, ids_request, running
from tokenwire.engine.v1 import engine_pb2
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb

PREFIX_TOKENS = 40
SAMPLING = {"max_tokens": 2, "temperature": 0.0}


@dataclass(frozen=True, slots=True)
class Fleet:
    service: Service
    engines: tuple[ScriptedService, ...]

    async def ask(self, prompt: list[int], salt: str = "") -> pb.Completion:
        return (
            await collect(self.service.stub.Generate(ids_request(prompt, sampling=SAMPLING, cache_salt=salt)))
        ).completion

    async def cached(self) -> list[int]:
        """Cached tokens of each engine so far."""
        loads = [await engine.stub.GetLoad(engine_pb2.GetLoadRequest()) for engine in self.engines]
        return [load.cached_tokens_total for load in loads]


@asynccontextmanager
async def fleet(count: int = 2, *, settings: dict[str, Any] | None = None, **config: Any) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(scripted_service(**config)) for _ in range(count)]
        addresses = tuple(engine.address for engine in engines)
        fields = {"engine": addresses, "allow_tokenizer_mismatch": True} | (settings or {})
        service = await stack.enter_async_context(running(default_model(), None, infos=(), wait=False, **fields))  # type: ignore[arg-type]
        await eventually(lambda: service.app.fleet.router.num_connected == count)
        yield Fleet(service, tuple(engines))


def prompts(prefix: int, count: int) -> list[list[int]]:
    """They share all but the last four tokens."""
    head = [1 + (prefix * 37 + place * 11) % (VOCAB - 1) for place in range(PREFIX_TOKENS)]
    return [[*head, 1 + prefix, 2 + number, 3 + number, 4] for number in range(count)]


def reasons(service: Service) -> dict[str, float]:
    names = ("only", "prefix", "load", "hot_spot", "turn")
    return {name: value for name in names if (value := service.metric("routed_requests_total", reason=name))}


async def test_shared_prefixes_go_to_their_holder_and_metrics_tell_why() -> None:
    async with fleet() as made:
        rounds = [prompts(prefix, 4) for prefix in range(6)]
        for number in range(4):
            for prefix in range(6):
                completion = await made.ask(rounds[prefix][number])
                assert completion.usage.cached_tokens == (0 if number == 0 else PREFIX_TOKENS)
        assert sum(await made.cached()) == 6 * 3 * PREFIX_TOKENS
        assert all(await made.cached())  # both had their share
        assert reasons(made.service) == {"load": 6, "prefix": 18}
        engines = [made.service.metric("engine_cached_tokens_total", engine=e.address) for e in made.engines]
        assert engines == await made.cached()
        await eventually(lambda: made.service.metric("prefix_map_blocks") > 6 * PREFIX_TOKENS / SMALL.block_size)


async def test_the_events_alone_lead_to_the_holder() -> None:
    """Nothing is expected any more, and the second service never sent the prompt itself."""
    async with fleet() as made:
        first, second = prompts(1, 2)
        await made.ask(first)
        settings = {"engine": tuple(e.address for e in made.engines), "allow_tokenizer_mismatch": True}
        async with running(default_model(), None, infos=(), wait=False, **settings) as other:  # type: ignore[arg-type]
            await eventually(lambda: len(other.app.fleet.router.prefixes) >= PREFIX_TOKENS // SMALL.block_size)
            answer = await collect(other.stub.Generate(ids_request(second, sampling=SAMPLING)))
            assert answer.completion.usage.cached_tokens == PREFIX_TOKENS
            assert reasons(other) == {"prefix": 1}


async def test_other_salts_share_nothing() -> None:
    async with fleet() as made:
        first, second, third = prompts(1, 3)
        await made.ask(first, "a")
        assert (await made.ask(second, "b")).usage.cached_tokens == 0
        assert (await made.ask(third, "a")).usage.cached_tokens == PREFIX_TOKENS


async def test_round_robin_watches_nothing_and_computes_prefixes_twice() -> None:
    async with fleet(settings={"routing": "round-robin"}) as made:
        for prompt in prompts(1, 4):
            await made.ask(prompt)
        assert await made.cached() == [PREFIX_TOKENS] * 2
        assert reasons(made.service) == {"turn": 4}
        assert not any(engine.handle.kv_feed._ears for engine in made.engines)


async def test_an_engine_that_restarts_is_known_to_be_empty() -> None:
    async with fleet(poison=13, restart=True) as made:
        first, second = prompts(1, 2)
        await made.ask(first)
        router = made.service.app.fleet.router
        await eventually(lambda: len(router.prefixes) > 0)
        holder = next(
            e for e, c in zip(made.engines, router.connections, strict=True) if c.blocks and c.blocks.num_blocks
        )
        epochs = [connection.model.engine_epoch for connection in router.connections if connection.model]
        assert epochs == ["epoch-1"] * 2
        failing = holder.stub.Generate(
            engine_pb2.GenerateRequest(request=engine_pb2.TokenRequest(prompt_token_ids=[13]))
        )
        await failing.code()
        await eventually(
            lambda: (
                router.num_connected == 2
                and {c.model.engine_epoch for c in router.connections if c.model} == {"epoch-1", "epoch-2"}
            )
        )
        assert sum(c.blocks.num_blocks for c in router.connections if c.blocks) == 0
        assert (await made.ask(second)).usage.cached_tokens == 0


async def test_engines_come_and_go_under_streams_and_none_fails() -> None:
    async with fleet(3) as made, scripted_service() as late:
        app = made.service.app
        replicas = app.fleet.replicas
        asked = [made.ask(prompt) for prefix in range(8) for prompt in prompts(prefix, 5)]
        tasks = [asyncio.create_task(each) for each in asked]
        await asyncio.sleep(0)
        assert replicas.add_by_operator(late.address) is None
        assert replicas.remove_by_operator(made.engines[0].address) is None
        done = await asyncio.gather(*tasks)
        assert [each.usage.completion_tokens for each in done] == [2] * 40
        await eventually(lambda: len(replicas.all()) == 3)
        assert (await made.ask(prompts(9, 1)[0])).usage.completion_tokens == 2
