"""Engines and tokenizers that fail under a stream: the status that the client gets, over real sockets."""

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.fixtures import fake_engine as fe
from tests.fixtures.script_s1 import S1_TEXT, s1
from tests.fixtures.tokenizer_app import collect, default_model, failure, ids_request, running
from tokenwire.common.v1 import outcome_pb2
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb

ENGINE_ERRORS = [
    (1, grpc.StatusCode.CANCELLED),
    (3, grpc.StatusCode.INVALID_ARGUMENT),
    (4, grpc.StatusCode.DEADLINE_EXCEEDED),
    (6, grpc.StatusCode.ALREADY_EXISTS),
    (8, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (13, grpc.StatusCode.INTERNAL),
    (14, grpc.StatusCode.UNAVAILABLE),
    (0, grpc.StatusCode.INTERNAL),
    (99, grpc.StatusCode.INTERNAL),
]


@pytest.mark.parametrize(("number", "status"), ENGINE_ERRORS)
async def test_engine_errors_pass_with_their_code_and_details(number: int, status: grpc.StatusCode) -> None:
    violation = outcome_pb2.FieldViolation(field="request.sampling.top_p", description="is 7")

    async def script(request: fe.FakeRequest) -> None:
        error = fe.error(number, "no, because of 42", field_violations=[violation])
        error.retry_delay.FromMilliseconds(1500)
        await request.send([13874])
        await request.send([], request.finish(fe.ERROR, error=error))

    async with running(default_model(), script) as service:
        error = await failure(service.stub.Generate(ids_request([5])))
        assert (error.code(), error.details()) == (status, "no, because of 42")
        status_proto = rpc_status.from_call(error)
        bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        assert status_proto.details[0].Unpack(bad)
        assert status_proto.details[1].Unpack(retry)
        assert bad.field_violations[0].field == "options.sampling.top_p"
        assert retry.retry_delay.ToMilliseconds() == 1500
        assert service.outcomes() == {("Generate", status.name): 1}


@pytest.mark.parametrize("reason", [0, fe.ABORT, fe.ERROR])
async def test_an_end_without_a_good_reason_is_no_success(
    reason: "outcome_pb2.FinishReason.ValueType",
) -> None:
    async def script(request: fe.FakeRequest) -> None:
        await request.send([13874], request.finish(reason))

    async with running(default_model(), script) as service:
        error = await failure(service.stub.Generate(ids_request([5])))
        expected = grpc.StatusCode.CANCELLED if reason == fe.ABORT else grpc.StatusCode.INTERNAL
        assert error.code() == expected


async def test_a_session_that_ends_without_finish_is_unavailable_within_a_second() -> None:
    async def script(request: fe.FakeRequest) -> None:
        await request.send([13874])
        await fe.until_cancelled(request)

    async with running(default_model(), script) as service:
        call = service.stub.Generate(ids_request([5]))
        assert (await anext(aiter(call))).text == " pepper"
        loop = asyncio.get_running_loop()
        started = loop.time()
        await service.engine.break_sessions()
        error = await failure(call)
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert loop.time() - started < 1.0


class _FailingDetokenizer:
    """Stands in for a detokenizer with a bug; B140."""

    def add(self, token_ids: Any) -> str:
        raise RuntimeError("/secret/path")

    def finish(self) -> str:
        return ""


@pytest.mark.parametrize("where", ["encode", "new_detokenizer", "add"])
async def test_a_tokenizer_failure_ends_that_request_alone(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B140: the request errors, its place is freed, the others go on."""
    encoder = default_model().encoder
    release = asyncio.Event()

    async def script(request: fe.FakeRequest) -> None:
        if request.client_id == "other":
            await release.wait()
        await s1(request)

    def fail(*_arguments: Any, **_options: Any) -> Any:
        raise RuntimeError("/secret/path")

    async with running(default_model(), script) as service:
        other = service.stub.Generate(ids_request([19556], request_id="other"))
        await service.engine.wait_until(lambda: len(service.engine.requests) == 1)
        with monkeypatch.context() as patch:
            if where == "add":
                patch.setattr(encoder, "new_detokenizer", lambda *_: _FailingDetokenizer())
            else:
                patch.setattr(encoder, where, fail)
            error = await failure(service.stub.Generate(pb.GenerateRequest(text="Hi"), timeout=5))
        assert error.code() == grpc.StatusCode.INTERNAL
        assert "secret" not in (error.details() or "")
        if where == "add":
            await service.engine.wait_until(lambda: service.engine.num_cancelled == 1)
        release.set()
        assert (await collect(other)).text == S1_TEXT
        assert service.metric("active_requests") == 0
