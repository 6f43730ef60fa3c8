"""Many log probabilities in little room: those of a long prompt would be hundreds of thousands of objects.

Must not know: requests, where they come from and go to.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import overload

from engine_service.core.outcome import PositionLogprobs

_NO_TOKEN = -1


class PackedLogprobs(Sequence[PositionLogprobs]):
    """A sequence that only grows: 12 bytes for each log probability. An entry is made when it is read."""

    __slots__ = ("_ends", "_ranks", "_token_ids", "_values")

    def __init__(self, entries: Iterable[PositionLogprobs] = ()) -> None:
        # Of each entry its token, then the most likely ones; an entry's end is where the next one begins.
        self._token_ids = array("i")
        self._values = array("d")
        self._ranks = array("q")
        self._ends = array("q")
        self.extend(entries)

    def extend(self, entries: Iterable[PositionLogprobs]) -> None:
        token_ids, values = self._token_ids, self._values
        for token, rank, top in entries:
            for token_id, logprob in ((_NO_TOKEN, 0.0) if token is None else token, *top):
                token_ids.append(token_id)
                values.append(logprob)
            self._ranks.append(rank)
            self._ends.append(len(token_ids))

    @property
    def num_logprobs(self) -> int:
        """All positions together."""
        return len(self._values)

    def __len__(self) -> int:
        return len(self._ends)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    @overload
    def __getitem__(self, place: int) -> PositionLogprobs: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[PositionLogprobs, ...]: ...

    def __getitem__(self, place: int | slice) -> PositionLogprobs | tuple[PositionLogprobs, ...]:
        if isinstance(place, slice):
            return tuple([self._entry(number) for number in range(*place.indices(len(self)))])
        return self._entry(range(len(self))[place])

    def _entry(self, number: int) -> PositionLogprobs:
        begin = self._ends[number - 1] if number else 0
        end = self._ends[number]
        pairs = tuple(zip(self._token_ids[begin:end], self._values[begin:end], strict=True))
        token = None if pairs[0][0] == _NO_TOKEN else pairs[0]
        return PositionLogprobs(token, self._ranks[number], pairs[1:])
