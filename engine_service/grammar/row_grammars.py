"""The matchers of the requests that a worker holds, and the masks of a step made from them.

Must not know: logits, the model, the scheduler.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from engine_service.core.plan import NewRequest, Plan
from engine_service.core.token_rules import stop_tokens
from engine_service.grammar.matcher import CpuClock, Grammar, GrammarFailure, Matcher

ReadTokens = Callable[[], Sequence[int]]


class RowGrammars:
    """Used by the worker's thread alone. A request whose grammar fails keeps its reason until it is dropped."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...], cpu_clock: CpuClock) -> None:
        self._num_words = -(-vocab_size // 32)
        self._eos = frozenset(eos_token_ids)
        self._cpu_clock = cpu_clock
        self._matchers: dict[int, Matcher] = {}
        self._failed: dict[int, str] = {}
        # The tokens of the last step are read when they are needed: by then the device may have them.
        self._unread: tuple[list[tuple[int, int]], ReadTokens] | None = None

    def __len__(self) -> int:
        return len(self._matchers) + len(self._failed)

    def take(self, plan: Plan) -> None:
        """Forgets and takes in requests as the plan says; what was sampled under a grammar is replayed."""
        if self._unread is not None and (plan.dropped or plan.new):
            self._read()
        for request_id in plan.dropped:
            self._matchers.pop(request_id, None)
            self._failed.pop(request_id, None)
        for request in plan.new:
            if request.sampling.structured_output is not None:
                self._add(request)

    def places(self, request_ids: Sequence[int]) -> list[tuple[int, int]]:
        """(place, request id) of those among the requests that have a grammar."""
        if not self:
            return []
        known = self._matchers.keys() | self._failed.keys()
        return [(place, request_id) for place, request_id in enumerate(request_ids) if request_id in known]

    def masks(
        self, places: Sequence[tuple[int, int]], drafts: Mapping[int, Sequence[int]] = MappingProxyType({})
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Rising places [M] and what may come there, int32 [M, ceil(vocabulary / 32)], the lowest bit first.

        `drafts`: guessed tokens by request id. Such a request has a place for each and one more, one behind the other;
        nothing may come behind a token that its grammar refuses. A request that has failed has no mask.
        """
        self._read()
        rows: list[tuple[int, npt.NDArray[np.int32]]] = []
        known: dict[int, int] = {}
        for place, request_id in places:
            if request_id not in known:
                known[request_id] = place
                masks = self._allowed(request_id, drafts.get(request_id, ()))
                rows.extend((place + number, words) for number, words in enumerate(masks))
        bits = np.empty((len(rows), self._num_words), dtype=np.int32)
        for row, (_, words) in enumerate(rows):
            bits[row] = words
        return np.array([place for place, _ in rows], dtype=np.int64), bits

    def sampled(self, places: Sequence[tuple[int, int]], read: ReadTokens) -> None:
        """What came of the step: `read` gives the tokens of all its rows, and may wait for the device. Not for requests
        with drafts: see `verified`."""
        self._unread = (list(places), read)

    def verified(self, request_id: int, token_ids: Sequence[int]) -> None:
        """What came of the step for a request with a draft: its right tokens and the one behind them."""
        matcher = self._matchers.get(request_id)
        if matcher is not None:
            self._try(request_id, lambda: matcher.advance_all(token_ids))

    def failures(self, request_ids: Sequence[int]) -> dict[int, str]:
        """Why those among the requests that failed did."""
        if not self._failed:
            return {}
        return {request_id: self._failed[request_id] for request_id in request_ids if request_id in self._failed}

    def _add(self, request: NewRequest) -> None:
        constraint = request.sampling.structured_output
        assert constraint is not None
        grammar = constraint.compiled
        assert isinstance(grammar, Grammar), "a request with a grammar comes with it compiled"
        matcher = grammar.new_matcher(sorted(stop_tokens(request.sampling, self._eos)), self._cpu_clock)
        self._matchers[request.request_id] = matcher
        begin = request.prompt_length + grammar.num_taken
        self._try(request.request_id, lambda: matcher.replay(request.token_ids[begin:]))

    def _allowed(self, request_id: int, draft: Sequence[int]) -> list[npt.NDArray[np.int32]]:
        matcher = self._matchers.get(request_id)
        if matcher is None:
            return []
        masks: list[bytes] = []
        self._try(request_id, lambda: masks.extend(matcher.allowed_along(draft) if draft else (matcher.allowed(),)))
        return [np.frombuffer(mask, dtype=np.int32, count=self._num_words) for mask in masks]

    def _read(self) -> None:
        """Moves each matcher by the token its request got in the step before."""
        if self._unread is None:
            return
        places, read = self._unread
        self._unread = None
        tokens = read()
        for place, request_id in places:
            matcher = self._matchers.get(request_id)
            if matcher is not None:
                token = tokens[place]
                self._try(request_id, lambda matcher=matcher, token=token: matcher.advance(token))  # type: ignore[misc]

    def _try(self, request_id: int, move: Callable[[], None]) -> None:
        """Whatever goes wrong in one matcher, a panic of the library included, is its own request's failure."""
        try:
            move()
            return
        except GrammarFailure as error:
            message = f"structured_output: {error}"
        except BaseException as error:  # a panic of the library is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            message = "structured_output: the grammar library failed"
        del self._matchers[request_id]
        self._failed[request_id] = message
