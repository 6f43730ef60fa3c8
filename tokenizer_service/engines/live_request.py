"""A request that an engine has: its sink, and how much work of it is left.

Must not know: grpc, how the engine is reached.
"""

from dataclasses import dataclass

from service_runtime.tracing import UNTRACED, Span
from tokenizer_service.engines.messages import TokenSink


@dataclass(slots=True)
class LiveRequest:
    """A request that the engine has and whose last word has not come.

    Work in tokens: `prompt_work` once, `sample_work` of each sample. `unfinished`: the samples that go on. `span` is
    that of its time with this engine.
    """

    sink: TokenSink
    prompt_work: int
    sample_work: list[int]
    unfinished: set[int]
    has_logprobs: bool
    span: Span = UNTRACED

    def work(self) -> int:
        return self.prompt_work + sum(self.sample_work)

    def progress(self, index: int, num_tokens: int) -> int:
        """Takes note of new tokens; the work that they were."""
        left = self.sample_work[index]
        done = num_tokens if num_tokens < left else left
        self.sample_work[index] = left - done
        if self.prompt_work:
            done += self.prompt_work
            self.prompt_work = 0
        return done

    def finish(self, index: int) -> int:
        """A sample has ended; the work that it leaves undone."""
        self.unfinished.discard(index)
        left, self.sample_work[index] = self.sample_work[index], 0
        return left
