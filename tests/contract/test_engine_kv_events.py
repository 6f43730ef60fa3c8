"""WatchKvEvents over real sockets, with the real scheduler, loop and mailbox."""

import asyncio
from unittest.mock import patch

import grpc

from engine_service.api import grpc_service, kv_mirror
from tests.fixtures.engine_calls import collect, token_request, until
from tests.fixtures.scripted_engine import SMALL, ScriptedService, continuation, scripted_service
from tokenizer_service.engines.block_digests import block_digests
from tokenwire.engine.v1 import engine_pb2

WAIT_S = 10.0
DIGEST = 16
Watch = grpc.aio.UnaryStreamCall[engine_pb2.WatchKvEventsRequest, engine_pb2.WatchKvEventsResponse]


def watch(service: ScriptedService) -> Watch:
    return service.stub.WatchKvEvents(engine_pb2.WatchKvEventsRequest())


async def generate(service: ScriptedService, prompt: list[int], tokens: int, salt: str = "") -> None:
    request = token_request(prompt, tokens)
    request.cache_salt = salt
    await collect(service.stub.Generate(engine_pb2.GenerateRequest(request=request)))


def blocks_of(prompt: list[int], tokens: int, salt: str = "") -> set[bytes]:
    """Those whose KV exists when so many tokens have been generated: the last one's never does."""
    history = prompt + continuation(prompt, tokens)
    return set(block_digests(history, SMALL.block_size, salt))


async def read(call: Watch, known: set[bytes], wanted: set[bytes]) -> list[int]:
    """Applies messages until exactly `wanted` is known; their sequence numbers."""
    numbers = []
    async with asyncio.timeout(WAIT_S):
        while not numbers or known != wanted:
            message = await call.read()
            assert isinstance(message, engine_pb2.WatchKvEventsResponse), await call.code()
            assert (message.block_size, bool(message.engine_epoch)) == (SMALL.block_size, True)
            numbers.append(message.sequence_number)
            for change in message.changes:
                match change.WhichOneof("change"):
                    case "cleared":
                        known.clear()
                    case "stored":
                        known |= split(change.stored)
                    case "removed":
                        known -= split(change.removed)
    return numbers


def split(joined: bytes) -> set[bytes]:
    assert len(joined) % DIGEST == 0
    return {joined[place : place + DIGEST] for place in range(0, len(joined), DIGEST)}


async def test_a_watch_begins_with_what_there_is_and_follows_every_change() -> None:
    """Blocks that are evicted are told as well; the numbers have no gap."""
    async with scripted_service(num_blocks=8, max_model_len=32) as service:
        first, second = [5] * 9, [6] * 13
        await generate(service, first, 5)
        call, known = watch(service), set[bytes]()
        numbers = await read(call, known, blocks_of(first, 5))
        await generate(service, second, 9)
        history = first + continuation(first, 5)
        kept = block_digests(history, SMALL.block_size, "")[:2]
        numbers += await read(call, known, blocks_of(second, 9) | set(kept))
        call.cancel()
    assert numbers == list(range(1, len(numbers) + 1))


async def test_a_salt_makes_other_digests_and_no_watch_records_nothing() -> None:
    async with scripted_service() as service:
        prompt = [5] * 9
        call, known = watch(service), set[bytes]()
        await read(call, known, set())
        await generate(service, prompt, 4, "tenant")
        await generate(service, prompt, 4)
        plain, salted = blocks_of(prompt, 4), blocks_of(prompt, 4, "tenant")
        assert not plain & salted
        await read(call, known, plain | salted)
        call.cancel()
        while service.handle.kv_feed._ears:  # noqa: ASYNC110 (the server's end of the call)
            await asyncio.sleep(0.01)
        await generate(service, [7] * 9, 4)
        again = watch(service)
        await read(again, known := set(), plain | salted | blocks_of([7] * 9, 4))
        again.cancel()


async def test_a_watcher_that_leaves_too_much_unread_is_told_all_again() -> None:
    with patch.object(kv_mirror, "MAX_UNREAD_BLOCKS", 2), patch.object(grpc_service, "_KV_PAUSE_SECONDS", 0.2):
        async with scripted_service() as service:
            call, known = watch(service), set[bytes]()
            await read(call, known, set())
            for token in (5, 6, 7):
                await generate(service, [token] * 9, 4)
            wanted = blocks_of([5] * 9, 4) | blocks_of([6] * 9, 4) | blocks_of([7] * 9, 4)
            message = await asyncio.wait_for(call.read(), WAIT_S)
            assert isinstance(message, engine_pb2.WatchKvEventsResponse)
            assert [change.WhichOneof("change") for change in message.changes] == ["cleared", "stored"]
            assert (message.sequence_number, split(message.changes[1].stored)) == (2, wanted)
            call.cancel()


async def test_the_end_of_the_engine_ends_the_watch_and_its_successor_starts_anew() -> None:
    async with scripted_service(poison=13, restart=True) as service:
        await generate(service, [5] * 9, 4)
        call, known = watch(service), set[bytes]()
        await read(call, known, blocks_of([5] * 9, 4))
        failing = service.stub.Generate(engine_pb2.GenerateRequest(request=token_request([13])))
        assert await failing.code() is grpc.StatusCode.UNAVAILABLE
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: service.handle.current is not None)
        assert await epoch_of(watch(service)) == "epoch-2"


async def epoch_of(call: Watch) -> str:
    """Of the first message, which tells of an empty cache."""
    message = await asyncio.wait_for(call.read(), WAIT_S)
    call.cancel()
    assert isinstance(message, engine_pb2.WatchKvEventsResponse)
    assert [change.WhichOneof("change") for change in message.changes] == ["cleared"]
    return message.engine_epoch


async def test_watches_are_bounded() -> None:
    with patch.object(kv_mirror, "MAX_WATCHERS", 2):
        async with scripted_service() as service:
            calls = [watch(service) for _ in range(2)]
            for call in calls:
                await asyncio.wait_for(call.read(), WAIT_S)
            assert await watch(service).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            for call in calls:
                call.cancel()
