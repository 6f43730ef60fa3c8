"""Streams put together from messages, complete and broken ones."""

import pytest

from tokenwire.common.v1 import outcome_pb2
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb
from tokenwire_client.assembly import Assembly, new_assembly
from tokenwire_client.errors import IncompleteStream, Internal
from tokenwire_client.tools import Tool, ToolCall, ToolCallDelta
from tokenwire_client.types import Completion, Delta, FinishReason, PositionLogprobs, Sampling, TokenLogprob, Usage

LAST = pb.Completion(
    request_id="r",
    finish_reason=outcome_pb2.FINISH_REASON_STOP,
    usage=outcome_pb2.Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=4),
    seed=-7,
)


def test_deltas_add_up_to_the_completion() -> None:
    assembly = Assembly()
    assert not assembly.started
    assert assembly.add(pb.GenerateResponse(text="a", token_ids=[1])) == Delta("a", (1,))
    assert assembly.started
    assert assembly.add(pb.GenerateResponse(token_ids=[2])) == Delta("", (2,))
    assert assembly.add(pb.GenerateResponse()) is None
    assert assembly.completion is None
    assert assembly.add(pb.GenerateResponse(text="é", token_ids=[3], completion=LAST)) == Delta("é", (3,))
    assert assembly.completion is None
    expected = Completion("aé", (1, 2, 3), FinishReason.STOP, Usage(5, 3, 4), None, None, -7, "r")
    assert assembly.finish() == expected
    assert assembly.completion == expected


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_stream_without_its_terminal_message_is_an_error(count: int) -> None:
    assembly = Assembly()
    for token in range(count):
        assembly.add(pb.ChatResponse(text="x", token_ids=[token]))
    with pytest.raises(IncompleteStream, match=f"after {count} tokens"):
        assembly.finish()
    assert assembly.completion is None


def test_a_message_after_the_terminal_one_is_an_error() -> None:
    assembly = Assembly()
    assembly.add(pb.ChatResponse(completion=LAST))
    with pytest.raises(Internal):
        assembly.add(pb.ChatResponse(text="more"))


@pytest.mark.parametrize("reason", FinishReason)
def test_every_finish_reason_has_its_name(reason: FinishReason) -> None:
    number = outcome_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}")
    assembly = Assembly()
    assembly.add(pb.GenerateResponse(completion=pb.Completion(finish_reason=number)))
    assert assembly.finish().finish_reason is reason


def test_an_unknown_finish_reason_is_no_success() -> None:
    assembly = Assembly()
    assembly.add(pb.GenerateResponse(completion=pb.Completion()))
    with pytest.raises(Internal, match="finish reason"):
        assembly.finish()


@pytest.mark.parametrize(
    ("given", "string", "token"),
    [({}, None, None), ({"stop_string": ""}, "", None), ({"stop_token_id": 0}, None, 0)],
)
def test_the_stop_that_matched(given: dict[str, object], string: str | None, token: int | None) -> None:
    assembly = Assembly()
    assembly.add(pb.GenerateResponse(completion=pb.Completion(finish_reason=outcome_pb2.FINISH_REASON_STOP, **given)))
    completion = assembly.finish()
    assert (completion.stop_string, completion.stop_token_id) == (string, token)


def last(index: int, **fields: object) -> pb.ChatResponse:
    completion = pb.Completion(finish_reason=outcome_pb2.FINISH_REASON_STOP, seed=index, **fields)
    return pb.ChatResponse(index=index, completion=completion)


def test_samples_are_put_together_by_their_index() -> None:
    assembly = Assembly(3)
    assert assembly.add(pb.ChatResponse(index=2, text="c", token_ids=[3])) == Delta("c", (3,), 2)
    assembly.add(pb.ChatResponse(text="a", token_ids=[1]))
    assembly.add(last(2))
    assembly.add(pb.ChatResponse(text="b", token_ids=[2]))
    assembly.add(last(0))
    assembly.add(last(1))
    assert assembly.completions == ()
    assembly.finish()
    assert [(c.index, c.text, c.token_ids, c.seed) for c in assembly.completions] == [
        (0, "ab", (1, 2), 0),
        (1, "", (), 1),
        (2, "c", (3,), 2),
    ]
    assert assembly.completion == assembly.completions[0]


