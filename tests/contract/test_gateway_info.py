"""What a gateway asks besides generation: health, model, server, load, tokenizer, events of the KV cache."""

import asyncio
import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm_pb2
from smg_grpc_proto.generated import common_pb2

from engine_service.api.vllm_compat import subscriptions
from tests.fixtures.checkpoints import write_byte_tokenizer
from tests.fixtures.gateway import answers, gateway_request, scripted_facade
from tests.fixtures.scripted_engine import continuation

WAIT_S = 10.0


async def status_of(awaitable: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(awaitable, WAIT_S)
    return caught.value.code()


def model_folder(folder: Path) -> Path:
    write_byte_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return folder


async def test_health_is_ok_only_while_requests_are_taken() -> None:
    async with scripted_facade() as facade:
        assert (await facade.stub.HealthCheck(vllm_pb2.HealthCheckRequest())).healthy
        facade.service.handle.drain()
        assert await status_of(facade.stub.HealthCheck(vllm_pb2.HealthCheckRequest())) is grpc.StatusCode.UNAVAILABLE
        assert await status_of(answers(facade.stub.Generate(gateway_request([5])))) is grpc.StatusCode.UNAVAILABLE


async def test_model_and_server_information(tmp_path: Path) -> None:
    async with scripted_facade(model_folder=str(model_folder(tmp_path))) as facade:
        info = await facade.stub.GetModelInfo(vllm_pb2.GetModelInfoRequest())
        server = await facade.stub.GetServerInfo(vllm_pb2.GetServerInfoRequest())
    assert (info.served_model_name, info.tokenizer_path, info.model_path) == ("scripted", str(tmp_path), str(tmp_path))
    assert (info.max_context_length, info.vocab_size, list(info.eos_token_ids)) == (512, 512, [0])
    assert (info.model_type, list(info.architectures)) == ("llama", ["LlamaForCausalLM"])
    assert info.default_sampling_params_json == ""
    assert (server.max_num_seqs, server.active_requests, server.data_parallel_size) == (16, 0, 1)


async def test_load_counts_blocks_in_use_not_those_kept_for_later() -> None:
    async with scripted_facade(gated=True) as facade:
        call = facade.stub.Generate(gateway_request([5] * 8, max_tokens=40))
        facade.service.worker.allow(3)
        await asyncio.wait_for(call.read(), WAIT_S)
        (busy,) = (await facade.stub.GetLoads(vllm_pb2.GetLoadsRequest(include=["core"]))).loads
        assert (busy.num_running_reqs, busy.num_waiting_reqs, busy.max_running_requests) == (1, 0, 16)
        assert busy.token_usage == busy.num_used_tokens / busy.max_total_num_tokens > 0
        facade.service.worker.open_gate()
        await answers(call)
        (idle,) = (await facade.stub.GetLoads(vllm_pb2.GetLoadsRequest())).loads
        assert (idle.num_running_reqs, idle.num_used_tokens, idle.token_usage) == (0, 0, 0.0)
        assert not (await facade.stub.GetLoads(vllm_pb2.GetLoadsRequest(dp_rank=1))).loads


async def test_the_tokenizer_comes_as_a_zip_with_its_digest(tmp_path: Path) -> None:
    async with scripted_facade(model_folder=str(model_folder(tmp_path))) as facade:
        chunks = [chunk async for chunk in facade.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    assert not any(chunk.sha256 for chunk in chunks[:-1])
    archive = zipfile.ZipFile(io.BytesIO(data))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        assert archive.read(name) == (tmp_path / name).read_bytes()


async def test_a_folder_without_tokenizer_says_so(tmp_path: Path) -> None:
    async with scripted_facade(model_folder=str(tmp_path)) as facade:
        call = facade.stub.GetTokenizer(common_pb2.GetTokenizerRequest())
        assert await status_of(call.read()) is grpc.StatusCode.NOT_FOUND


async def test_a_stop_string_ends_the_work(tmp_path: Path) -> None:
    """Every token of the byte tokenizer from 3 on is a piece of text: take one that the answer reaches."""
    from tokenizers import Tokenizer

    folder = model_folder(tmp_path)
    tokens = continuation([5], 40)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    place = next(place for place in range(8, 40) if tokenizer.decode([tokens[place]]).isalpha())
    stop = tokenizer.decode([tokens[place]])
    first = next(place for place in range(40) if stop in tokenizer.decode(tokens[: place + 1]))
    for stream in (True, False):
        async with scripted_facade(model_folder=str(folder)) as facade:
            request = gateway_request([5], max_tokens=400, stop=["never in it", stop], stream=stream)
            told, last = await answers(facade.stub.Generate(request))
        assert list(last[0].output_ids) == tokens[: first + 1]
        assert (last[0].finish_reason, last[0].matched_stop_str) == ("stop", stop)
        assert last[0].completion_tokens == first + 1
        assert told == ({0: tokens[: first + 1]} if stream else {})


def applied(batches: list[Any], known: dict[int, list[int]]) -> dict[int, list[int]]:
    """name -> tokens of the whole prefix, after the batches."""
    for batch in batches:
        for event in batch.events:
            match event.WhichOneof("data"):
                case "cleared":
                    known.clear()
                case "removed":
                    for name in event.removed.block_hashes:
                        del known[name]
                case "stored":
                    stored = event.stored
                    prefix = known[stored.parent_block_hash] if stored.HasField("parent_block_hash") else []
                    for block in stored.blocks:
                        assert len(block.token_ids) == block.block_size == 4
                        prefix = known[block.block_hash] = prefix + list(block.token_ids)
    return known


async def read_events(call: Any, known: dict[int, list[int]], wanted: set[tuple[int, ...]]) -> list[int]:
    """Reads until exactly the wanted prefixes are known; the sequence numbers read."""
    numbers = []
    async with asyncio.timeout(WAIT_S):
        while not numbers or {tuple(prefix) for prefix in known.values()} != wanted:
            batch = await call.read()
            numbers.append(batch.sequence_number)
            applied([batch], known)
    return numbers


def prefixes(prompt: list[int], generated: int) -> set[tuple[int, ...]]:
    """All prefixes of full blocks of 4 whose KV has been computed: the last token's never is."""
    tokens = prompt + continuation(prompt, generated)
    return {tuple(tokens[:end]) for end in range(4, len(tokens), 4)}


async def test_kv_events_mirror_the_prefix_cache() -> None:
    """A snapshot of what is there, then what comes and goes; a pool of 8 blocks has to evict."""
    first, second = [5] * 8, [9] * 16
    async with scripted_facade(num_blocks=8, max_model_len=32) as facade:
        await answers(facade.stub.Generate(gateway_request(first, max_tokens=5)))
        call = facade.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        await asyncio.wait_for(call.initial_metadata(), WAIT_S)
        known: dict[int, list[int]] = {}
        numbers = await read_events(call, known, prefixes(first, 5))
        await answers(facade.stub.Generate(gateway_request(second, max_tokens=13)))
        numbers += await read_events(call, known, {p for p in prefixes(first, 5) if len(p) <= 4} | prefixes(second, 13))
        call.cancel()
    assert numbers == list(range(1, len(numbers) + 1))


async def test_an_idle_engine_answers_a_subscription_at_once() -> None:
    async with scripted_facade() as facade:
        call = facade.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        batch = await asyncio.wait_for(call.read(), WAIT_S)
        assert (batch.sequence_number, [event.WhichOneof("data") for event in batch.events]) == (1, ["cleared"])
        call.cancel()


async def test_a_stream_of_events_cannot_be_taken_up_again() -> None:
    async with scripted_facade() as facade:
        request = common_pb2.SubscribeKvEventsRequest(start_sequence_number=7)
        assert await status_of(facade.stub.SubscribeKvEvents(request).read()) is grpc.StatusCode.OUT_OF_RANGE


async def test_salted_blocks_are_never_told() -> None:
    from tests.fixtures.engine_calls import collect, token_request
    from tokenwire.engine.v1 import engine_pb2

    async with scripted_facade() as facade:
        salted = token_request([5] * 12)
        salted.cache_salt = "tenant"
        await collect(facade.service.stub.Generate(engine_pb2.GenerateRequest(request=salted)))
        call = facade.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        await answers(facade.stub.Generate(gateway_request([6] * 8, max_tokens=2)))
        known: dict[int, list[int]] = {}
        await read_events(call, known, prefixes([6] * 8, 2))
        call.cancel()


async def test_the_end_of_the_engine_ends_the_events() -> None:
    async with scripted_facade(poison=13) as facade:
        call = facade.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        await asyncio.wait_for(call.read(), WAIT_S)
        await status_of(answers(facade.stub.Generate(gateway_request([13]))))
        assert await status_of(call.read()) is grpc.StatusCode.UNAVAILABLE
        assert await status_of(facade.stub.HealthCheck(vllm_pb2.HealthCheckRequest())) is grpc.StatusCode.UNAVAILABLE


async def test_streams_of_events_are_bounded() -> None:
    async with scripted_facade() as facade:
        calls = [
            facade.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
            for _ in range(subscriptions.MAX_SUBSCRIPTIONS)
        ]
        for call in calls:
            await asyncio.wait_for(call.read(), WAIT_S)
        late = facade.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        assert await status_of(late.read()) is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()
