"""Requests that cannot be read are explained, at a bounded cost."""

import pytest

from service_runtime.wire import MAX_FIELDS_READ, Malformed, request_parser
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb

BAD_MODEL = b"\x0a\x01\xff"
A_TOKEN = b"\x10\x01"
AN_EMPTY_MESSAGE = b"\x12\x00"


def test_a_good_message_is_read() -> None:
    request = pb.DetokenizeRequest(model="m", token_ids=[1, 2])
    assert request_parser(pb.DetokenizeRequest)(request.SerializeToString()) == request


@pytest.mark.parametrize(
    ("kind", "data", "field"),
    [
        (pb.DetokenizeRequest, A_TOKEN * 10 + BAD_MODEL, "model"),
        (pb.ChatRequest, AN_EMPTY_MESSAGE * 2 + b"\x12\x03\x0a\x01\xff", "messages[2].role"),
        (pb.ChatRequest, b"\x12\xff", ""),
        (pb.DetokenizeRequest, A_TOKEN * MAX_FIELDS_READ + BAD_MODEL, ""),
        (pb.ChatRequest, AN_EMPTY_MESSAGE * MAX_FIELDS_READ + BAD_MODEL, ""),
    ],
    ids=["field", "nested", "truncated", "behind too many fields", "behind too many messages"],
)
def test_a_bad_message_is_named_by_its_field_as_far_as_that_is_cheap(
    kind: type[pb.DetokenizeRequest] | type[pb.ChatRequest], data: bytes, field: str
) -> None:
    answer = request_parser(kind)(data)
    assert isinstance(answer, Malformed)
    assert answer.field == field
