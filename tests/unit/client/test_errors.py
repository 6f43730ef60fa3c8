"""Exceptions: classes by code, details from the status, and statuses that are broken."""

import pickle

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from tokenwire_client import errors
from tokenwire_client.errors import ErrorCode, FieldViolation, TokenwireError, error_for
from tokenwire_client.rpc_errors import translate

KEY = "grpc-status-details-bin"


def packed(*details: object) -> bytes:
    status = status_pb2.Status(code=8, message="full")
    for detail in details:
        wrapped = any_pb2.Any()
        wrapped.Pack(detail)
        status.details.append(wrapped)
    return status.SerializeToString()


def test_every_grpc_code_has_an_exception() -> None:
    for code in grpc.StatusCode:
        if code is not grpc.StatusCode.OK:
            error = translate(code, "m", ())
            assert (error.code.name, error.message, str(error)) == (code.name, "m", "m")
            assert isinstance(error, TokenwireError)


def test_a_status_without_words_gets_those_of_its_code() -> None:
    assert translate(grpc.StatusCode.NOT_FOUND, "", None).message == "not found"


def test_details_packed_by_googleapis_are_read() -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field="top_p", description="1.5 > 1")
    delay = duration_pb2.Duration(seconds=1, nanos=250_000_000)
    value = packed(
        error_details_pb2.DebugInfo(detail="unused"),
        error_details_pb2.BadRequest(field_violations=[violation]),
        error_details_pb2.RetryInfo(retry_delay=delay),
    )
    error = translate(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", [("other", "x"), (KEY, value)])
    assert isinstance(error, errors.Overloaded)
    assert error.field_violations == (FieldViolation("top_p", "1.5 > 1"),)
    assert error.retry_after == 1.25


@pytest.mark.parametrize(("seconds", "retry_after"), [(0, 0.0), (-5, 0.0), (7, 7.0)])
def test_retry_after_is_never_negative(seconds: int, retry_after: float) -> None:
    info = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=seconds))
    assert translate(grpc.StatusCode.UNAVAILABLE, "", [(KEY, packed(info))]).retry_after == retry_after


def wrong_inside(name: str) -> bytes:
    status = status_pb2.Status(code=3)
    status.details.append(any_pb2.Any(type_url=f"type.googleapis.com/google.rpc.{name}", value=b"\xff"))
    return status.SerializeToString()


@pytest.mark.parametrize("value", [b"\xff\xff", b"", wrong_inside("BadRequest"), wrong_inside("RetryInfo")])
def test_broken_details_do_not_hide_the_status(value: bytes) -> None:
    error = translate(grpc.StatusCode.INVALID_ARGUMENT, "bad", [(KEY, value)])
    assert isinstance(error, errors.InvalidRequest)
    assert (error.retry_after, error.field_violations) == (None, ())


@pytest.mark.parametrize("code", ErrorCode)
def test_exceptions_survive_pickling(code: ErrorCode) -> None:
    error = error_for(code, "words", 1.5, (FieldViolation("a", "b"),))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (copy.code, copy.message, copy.retry_after, copy.field_violations) == error.args
