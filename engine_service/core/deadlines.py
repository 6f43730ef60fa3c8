"""Which request's deadline comes next.

Must not know: the clock (times are arguments), why a request ended.
"""

from heapq import heapify, heappop, heappush
from itertools import count

from engine_service.core.request import Request, RequestStatus


class DeadlineQueue:
    """A heap of deadlines. Finished requests are dropped lazily; it stays within twice the live ones."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._order = count()
        self._compact_at = 64

    def add(self, request: Request) -> None:
        """Requests without a deadline are ignored."""
        if request.deadline is None:
            return
        if len(self._heap) >= self._compact_at:
            self._heap = [item for item in self._heap if item[2].status is not RequestStatus.FINISHED]
            heapify(self._heap)
            self._compact_at = max(64, 2 * len(self._heap))
        heappush(self._heap, (request.deadline, next(self._order), request))

    def next(self) -> float | None:
        """The earliest deadline of an unfinished request."""
        while self._heap and self._heap[0][2].status is RequestStatus.FINISHED:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_passed(self, now: float) -> list[Request]:
        """Takes out the unfinished requests whose deadline is not after `now`, earliest first."""
        passed = []
        while (deadline := self.next()) is not None and deadline <= now:
            passed.append(heappop(self._heap)[2])
        return passed
