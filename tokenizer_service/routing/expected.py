"""Prompts that are on their way to a replica: until it tells of their blocks, or some seconds have passed.

Must not know: tokens, how a replica is chosen.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

LIFETIME_S = 10.0
MAX_BLOCKS = 65_536


@dataclass(frozen=True, slots=True)
class _Prompt:
    until: float
    bit: int
    digests: Sequence[bytes]


@dataclass(slots=True)
class ExpectedBlocks:
    """Digest -> bit set of those who soon will hold it. So a burst that shares a prefix goes together.

    A guess that turns out wrong (the request failed, the block was evicted) costs one computed prefix at most.
    """

    lifetime_s: float = LIFETIME_S
    max_blocks: int = MAX_BLOCKS
    holders: dict[bytes, int] = field(default_factory=dict)
    _prompts: deque[_Prompt] = field(default_factory=deque)
    _num_blocks: int = 0

    def add(self, bit: int, digests: Sequence[bytes], now: float) -> None:
        """The replica with that bit is sent a prompt whose blocks these are."""
        new = [digest for digest in digests if not self.holders.get(digest, 0) & bit]
        if not new:
            return
        for digest in new:
            self.holders[digest] = self.holders.get(digest, 0) | bit
        self._prompts.append(_Prompt(now + self.lifetime_s, bit, new))
        self._num_blocks += len(new)
        while self._num_blocks > self.max_blocks:
            self._drop()

    def current(self, now: float) -> Mapping[bytes, int]:
        """Digest -> holders, without what is too old."""
        while self._prompts and self._prompts[0].until <= now:
            self._drop()
        return self.holders

    def _drop(self) -> None:
        prompt = self._prompts.popleft()
        self._num_blocks -= len(prompt.digests)
        for digest in prompt.digests:
            rest = self.holders[digest] & ~prompt.bit
            if rest:
                self.holders[digest] = rest
            else:
                del self.holders[digest]
