"""VllmEngine.Generate and Abort over real sockets: the gateway's stubs against facade and scheduler."""

import asyncio
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm_pb2

from tests.fixtures.engine_calls import slow_steps, until
from tests.fixtures.gateway import answers, gateway_request, scripted_facade
from tests.fixtures.scripted_engine import continuation
from tokenwire.engine.v1 import engine_pb2

WAIT_S = 10.0


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(answers(call), WAIT_S)
    return caught.value


async def until_free(facade: Any) -> None:
    """Returns when no request is live and no block is in use; fails after a second."""
    async with asyncio.timeout(1.0):
        while True:
            load = await facade.service.stub.GetLoad(engine_pb2.GetLoadRequest())
            if facade.service.handle.num_live == load.used_blocks == load.running_requests == 0:
                return
            facade.service.worker.allow()
            await asyncio.sleep(0.01)


async def test_stream_and_whole_answer_tell_the_same() -> None:
    async with scripted_facade() as facade:
        tokens, streamed = await answers(facade.stub.Generate(gateway_request([5, 6, 7], max_tokens=9)))
        none, whole = await answers(facade.stub.Generate(gateway_request([5, 6, 7], max_tokens=9, stream=False)))
    assert tokens[0] == continuation([5, 6, 7], 9)
    assert none == {}
    assert list(whole[0].output_ids) == list(streamed[0].output_ids) == tokens[0]
    for last in (streamed[0], whole[0]):
        assert (last.finish_reason, last.prompt_tokens, last.completion_tokens) == ("length", 3, 9)
        assert last.WhichOneof("matched_stop") is None


async def test_samples_are_tagged_and_each_has_a_last_word() -> None:
    async with scripted_facade() as facade:
        tokens, last = await answers(facade.stub.Generate(gateway_request([5, 6, 7], n=3, max_tokens=6)))
    assert sorted(tokens) == sorted(last) == [0, 1, 2]
    assert all(list(last[index].output_ids) == tokens[index] == continuation([5, 6, 7], 6) for index in tokens)


async def test_a_stop_token_is_named_and_counted() -> None:
    stop = continuation([5], 4)[3]
    async with scripted_facade() as facade:
        tokens, last = await answers(facade.stub.Generate(gateway_request([5], max_tokens=9, stop_token_ids=[stop])))
    assert tokens[0] == continuation([5], 4)
    assert (last[0].finish_reason, last[0].matched_token_id, last[0].completion_tokens) == ("stop", stop, 4)


async def test_prompt_and_max_tokens_over_the_context_are_clamped() -> None:
    async with scripted_facade() as facade:
        prompt = [7] * 500
        _, last = await answers(facade.stub.Generate(gateway_request(prompt, max_tokens=400, stream=False)))
    assert (last[0].finish_reason, last[0].completion_tokens) == ("length", 12)


REFUSED = [
    (gateway_request([]), "tokenized.input_ids", "empty"),
    (gateway_request([7] * 513), "tokenized.input_ids", "513"),
    (gateway_request([512]), "tokenized.input_ids", "512"),
    (gateway_request([5], top_p=1.5), "sampling_params.top_p", "1.5"),
    (gateway_request([5], n=65), "sampling_params.n", "65"),
    (gateway_request([5], logprobs=-1), "sampling_params.logprobs", "-1"),
    (gateway_request([5], min_tokens=9), "sampling_params.min_tokens", "9"),
    (gateway_request([5], max_tokens=0), "sampling_params.max_tokens", "0"),
    (gateway_request([5], stop=[""]), "sampling_params.stop", "0 characters"),
    (gateway_request([5], stop=["x"] * 17), "sampling_params.stop", "17"),
    (gateway_request([5], structural_tag="{}"), "sampling_params.structural_tag", "json_schema"),
    (gateway_request([5], truncate_prompt_tokens=1), "sampling_params.truncate_prompt_tokens", "shorter"),
    (gateway_request([5], json_object=False), "sampling_params.structured_output", "json_object"),
    (vllm_pb2.GenerateRequest(text="Hello"), "text", "token ids"),
    (vllm_pb2.GenerateRequest(data_parallel_rank=1), "data_parallel_rank", "1"),
    (vllm_pb2.GenerateRequest(kv_transfer_params_json="{}"), "kv_transfer_params_json", "KV transfer"),
    (vllm_pb2.GenerateRequest(mm_inputs=vllm_pb2.MultimodalInputs()), "mm_inputs", "image"),
    (vllm_pb2.GenerateRequest(media_refs=vllm_pb2.MediaRefs()), "media_refs", "image"),
    (vllm_pb2.GenerateRequest(extra_mm_inputs=[vllm_pb2.MultimodalInputs()]), "extra_mm_inputs", "tokens"),
    (vllm_pb2.GenerateRequest(kv_transfer_params=vllm_pb2.KvTransferParams()), "kv_transfer_params", "KV"),
]


