"""The order in which requests wait: preempted ones by rank, then new ones first come, first served.

Must not know: blocks, budgets, the clock.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from itertools import chain, islice

from engine_service.core.request import Request, RequestStatus


def by_rank(request: Request) -> tuple[float, int]:
    return request.rank


class WaitingQueue:
    """`num_tokens` counts the prompt tokens of all that wait. No operation walks the whole queue."""

    def __init__(self) -> None:
        self._preempted: list[Request] = []  # sorted by rank; at most as many as may run
        self._fresh: OrderedDict[int, Request] = OrderedDict()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._preempted) + len(self._fresh)

    def add(self, request: Request) -> None:
        """A preempted request joins the front part at its rank, a new one the end."""
        if request.status is RequestStatus.PREEMPTED:
            insort(self._preempted, request, key=by_rank)
        else:
            self._fresh[request.request_id] = request
        self.num_tokens += request.prompt_length

    def remove(self, request: Request) -> None:
        """Takes out one that waits; its status must still be the one it was added with."""
        if request.status is RequestStatus.PREEMPTED:
            del self._preempted[bisect_left(self._preempted, request.rank, key=by_rank)]
        else:
            del self._fresh[request.request_id]
        self.num_tokens -= request.prompt_length

    def first(self, count: int) -> list[Request]:
        """The first `count` in order."""
        return list(islice(chain(self._preempted, self._fresh.values()), count))

    def all(self) -> list[Request]:
        """Everything that waits, in order. For checks, not for steps."""
        return self.first(len(self))
