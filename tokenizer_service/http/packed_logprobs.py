"""Log probabilities of a whole answer in little room, until it is written.

Must not know: the shape of any one API.
"""

from array import array
from collections.abc import Iterable, Iterator

from tokenizer_service.sessions.events import TextLogprob, TextPositionLogprobs

_NO_TOKEN = -1


class PackedLogprobs:
    """A list of positions as arrays: 16 bytes for each token and alternative, where objects take ten times as much."""

    def __init__(self) -> None:
        self._ids = array("q")  # of the token of a position (or _NO_TOKEN), then of its alternatives
        self._logprobs = array("d")
        self._ranks = array("q")
        self._num_top = array("q")
        self._texts: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def extend(self, positions: Iterable[TextPositionLogprobs]) -> None:
        for position in positions:
            self._ranks.append(position.rank)
            self._num_top.append(len(position.top))
            self._append(position.token)
            for item in position.top:
                self._append(item)

    def _append(self, item: TextLogprob | None) -> None:
        if item is None:
            self._ids.append(_NO_TOKEN)
            self._logprobs.append(0.0)
            return
        self._ids.append(item.token_id)
        self._logprobs.append(item.logprob)
        self._texts.setdefault(item.token_id, item.token)

    def __iter__(self) -> Iterator[TextPositionLogprobs]:
        """The positions as they were, made one by one."""
        place = 0
        for rank, num_top in zip(self._ranks, self._num_top, strict=True):
            token = None if self._ids[place] == _NO_TOKEN else self._item(place)
            top = tuple([self._item(of_top) for of_top in range(place + 1, place + 1 + num_top)])
            yield TextPositionLogprobs(token, rank, top)
            place += 1 + num_top

    def _item(self, place: int) -> TextLogprob:
        token_id = self._ids[place]
        return TextLogprob(token_id, self._texts[token_id], self._logprobs[place])