@pytest.mark.parametrize(
    ("request_", "field", "words"), REFUSED, ids=[f"{field}-{words}" for _, field, words in REFUSED]
)
async def test_a_clients_mistake_is_a_status_that_names_the_field(request_: Any, field: str, words: str) -> None:
    async with scripted_facade() as facade:
        error = await failure(facade.stub.Generate(request_))
        assert facade.service.handle.num_live == 0
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in (error.details() or "")
    assert field.encode() in dict(error.trailing_metadata())["grpc-status-details-bin"]


async def test_bytes_that_are_no_request_are_refused() -> None:
    async with scripted_facade() as facade:
        call = facade.channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")(b"\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_every_field_of_a_request_is_carried_refused_or_known_to_mean_nothing() -> None:
    """A field that a newer release adds must be looked at here."""
    handled = {"request_id", "tokenized", "sampling_params", "stream"}
    refused = {field.split(".")[0] for _, field, _ in REFUSED}
    assert {field.name for field in vllm_pb2.GenerateRequest.DESCRIPTOR.fields} == handled | refused - {"tokenized"}
    means_nothing = {
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "grammar_from_first_token",
    }
    carried = {"temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"}
    carried |= {"max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "n", "logprobs", "prompt_logprobs"}
    carried |= {"seed", "logit_bias", "json_schema", "regex", "grammar", "json_object", "choice"}
    refused = {"truncate_prompt_tokens", "structural_tag"}
    names = {field.name for field in vllm_pb2.SamplingParams.DESCRIPTOR.fields}
    assert names == carried | refused | means_nothing


async def test_a_full_queue_is_resource_exhausted_before_any_header() -> None:
    async with scripted_facade(gated=True, max_num_requests=1, max_waiting_requests=1) as facade:
        calls = [facade.stub.Generate(gateway_request([5 + place], max_tokens=400)) for place in range(4)]
        async with slow_steps(facade.service):
            codes = [asyncio.ensure_future(call.code()) for call in calls]
            async with asyncio.timeout(WAIT_S):
                done, _ = await asyncio.wait(codes, return_when=asyncio.FIRST_COMPLETED)
        assert {code.result() for code in done} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        for call in calls:
            call.cancel()
        await asyncio.gather(*codes)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_first_token_frees_its_blocks(stream: bool) -> None:
    async with scripted_facade(gated=True) as facade:
        call = facade.stub.Generate(gateway_request([5] * 20, max_tokens=400, stream=stream))
        reading = asyncio.ensure_future(call.read())
        await until(lambda: facade.service.handle.num_live == 1)
        call.cancel()
        await until_free(facade)
        with pytest.raises(asyncio.CancelledError):
            await reading


async def test_abort_ends_a_stream_with_a_last_word() -> None:
    async with scripted_facade(gated=True) as facade:
        call = facade.stub.Generate(gateway_request([5, 6], max_tokens=400, request_id="mine", n=2))
        facade.service.worker.allow(3)
        first = await asyncio.wait_for(call.read(), WAIT_S)
        assert first.WhichOneof("response") == "chunk"
        request = vllm_pb2.AbortRequest(request_ids=["unknown", "mine", "mine"])
        abort = asyncio.ensure_future(facade.stub.Abort(request, timeout=WAIT_S))
        while not abort.done():  # step by step, so that the request cannot end by itself meanwhile
            facade.service.worker.allow(1)
            await asyncio.wait({abort}, timeout=0.02)
        await abort
        _, last = await asyncio.wait_for(answers(call), WAIT_S)
        assert [last[index].finish_reason for index in (0, 1)] == ["abort", "abort"]
        await until_free(facade)
        await facade.stub.Abort(vllm_pb2.AbortRequest(request_ids=["mine"]), timeout=WAIT_S)


async def test_a_deadline_is_a_status() -> None:
    async with scripted_facade(gated=True) as facade:
        error = await failure(facade.stub.Generate(gateway_request([5], max_tokens=400), timeout=0.2))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until_free(facade)


async def test_no_header_goes_out_before_the_first_message() -> None:
    async with scripted_facade(gated=True) as facade:
        call = facade.stub.Generate(gateway_request([5], max_tokens=3))
        headers = asyncio.ensure_future(call.initial_metadata())
        await until(lambda: bool(facade.service.worker.plans))
        assert not headers.done()
        facade.service.worker.open_gate()
        await asyncio.wait_for(headers, WAIT_S)
        await answers(call)
