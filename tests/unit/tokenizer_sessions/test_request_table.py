"""The requests that an engine has from us: when it is lost, and when one cannot be sent."""

from dataclasses import dataclass, field

from tokenizer_service.engines.losses import LOST
from tokenizer_service.engines.messages import ModelInfo, ReplicaStream, SamplingOptions, TokenNews, TokenSubmission
from tokenizer_service.engines.refusal import Refusal, RefusalCode
from tokenizer_service.engines.request_table import RequestTable

MODEL = ModelInfo("m", 100, 50, frozenset({2}), "abc", "e1")


@dataclass
class Sink:
    """Told of its loss, it closes the streams that belong together with it."""

    siblings: list[ReplicaStream] = field(default_factory=list)
    losses: int = 0
    refusal: Refusal | None = None

    def on_news(self, news: TokenNews) -> None:
        raise AssertionError(news)

    def on_lost(self, refusal: Refusal) -> None:
        self.losses += 1
        self.refusal = refusal
        for stream in self.siblings:
            stream.close()


def submit(table: RequestTable, sink: Sink, model: ModelInfo) -> ReplicaStream:
    submission = TokenSubmission("r", [1, 2], SamplingOptions(max_tokens=5), None, None, None)
    return add(table, sink, submission, model)


def add(table: RequestTable, sink: Sink, submission: TokenSubmission, model: ModelInfo) -> ReplicaStream:
    stream = table.add(submission, sink, model, 0)
    assert not isinstance(stream, Refusal)
    return stream


def test_a_sink_that_gives_up_its_siblings_leaves_no_other_request_behind() -> None:
    table = RequestTable("engine", 100, judge=lambda finish: None, on_forgotten=lambda: None)
    first, second, innocent = Sink(), Sink(), Sink()
    for sink in (first, second):
        streams = [submit(table, sink, MODEL) for _ in range(2)]
        sink.siblings.extend(streams)
    submit(table, innocent, MODEL)
    table.lose_all(LOST)
    assert (first.losses, second.losses, innocent.losses) == (1, 1, 1)
    assert not table.live
    assert not table.cancels
    assert table.outstanding_tokens == 0


def test_a_request_of_which_no_message_can_be_made_ends_alone() -> None:
    table = RequestTable("engine", 100, judge=lambda finish: None, on_forgotten=lambda: None)
    good = TokenSubmission("r", [1, 2], SamplingOptions(max_tokens=5))
    sick = [TokenSubmission("r", [2**40], SamplingOptions()), TokenSubmission("\ud800", [1], SamplingOptions())]
    sinks = [Sink() for _ in range(4)]
    for sink, submission in zip(sinks, [*sick, good, sick[0]], strict=True):
        add(table, sink, submission, MODEL)
    (command,) = table.next_commands(0.0)
    assert (command.submit.handle, list(command.submit.request.prompt_token_ids)) == (3, [1, 2])
    assert table.next_commands(0.0) == []
    assert [sink.losses for sink in sinks] == [1, 1, 0, 1]
    assert {sink.refusal.code for sink in sinks if sink.refusal} == {RefusalCode.INTERNAL}
    assert list(table.live) == [3]
    assert table.outstanding_tokens == 2 + 5
