"""The front's view of a live submission and its samples: their unread news, merged while nobody reads.

Must not know: gRPC, protobuf, the engine process.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine_service.api.request_trace import UNTRACED_REQUEST, RequestTrace
from engine_service.core.family import seed_of
from engine_service.core.outcome import Finish, PositionLogprobs, RequestNews
from engine_service.core.packed_logprobs import PackedLogprobs
from engine_service.core.sampling import SamplingParams
from engine_service.loop.messages import RequestTiming

Wake = Callable[["LiveRequest"], None]


@dataclass(frozen=True, slots=True)
class Unread:
    """What the reader of a sample has not been given yet."""

    token_ids: list[int]
    finish: Finish | None
    logprobs: Sequence[PositionLogprobs] = ()
    prompt_logprobs: Sequence[PositionLogprobs] = ()
    cached_tokens: int = 0
    timing: RequestTiming | None = None  # with the finish, if the engine told it

    @property
    def num_logprobs(self) -> int:
        """Log probabilities in it, all positions together."""
        return sum(1 + len(entry.top) for entry in self.logprobs) + _count(self.prompt_logprobs)


def _count(entries: Sequence[PositionLogprobs]) -> int:
    """Log probabilities at all positions together."""
    if isinstance(entries, PackedLogprobs):
        return entries.num_logprobs
    return sum(1 + len(entry.top) for entry in entries)


class LiveRequest:
    """One sample between its submission and its finish. Lives on the event loop.

    The submission's `wake` is called when news comes to a sample that had none unread.
    """

    __slots__ = (
        "_cached_tokens",
        "_finish",
        "_is_cut",
        "_logprobs",
        "_num_given",
        "_prompt_logprobs",
        "_timing",
        "_unread",
        "_wake",
        "index",
        "request_id",
        "seed",
        "submission",
    )

    def __init__(self, submission: "Submission", request_id: int, index: int, seed: int, wake: Wake) -> None:
        self.submission = submission
        self.request_id = request_id
        self.index = index
        self.seed = seed
        self._wake = wake
        self._unread: list[int] = []
        self._logprobs: list[PositionLogprobs] = []
        self._prompt_logprobs: Sequence[PositionLogprobs] = ()
        self._cached_tokens = 0
        self._num_given = submission.resumed_tokens
        self._finish: Finish | None = None
        self._timing: RequestTiming | None = None
        self._is_cut = False

    @property
    def unread_tokens(self) -> int:
        return len(self._unread)

    @property
    def unread_prompt_logprobs(self) -> int:
        return _count(self._prompt_logprobs)

    @property
    def num_received(self) -> int:
        """Tokens that the reader was given (before a resumption too) or still may read."""
        return self._num_given + len(self._unread)

    @property
    def is_cut(self) -> bool:
        return self._is_cut

    def add(self, news: RequestNews, timing: RequestTiming | None = None) -> None:
        """Takes news from the engine; after a cut only the finish counts. `timing` comes with the finish."""
        had_unread = bool(self._unread)
        finish = news.finish
        if not self._is_cut:
            self._unread.extend(news.token_ids)
            self._cached_tokens = news.cached_tokens or self._cached_tokens
            if news.logprobs or news.prompt_logprobs:
                self._logprobs.extend(news.logprobs)
                self._prompt_logprobs = news.prompt_logprobs or self._prompt_logprobs  # they come once
        if finish is not None:
            self._finish = replace(finish, completion_tokens=self._num_given) if self._is_cut else finish
            self._timing = timing
        if (self._unread or finish is not None) and not had_unread:
            self._wake(self)

    def take(self) -> Unread:
        """Gives the unread news to the caller; each token and the finish are given once."""
        unread = Unread(
            self._unread, self._finish, self._logprobs, self._prompt_logprobs, self._cached_tokens, self._timing
        )
        self._num_given += len(self._unread)
        self._finish = self._timing = None
        self._cached_tokens = 0
        self._forget_unread()
        return unread

    def cut(self) -> None:
        """From now on the reader gets no token, not even an unread one; the finish says what it was given."""
        self._is_cut = True
        self._forget_unread()

    def _forget_unread(self) -> None:
        self._unread = []
        if self._logprobs or self._prompt_logprobs:
            self._logprobs, self._prompt_logprobs = [], ()


class Submission:
    """What a client submitted: one or more samples of a prompt, which end one by one.

    `done` is set when all have ended. `outcome` says how it is counted: the first finish with an error, or else the
    first one. `completion_tokens` are those of each sample that has ended; `resumed_tokens` of each were known to the
    reader before. `started` is seconds on the front's clock. `max_unread_tokens` is for all samples together.
    """

    __slots__ = (
        "completion_tokens",
        "done",
        "max_tokens",
        "max_unread_tokens",
        "name",
        "num_open",
        "outcome",
        "prompt_tokens",
        "resumed_tokens",
        "samples",
        "started",
        "trace",
    )

    def __init__(
        self,
        name: str,
        first_id: int,
        samples: int,
        sampling: SamplingParams,
        *,
        prompt_tokens: int,
        resumed_tokens: int = 0,
        started: float,
        max_unread_tokens: int,
        wake: Wake,
        trace: RequestTrace = UNTRACED_REQUEST,
    ) -> None:
        self.name = name
        self.trace = trace
        self.prompt_tokens = prompt_tokens
        self.resumed_tokens = resumed_tokens
        self.max_tokens = sampling.max_tokens
        self.completion_tokens: list[int] = []
        self.started = started
        # A token with log probabilities is as large as so many tokens.
        numbers = 1 if sampling.logprobs is None else 2 + sampling.logprobs
        self.max_unread_tokens = max(1, max_unread_tokens // numbers)
        self.samples = tuple(
            LiveRequest(self, first_id + index, index, seed_of(sampling.seed, index), wake) for index in range(samples)
        )
        self.num_open = samples
        self.outcome: Finish | None = None
        self.done = asyncio.Event()

    @property
    def unread_tokens(self) -> int:
        return sum(sample.unread_tokens for sample in self.samples)

    def ended(self, finish: Finish) -> None:
        """To be called for each sample that ended."""
        self.num_open -= 1
        self.completion_tokens.append(finish.completion_tokens)
        if self.outcome is None or (self.outcome.error is None and finish.error is not None):
            self.outcome = finish
        if self.num_open == 0:
            self.done.set()
