"""Events as messages: every field of a response, and which stay unset."""

import pytest

from tokenizer_service.api.responses import StreamResponse, delta_response, last_response, model_message
from tokenizer_service.engines.messages import FinishReason, ModelInfo, SamplingOptions, Usage
from tokenizer_service.sessions.events import (
    Completed,
    TextDelta,
    TextLogprob,
    TextPositionLogprobs,
    ToolCallDelta,
)
from tokenwire.common.v1 import outcome_pb2
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb

KINDS = [pb.GenerateResponse, pb.ChatResponse]
OWN = TextLogprob(5, b"\xf0", -0.5)
POSITION = TextPositionLogprobs(OWN, 1, (OWN, TextLogprob(6, b"x", -1.5)))
FIRST = TextPositionLogprobs(None, 0, ())
OWN_MESSAGE = pb.TextLogprob(token_id=5, token=b"\xf0", logprob=-0.5)
POSITION_MESSAGE = pb.TextPositionLogprobs(
    token=OWN_MESSAGE, rank=1, top=[OWN_MESSAGE, pb.TextLogprob(token_id=6, token=b"x", logprob=-1.5)]
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_delta_is_text_and_tokens_only(kind: type[StreamResponse]) -> None:
    message = delta_response(kind, TextDelta("a", (1, 2)))
    assert message == kind(text="a", token_ids=[1, 2])
    assert [field.name for field, _ in message.ListFields()] == ["text", "token_ids"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_delta_with_everything(kind: type[StreamResponse]) -> None:
    message = delta_response(kind, TextDelta("a", (5,), 3, (POSITION,), (FIRST, POSITION)))
    expected = kind(
        text="a",
        token_ids=[5],
        index=3,
        logprobs=[POSITION_MESSAGE],
        prompt_logprobs=[pb.TextPositionLogprobs(), POSITION_MESSAGE],
    )
    assert message == expected
    assert not message.prompt_logprobs[0].HasField("token")


def test_tool_calls_are_a_chat_s() -> None:
    calls = (ToolCallDelta(0, "call_1", "a", ""), ToolCallDelta(0, None, None, '{"x"'))
    message = delta_response(pb.ChatResponse, TextDelta("", (), 0, (), (), calls))
    assert message == pb.ChatResponse(
        tool_calls=[
            pb.ToolCallDelta(index=0, id="call_1", name="a"),
            pb.ToolCallDelta(index=0, arguments='{"x"'),
        ]
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reason", FinishReason)
def test_a_sample_s_last_message(kind: type[StreamResponse], reason: FinishReason) -> None:
    end = Completed(reason, Usage(3, 2, 1), "stop", None, -7, 4, True)
    assert last_response(kind, "r", end) == kind(
        index=4,
        completion=pb.Completion(
            request_id="r",
            finish_reason=outcome_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}"),
            usage=outcome_pb2.Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1),
            stop_string="stop",
            seed=-7,
            has_tool_calls=True,
        ),
    )


def test_a_model_shows_its_defaults_while_it_is_connected() -> None:
    info = ModelInfo("m", 100, 50, frozenset({2}), "abc", "e", SamplingOptions(temperature=0.6, top_k=0))
    message = model_message("m", info, vocab_size=100, fingerprint="abc", connected=2)
    assert (message.default_sampling.temperature, message.default_sampling.HasField("top_k")) == (0.6, True)
    gone = model_message("m", None, vocab_size=100, fingerprint="abc", connected=0)
    assert not gone.HasField("default_sampling")
