"""Samples of a request that one engine has, or that wait for an engine.

Must not know: grpc, text, what the samples' tokens are.
"""

import asyncio
from typing import Protocol

from tokenizer_service.engines.losses import is_full, reason_of
from tokenizer_service.engines.messages import ReplicaStream, TokenNews
from tokenizer_service.engines.refusal import Refusal


class PartOwner(Protocol):
    def take(self, part: "Part", news: TokenNews) -> None: ...

    def lost(self, part: "Part", refusal: Refusal) -> None: ...


class Part:
    """A TokenSink for the engine's side. `places`: which samples, in the engine's own order.

    Since the last new token: `attempts` are the engines that failed it, `avoid` their addresses, `lost_at` when the
    first did, `polls` how often one was looked for in vain. `full`: whose queue was full since then. `losses` are
    the engines that failed it in all; `refusal` is what the last one said, at `waits_since`.
    """

    __slots__ = (
        "attempts",
        "avoid",
        "full",
        "is_over",
        "losses",
        "lost_at",
        "owner",
        "places",
        "polls",
        "refusal",
        "stream",
        "timer",
        "waits_since",
    )

    def __init__(self, owner: PartOwner, places: tuple[int, ...]) -> None:
        self.owner = owner
        self.places = places
        self.stream: ReplicaStream | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.is_over = False
        self.losses = 0
        self.refusal: Refusal | None = None
        self.waits_since: float | None = None
        self.note_progress()

    def note_progress(self) -> None:
        """A new token has come."""
        self.attempts = 0
        self.polls = 0
        self.lost_at: float | None = None
        self.avoid: frozenset[str] = frozenset()
        self.full: frozenset[str] = frozenset()

    def note_loss(self, refusal: Refusal, now: float) -> None:
        """Its engine gave it back. A full queue is no failure."""
        replica = frozenset[str]() if self.stream is None else frozenset({self.stream.replica})
        self.refusal = refusal
        self.waits_since = now
        if self.lost_at is None:
            self.lost_at = now
        if is_full(refusal):
            self.full |= replica
            return
        self.avoid |= replica
        self.full = frozenset()
        self.attempts += 1
        self.losses += 1

    @property
    def reason(self) -> str:
        return "" if self.refusal is None else reason_of(self.refusal)

    def on_news(self, news: TokenNews) -> None:
        if not self.is_over:
            self.owner.take(self, news)

    def on_lost(self, refusal: Refusal) -> None:
        if not self.is_over:
            self.owner.lost(self, refusal)

    def end(self) -> None:
        """Nothing more is wanted of it."""
        self.is_over = True
        if self.timer is not None:
            self.timer.cancel()
        if self.stream is not None:
            self.stream.close()

    def heir(self, places: tuple[int, ...]) -> "Part":
        """A part that goes on with some of the samples."""
        part = Part(self.owner, places)
        for name in ("attempts", "polls", "lost_at", "avoid", "full", "losses", "refusal", "waits_since"):
            setattr(part, name, getattr(self, name))
        return part
