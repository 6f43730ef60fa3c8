"""The requests that an engine has from us, when it is lost."""

from dataclasses import dataclass, field

from tokenizer_service.engines.losses import LOST
from tokenizer_service.engines.messages import ModelInfo, ReplicaStream, SamplingOptions, TokenNews, TokenSubmission
from tokenizer_service.engines.refusal import Refusal
from tokenizer_service.engines.request_table import RequestTable

MODEL = ModelInfo("m", 100, 50, frozenset({2}), "abc", "e1")


@dataclass
class Sink:
    """Told of its loss, it closes the streams that belong together with it."""

    siblings: list[ReplicaStream] = field(default_factory=list)
    losses: int = 0

    def on_news(self, news: TokenNews) -> None:
        raise AssertionError(news)

    def on_lost(self, refusal: Refusal) -> None:
        self.losses += 1
        for stream in self.siblings:
            stream.close()


def submit(table: RequestTable, sink: Sink, model: ModelInfo) -> ReplicaStream:
    submission = TokenSubmission("r", [1, 2], SamplingOptions(max_tokens=5), None, None, None)
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
