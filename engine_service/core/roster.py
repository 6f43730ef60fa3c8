"""Where each request is: it runs, it waits, or it leaves while a plan in flight still names it.

Must not know: budgets, when to preempt or to finish, torch, the clock.
"""

from bisect import bisect_left, insort

from engine_service.core.kv_manager import KvManager
from engine_service.core.request import Request, RequestStatus
from engine_service.core.waiting import WaitingQueue, by_rank


class Roster:
    """Moves requests between the places, so that blocks go back exactly once and never too early.

    `running` is sorted by rank. `leaving` counts requests that no longer run but whose blocks are still named
    by a plan in flight. `dropped` are ids that the worker has to be told to forget.
    """

    def __init__(self, kv: KvManager) -> None:
        self._kv = kv
        self.running: list[Request] = []
        self.waiting = WaitingQueue()
        self.leaving = 0
        self.dropped: list[int] = []

    def start(self, request: Request) -> None:
        """From the waiting queue to the running requests; from now on the worker holds it."""
        if request.family is not None:
            request.family.running.append(request)
        self.waiting.remove(request)
        request.move_to(RequestStatus.RUNNING)
        request.times_passed = 0
        request.account.tenant.running += 1
        insort(self.running, request, key=by_rank)

    def preempt(self, request: Request) -> None:
        """Back into the waiting queue; the tokens stay, the blocks go."""
        self._stop(request)
        request.move_to(RequestStatus.PREEMPTED)
        self.waiting.add(request)

    def finish(self, request: Request) -> None:
        """Out of every queue, wherever it is."""
        if request.status is RequestStatus.RUNNING:
            self._stop(request)
            if request.family is not None:
                self.waiting.update(request.family)
        else:
            self.waiting.remove(request)
        request.move_to(RequestStatus.FINISHED)

    def settled(self, request: Request) -> None:
        """To be called when no plan in flight names a request that was leaving: its blocks go back."""
        self.leaving -= 1
        self._kv.release(request)

    def take_dropped(self) -> tuple[int, ...]:
        dropped = tuple(self.dropped)
        self.dropped.clear()
        return dropped

    def _stop(self, request: Request) -> None:
        del self.running[bisect_left(self.running, request.rank, key=by_rank)]
        request.account.tenant.running -= 1
        self.dropped.append(request.request_id)
        if request.family is not None:
            request.family.running.remove(request)
        if request.in_flight:
            self.leaving += 1
        else:
            self._kv.release(request)