def test_a_stream_of_samples_needs_every_end() -> None:
    assembly = Assembly(3)
    assembly.add(last(1))
    with pytest.raises(IncompleteStream, match="after 0 tokens without its terminal message of 2 samples"):
        assembly.finish()
    assert assembly.completions == ()


def test_a_sample_that_has_ended_or_was_not_asked_for_is_an_error() -> None:
    assembly = Assembly(2)
    assembly.add(last(1))
    with pytest.raises(Internal, match="went on"):
        assembly.add(pb.ChatResponse(index=1, text="x"))
    with pytest.raises(Internal, match="sample 2"):
        assembly.add(last(2))


def test_log_probabilities_and_tool_calls() -> None:
    own = pb.TextLogprob(token_id=5, token=b"\xf0", logprob=-0.5)
    position = pb.TextPositionLogprobs(token=own, rank=2, top=[pb.TextLogprob(token_id=6, token=b"x", logprob=-0.25)])
    read = PositionLogprobs(TokenLogprob(5, b"\xf0", -0.5), 2, (TokenLogprob(6, b"x", -0.25),))
    first = PositionLogprobs(None, 0, ())
    assembly = Assembly()
    parts = [[pb.TextPositionLogprobs()], [position]]
    assert assembly.add(pb.ChatResponse(prompt_logprobs=parts[0])) == Delta("", (), 0, (), (first,))
    assembly.add(pb.ChatResponse(prompt_logprobs=parts[1]))
    assert assembly.add(pb.ChatResponse(token_ids=[5], logprobs=[position])) == Delta("", (5,), 0, (read,))
    call = pb.ToolCallDelta(index=1, id="c", name="f", arguments='{"a"')
    assert assembly.add(pb.ChatResponse(tool_calls=[call])) == Delta(
        "", (), 0, (), (), (ToolCallDelta(1, "c", "f", '{"a"'),)
    )
    assembly.add(pb.ChatResponse(tool_calls=[pb.ToolCallDelta(index=1, arguments=": 1}")]))
    assembly.add(pb.ChatResponse(tool_calls=[pb.ToolCallDelta(index=0, id="b", name="g", arguments="{}")]))
    assembly.add(last(0))
    completion = assembly.finish()
    assert (completion.logprobs, completion.prompt_logprobs) == ((read,), (first, read))
    assert completion.tool_calls == (ToolCall("b", "g", "{}"), ToolCall("c", "f", '{"a": 1}'))
    assert (read.token is not None and read.token.text) == "\ufffd"


def test_a_plain_answer_is_text_and_tokens() -> None:
    assembly = Assembly(2, is_plain=True)
    assert assembly.add(pb.GenerateResponse(text="a", token_ids=[1], index=1)) == Delta("a", (1,), 1)
    assert assembly.add(pb.GenerateResponse()) is None
    assembly.add(last(0))
    assembly.add(last(1))
    assert [completion.text for completion in (assembly.finish(), *assembly.completions)] == ["", "", "a"]


@pytest.mark.parametrize(
    ("sampling", "tools", "keeps"),
    [
        (Sampling(), [], False),
        (Sampling(logprobs=0), [], True),
        (Sampling(prompt_logprobs=0), [], True),
        (Sampling(), [Tool("f")], True),
    ],
)
def test_what_was_asked_for_is_read(sampling: Sampling, tools: list[Tool], keeps: bool) -> None:
    position = pb.TextPositionLogprobs(token=pb.TextLogprob(token_id=5))
    delta = new_assembly(sampling, tools).add(pb.ChatResponse(token_ids=[5], logprobs=[position]))
    assert delta is not None
    assert bool(delta.logprobs) == keeps
