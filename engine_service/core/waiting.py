"""The order in which requests wait: by priority; in each, preempted and resumed ones first, then by arrival.

Must not know: blocks, budgets, the clock.
"""

from bisect import bisect_left, insort

from engine_service.core.family import Family
from engine_service.core.request import Request, RequestStatus

QueueKey = tuple[int, bool, float, int]

# A local name: see planner.py.
_PREEMPTED = RequestStatus.PREEMPTED


def by_rank(request: Request) -> tuple[int, float, int]:
    return request.rank


def by_turn(request: Request) -> QueueKey:
    """A request that has begun has a reader who waits for its next token: it goes before new ones of its priority."""
    is_new = not request.is_resumed and request.status is not _PREEMPTED
    return (request.priority, is_new, request.arrival, request.request_id)


class WaitingQueue:
    """`num_tokens` counts the prompt tokens of all that wait. No operation walks the whole queue.

    Samples that their family holds back wait and are counted, but have no place in the order yet.
    """

    def __init__(self) -> None:
        self._order: list[Request] = []
        self._held: dict[int, Request] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._order) + len(self._held)

    def add(self, request: Request) -> None:
        """Its place follows from its rank and status."""
        self.num_tokens += request.prompt_length
        family = request.family
        if family is None:
            insort(self._order, request, key=by_turn)
            return
        place = bisect_left(family.waiting, by_turn(request), key=by_turn)
        family.waiting.insert(place, request)
        if place < family.num_shown:
            family.num_shown += 1
            insort(self._order, request, key=by_turn)
        else:
            self._held[request.request_id] = request
        self.update(family)

    def remove(self, request: Request) -> None:
        """Takes out one that waits; its status must still be the one it was added with."""
        self.num_tokens -= request.prompt_length
        family = request.family
        if family is None:
            self._take_out(request)
            return
        place = bisect_left(family.waiting, by_turn(request), key=by_turn)
        del family.waiting[place]
        if place < family.num_shown:
            family.num_shown -= 1
            self._take_out(request)
        else:
            del self._held[request.request_id]
        self.update(family)

    def update(self, family: Family) -> None:
        """Lets in or holds back its samples; to be called when one of them started, stopped or computed the prompt."""
        wanted = family.num_admissible()
        while family.num_shown < wanted:
            request = family.waiting[family.num_shown]
            insort(self._order, self._held.pop(request.request_id), key=by_turn)
            family.num_shown += 1
        while family.num_shown > wanted:
            family.num_shown -= 1
            request = family.waiting[family.num_shown]
            self._take_out(request)
            self._held[request.request_id] = request

    def first(self, count: int) -> list[Request]:
        """The first `count` in order, without those held back."""
        return self._order[:count]

    def all(self) -> list[Request]:
        """Everything that waits, in order, those held back at the end. For checks, not for steps."""
        return [*self._order, *self._held.values()]

    def _take_out(self, request: Request) -> None:
        del self._order[bisect_left(self._order, by_turn(request), key=by_turn)]
