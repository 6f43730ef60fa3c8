"""Which replicas hold which blocks of prompts, and which soon will: one map for all of them, bounded in memory.

Must not know: tokens, how a replica is chosen or reached.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

# Per block that is told, so many of a replica that has gone are swept out.
_SWEEP_RATIO = 4
_SWEEP_AT_LEAST = 256
_NOTHING: Mapping[bytes, int] = MappingProxyType({})


class PrefixMap:
    """Digest -> bit set of holders. About 150 bytes a digest.

    `max_blocks` bounds the digests of all replicas together; what does not fit is left out, which costs hits only.
    A replica that goes is forgotten at once and swept out little by little.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._holders: dict[bytes, int] = {}
        self._live = 0  # bits of the holders that count
        self._free_bits: list[int] = []
        self._num_bits = 0
        self._gone = 0  # bits to sweep out of what is in `_to_sweep`
        self._to_sweep: list[bytes] = []
        self._swept_bits: list[int] = []

    def __len__(self) -> int:
        return len(self._holders)

    def new_holder(self) -> "Holder":
        return Holder(self)

    def longest(self, digests: Sequence[bytes], soon: Mapping[bytes, int] = _NOTHING) -> dict[int, int]:
        """Bit of each holder -> how many leading `digests` it has or, by `soon`, will have. O(digests + holders)."""
        found: dict[int, int] = {}
        alive, holders = self._live, self._holders
        for place, digest in enumerate(digests):
            still = (holders.get(digest, 0) | soon.get(digest, 0)) & alive
            if still != alive:
                _note(found, alive & ~still, place)
                alive = still
                if not alive:
                    return found
        _note(found, alive, len(digests))
        return found

    def take_bit(self) -> int:
        bit = self._free_bits.pop() if self._free_bits else 1 << self._num_bits
        if bit == 1 << self._num_bits:
            self._num_bits += 1
        self._live |= bit
        return bit

    def give_bit(self, bit: int) -> None:
        """Its blocks count no more from now on."""
        self._live &= ~bit
        if not self._to_sweep:
            self._begin_sweep(bit)
        else:
            self._swept_bits.append(bit)

    def store(self, bit: int, digests: Iterable[bytes]) -> int:
        """Returns how many are new for this holder."""
        holders, new, told = self._holders, 0, 0
        for digest in digests:
            told += 1
            before = holders.get(digest)
            if before is None:
                if len(holders) >= self._max_blocks:
                    continue
                holders[digest] = bit
                new += 1
            elif not before & bit:
                holders[digest] = before | bit
                new += 1
        self._sweep(told)
        return new

    def remove(self, bit: int, digests: Iterable[bytes]) -> int:
        """Returns how many it had."""
        holders, had = self._holders, 0
        for digest in digests:
            before = holders.get(digest, 0)
            if before & bit:
                had += 1
                if before == bit:
                    del holders[digest]
                else:
                    holders[digest] = before & ~bit
        return had

    def _begin_sweep(self, bits: int) -> None:
        self._gone = bits
        self._to_sweep = list(self._holders)
        if not self._to_sweep:
            self._end_sweep()

    def _sweep(self, told: int) -> None:
        if not self._to_sweep:
            return
        holders, gone = self._holders, self._gone
        for _ in range(min(len(self._to_sweep), max(_SWEEP_AT_LEAST, told * _SWEEP_RATIO))):
            digest = self._to_sweep.pop()
            before = holders.get(digest, 0)
            if before & gone:
                if before & ~gone:
                    holders[digest] = before & ~gone
                else:
                    del holders[digest]
        if not self._to_sweep:
            self._end_sweep()

    def _end_sweep(self) -> None:
        """The swept bits may be used again; others that went meanwhile are next."""
        gone, self._gone = self._gone, 0
        while gone:
            bit = gone & -gone
            self._free_bits.append(bit)
            gone ^= bit
        if self._swept_bits:
            bits = 0
            for bit in self._swept_bits:
                bits |= bit
            self._swept_bits.clear()
            self._begin_sweep(bits)


class Holder:
    """What one replica holds, as far as it told. `num_blocks` counts it."""

    def __init__(self, prefixes: PrefixMap) -> None:
        self._map = prefixes
        self.bit = prefixes.take_bit()
        self.num_blocks = 0
        self._is_closed = False

    def store(self, digests: Iterable[bytes]) -> None:
        if not self._is_closed:
            self.num_blocks += self._map.store(self.bit, digests)

    def remove(self, digests: Iterable[bytes]) -> None:
        if not self._is_closed:
            self.num_blocks -= self._map.remove(self.bit, digests)

    def clear(self) -> None:
        """It holds nothing, as far as we know. O(1)."""
        if self.num_blocks and not self._is_closed:
            self._map.give_bit(self.bit)
            self.bit = self._map.take_bit()
            self.num_blocks = 0

    def close(self) -> None:
        """It is gone: what is still told of it changes nothing, and its place in the map is another's."""
        if not self._is_closed:
            self._is_closed = True
            self._map.give_bit(self.bit)


def _note(found: dict[int, int], bits: int, count: int) -> None:
    while bits:
        bit = bits & -bits
        found[bit] = count
        bits ^= bit
