"""The front's view of one live request: its unread news, merged while nobody reads.

Must not know: gRPC, protobuf, the engine process.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine_service.core.outcome import Finish


@dataclass(frozen=True, slots=True)
class Unread:
    """What the reader of a request has not been given yet."""

    token_ids: list[int]
    finish: Finish | None


class LiveRequest:
    """One request between its submission and its finish. Lives on the event loop.

    `wake` is called when news comes to a request that had none unread. `done` is set with the finish.
    `started` is seconds on the front's clock.
    """

    __slots__ = (
        "_finish",
        "_is_cut",
        "_num_given",
        "_unread",
        "_wake",
        "done",
        "name",
        "prompt_tokens",
        "request_id",
        "seed",
        "started",
    )

    def __init__(
        self,
        request_id: int,
        name: str,
        *,
        seed: int,
        prompt_tokens: int,
        started: float,
        wake: Callable[[], None],
    ) -> None:
        self.request_id = request_id
        self.name = name
        self.seed = seed
        self.prompt_tokens = prompt_tokens
        self.started = started
        self.done = asyncio.Event()
        self._wake = wake
        self._unread: list[int] = []
        self._num_given = 0
        self._finish: Finish | None = None
        self._is_cut = False

    @property
    def unread_tokens(self) -> int:
        return len(self._unread)

    @property
    def num_received(self) -> int:
        """Tokens that the reader was given or still may read."""
        return self._num_given + len(self._unread)

    @property
    def is_cut(self) -> bool:
        return self._is_cut

    def add(self, token_ids: tuple[int, ...], finish: Finish | None) -> None:
        """Takes news from the engine; after a cut only the finish counts."""
        had_unread = bool(self._unread)
        if not self._is_cut:
            self._unread.extend(token_ids)
        if finish is not None:
            self._finish = replace(finish, completion_tokens=self._num_given) if self._is_cut else finish
            self.done.set()
        if (self._unread or finish is not None) and not had_unread:
            self._wake()

    def take(self) -> Unread:
        """Gives the unread news to the caller."""
        unread = Unread(self._unread, self._finish)
        self._num_given += len(self._unread)
        self._unread = []
        return unread

    def cut(self) -> None:
        """From now on the reader gets no token, not even an unread one; the finish says what it was given."""
        self._is_cut = True
        self._unread = []
