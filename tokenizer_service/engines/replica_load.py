"""How much work waits at one replica: what this service sent itself, to the moment, and what the engine told of others.

Must not know: how a replica is chosen or reached.
"""

from dataclasses import dataclass, field

from tokenizer_service.engines.messages import Usage


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine tells of itself; tokens, requests and KV blocks of all its clients."""

    running: int
    waiting: int
    queued_tokens: int
    free_blocks: int
    evictable_blocks: int

    @property
    def room_blocks(self) -> int:
        """Blocks that no running request holds."""
        return self.free_blocks + self.evictable_blocks


@dataclass(slots=True)
class ReplicaLoad:
    """`queued_tokens`: prompt tokens to compute before the first token of what waits. `streams`: samples that run or
    wait. Work of other clients is what the engine told beyond our own at that moment. `prompt_tokens` and
    `cached_tokens` are of samples that have ended.
    """

    queued_tokens: int = 0
    streams: int = 0
    told: EngineLoad | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    _others_tokens: int = 0
    _others_streams: int = 0
    _queued: dict[int, int] = field(default_factory=dict)

    @property
    def all_queued_tokens(self) -> int:
        return self.queued_tokens + self._others_tokens

    @property
    def all_streams(self) -> int:
        return self.streams + self._others_streams

    def sent(self, handle: int, uncached_tokens: int, samples: int) -> None:
        self._queued[handle] = uncached_tokens
        self.queued_tokens += uncached_tokens
        self.streams += samples

    def began(self, handle: int) -> None:
        """Its first token has come: the prompt is computed."""
        self.queued_tokens -= self._queued.pop(handle, 0)

    def sample_ended(self, usage: Usage) -> None:
        self.streams -= 1
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens

    def forget(self, handle: int, unfinished_samples: int) -> None:
        """The request has ended, whatever of it still ran."""
        self.began(handle)
        self.streams -= unfinished_samples

    def note(self, told: EngineLoad) -> None:
        self.told = told
        self._others_tokens = max(0, told.queued_tokens - self.queued_tokens)
        self._others_streams = max(0, told.running + told.waiting - self.streams)

    def lost(self) -> None:
        """The session is over; what the engine told counts no more."""
        self.told = None
        self._others_tokens = self._others_streams = 0
