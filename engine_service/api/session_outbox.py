"""What the requests of a session have to tell and its client has not read: merged by sample, and bounded.

Must not know: gRPC calls, how requests come about or are cancelled.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from engine_service.api.convert import add_prompt_logprobs, request_output
from engine_service.api.live_request import Unread
from engine_service.core.outcome import Finish, FinishReason, Refusal
from tokenwire.engine.v1 import engine_pb2

# Past this many samples with unread news, commands wait until the client has read some.
MAX_UNREAD_OUTPUTS = 8192
# And past this many log probabilities of prompts, which are not bounded for each request by itself.
MAX_UNREAD_PROMPT_LOGPROBS = 4_000_000
# Keeps a merged message well below the transport's limit.
MAX_TOKENS_PER_MESSAGE = 262_144
_TOKENS_PER_LOGPROB = 4  # about as many bytes


class News(Protocol):
    """Something with news for a handle."""

    @property
    def seed(self) -> int: ...

    @property
    def index(self) -> int: ...

    @property
    def unread_prompt_logprobs(self) -> int: ...

    def take(self) -> Unread: ...


class Refused:
    """A request that was refused at the door."""

    seed = 0
    index = 0
    unread_prompt_logprobs = 0

    def __init__(self, prompt_tokens: int, refusal: Refusal) -> None:
        self._finish = Finish(FinishReason.ERROR, prompt_tokens, 0, 0, error=refusal)

    def take(self) -> Unread:
        return Unread([], self._finish)


class SessionOutbox:
    """Of one session. `has_room` and `all_written` are set and cleared here only.

    `wake` is called when there is news; `ended` when the last finish of a handle is in a message: it may be used again.
    """

    def __init__(self, wake: Callable[[], None], ended: Callable[[int], None]) -> None:
        self._wake = wake
        self._ended = ended
        self._num_untold: dict[int, int] = {}  # handle -> samples whose finish is in no message
        self._unread: dict[News, int] = {}  # -> handle
        self._unread_prompts: dict[News, int] = {}  # -> log probabilities; they are there at the first news
        self._num_unread_prompt = 0
        self.has_room = asyncio.Event()
        self.all_written = asyncio.Event()
        self.has_room.set()
        self.all_written.set()

    @property
    def is_empty(self) -> bool:
        return not self._unread

    def has_open(self, handle: int) -> bool:
        """Whether a sample of this handle has not been told to its end."""
        return handle in self._num_untold

    def open(self, handle: int, num_samples: int) -> None:
        self._num_untold[handle] = num_samples

    def add(self, handle: int, news: News) -> None:
        """To be called when `news`, which had none unread, has some."""
        self._unread[news] = handle
        self._wake()
        self.all_written.clear()
        count = news.unread_prompt_logprobs
        if count and news not in self._unread_prompts:
            self._unread_prompts[news] = count
            self._num_unread_prompt += count
        if self._is_full():
            self.has_room.clear()

    async def move_to(self, step: engine_pb2.StepOutputs) -> None:
        """The news of all handles; the rest stays for the next message when there is very much of it."""
        outputs = step.outputs
        num_tokens = 0
        while self._unread and num_tokens < MAX_TOKENS_PER_MESSAGE:
            news = next(iter(self._unread))
            handle = self._unread.pop(news)
            self._num_unread_prompt -= self._unread_prompts.pop(news, 0)
            unread = news.take()
            num_tokens += len(unread.token_ids)
            if unread.logprobs or unread.prompt_logprobs:
                num_tokens += _TOKENS_PER_LOGPROB * unread.num_logprobs
            if unread.token_ids or unread.finish is not None:
                outputs.append(request_output(handle, unread, news.seed, news.index))
                if unread.prompt_logprobs:
                    await add_prompt_logprobs(outputs[-1], unread.prompt_logprobs)
            if unread.finish is not None:
                self._forget_sample(handle)
        if not self._is_full():
            self.has_room.set()

    def written(self) -> None:
        """What was moved to a message has been written."""
        if not self._unread:
            self.all_written.set()

    def _is_full(self) -> bool:
        return len(self._unread) > MAX_UNREAD_OUTPUTS or self._num_unread_prompt > MAX_UNREAD_PROMPT_LOGPROBS

    def _forget_sample(self, handle: int) -> None:
        self._num_untold[handle] -= 1
        if self._num_untold[handle] == 0:
            del self._num_untold[handle]
            self._ended(handle)
