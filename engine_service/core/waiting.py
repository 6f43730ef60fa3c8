"""The order in which requests wait: by priority; in each, of the least served tenant; in each, by turn.

Must not know: blocks, budgets, the clock.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from itertools import count

from engine_service.core.fairness import Account, FairShares
from engine_service.core.family import Family
from engine_service.core.request import Request, RequestStatus

QueueKey = tuple[int, bool, float, int]
Service = tuple[int, float]
"""Priority and the tenant's urgency (see FairShares): the lower, the earlier."""

MOST_COMPARED = 16
"""So many of the least served are looked at for one that is more urgent: all, where fewer wait."""

MAX_IDLE_LANES = 64
"""Priorities that are remembered although nothing waits there."""

# A local name: see planner.py.
_PREEMPTED = RequestStatus.PREEMPTED


def by_rank(request: Request) -> tuple[int, float, int]:
    return request.rank


def by_turn(request: Request) -> QueueKey:
    """A request that has begun has a reader who waits for its next token: it goes before new ones of its tenant."""
    is_new = not request.is_resumed and request.status is not _PREEMPTED
    return (request.priority, is_new, request.arrival, request.request_id)


def service_order(shares: FairShares) -> Callable[[Request], tuple[int, float, float, int]]:
    """Of requests that run, the most urgent first."""
    return lambda item: (item.priority, shares.urgency(item.account), item.arrival, item.request_id)


class Lane:
    """The requests of one priority: in turn for each account, the accounts by what they have been served.

    Counters only grow, so an entry of the heap that is out of date lies too early, and is moved when it is met.
    """

    def __init__(self) -> None:
        self.requests: dict[Account, list[Request]] = {}  # without empty lists
        self.num_tokens = 0  # prompt tokens of all that wait here, those held back included
        self.num_waiting = 0
        self._heap: list[tuple[float, int, Account]] = []
        self._entered: set[Account] = set()  # those in the heap
        self._out: set[Account] = set()  # those that are taken out
        self._order = count()
        self._last: Account | None = None  # whose queue became empty last

    def least(self) -> Account | None:
        """The least served account with a request in order; of equals the one that came first."""
        heap = self._heap
        while heap:
            served, order, account = heap[0]
            if account not in self.requests or account in self._out:
                heappop(heap)
                self._entered.discard(account)
            elif served < account.served:
                heapreplace(heap, (account.served, order, account))
            else:
                return account
        return None

    def most_urgent(self, shares: FairShares) -> tuple[float, Account] | None:
        """The account whose turn it is, and its urgency."""
        least = self.least()
        if least is None:
            return None
        urgency = shares.urgency(least)
        if urgency == least.served and shares.is_shared:  # asks for more than its share: another may come first
            others = [entry[2] for entry in self._heap[:MOST_COMPARED] if entry[2] in self.requests]
            found = [(shares.urgency(other), other) for other in others if other not in self._out]
            return min(found, key=lambda pair: pair[0])
        return urgency, least

    def least_served(self) -> float:
        """What a tenant is lifted to that had nothing waiting."""
        account = self.least() or self._last
        return 0.0 if account is None else account.served

    def take_out(self, account: Account) -> None:
        """The account is left out of `least` until `put_back`."""
        self._out.add(account)

    def put_back(self, account: Account) -> None:
        self._out.discard(account)
        self._enter(account)

    def _enter(self, account: Account) -> None:
        if account in self.requests and account not in self._entered:
            self._entered.add(account)
            heappush(self._heap, (account.served, next(self._order), account))

    def entered(self, request: Request) -> None:
        """It waits from now on, whether in order or held back."""
        request.account.entered(request.prompt_length, self.least_served)
        self.num_tokens += request.prompt_length
        self.num_waiting += 1

    def left(self, request: Request) -> None:
        request.account.left(request.prompt_length)
        self.num_tokens -= request.prompt_length
        self.num_waiting -= 1
        if request.account.waiting == 0:
            self._last = request.account

    def show(self, request: Request) -> None:
        """Gives it its place in the order."""
        requests = self.requests.get(request.account)
        if requests is None:
            self.requests[request.account] = [request]
            self._enter(request.account)
        else:
            insort(requests, request, key=by_turn)

    def hide(self, request: Request) -> None:
        requests = self.requests[request.account]
        del requests[bisect_left(requests, by_turn(request), key=by_turn)]
        if not requests:
            del self.requests[request.account]


class Turns:
    """One pass over the order. A request is offered until it leaves the queue, is passed over or skipped.

    `close` must follow: until then skipped tenants are out of the order. Counters may move meanwhile.
    """

    def __init__(self, lanes: list[Lane], priorities: list[int], shares: FairShares) -> None:
        self._lanes = lanes
        self._shares = shares
        self._priorities = priorities
        self._place = 0
        self._skipped: list[tuple[Lane, Account]] = []
        self._num_passed: dict[Account, int] = {}
        self.passed: list[Request] = []
        self.is_over = False

    def next(self, before: Service | None = None) -> Request | None:
        """Whose turn it is; None when there is nobody, or nobody `before` that service."""
        while self._place < len(self._lanes):
            lane = self._lanes[self._place]
            found = lane.most_urgent(self._shares)
            if found is None:
                self._place += 1
                continue
            urgency, account = found
            if before is not None and (self._priorities[self._place], urgency) >= before:
                return None
            requests = lane.requests[account]
            place = self._num_passed.get(account, 0)
            if place < len(requests):
                return requests[place]
            self._skip(lane, account)
        return None

    def pass_over(self, request: Request) -> None:
        """Others of its tenant may go first."""
        self.passed.append(request)
        self._num_passed[request.account] = self._num_passed.get(request.account, 0) + 1

    def skip_tenant(self, request: Request) -> None:
        """Nothing more of this tenant and priority; `request` is the one that `next` gave."""
        self._skip(self._lanes[self._place], request.account)

    def close(self) -> None:
        for lane, account in self._skipped:
            lane.put_back(account)

    def _skip(self, lane: Lane, account: Account) -> None:
        lane.take_out(account)
        self._skipped.append((lane, account))


class WaitingQueue:
    """`num_tokens` counts the prompt tokens of all that wait. No operation walks the whole queue.

    Samples that their family holds back wait and are counted, but have no place in the order yet.
    """

    def __init__(self) -> None:
        self._lanes: dict[int, Lane] = {}
        self._priorities: list[int] = []  # of the lanes, sorted
        self._held: dict[int, Request] = {}
        self._num_waiting = 0
        self.num_tokens = 0
        self.num_tenants = 0  # with something that waits

    def __len__(self) -> int:
        return self._num_waiting

    def add(self, request: Request) -> None:
        """Its place follows from its rank, its status and its account."""
        lane = self._lane(request.priority)
        self.num_tenants += request.account.tenant.waiting == 0
        lane.entered(request)
        self._num_waiting += 1
        self.num_tokens += request.prompt_length
        family = request.family
        if family is None:
            lane.show(request)
            return
        place = bisect_left(family.waiting, by_turn(request), key=by_turn)
        family.waiting.insert(place, request)
        if place < family.num_shown:
            family.num_shown += 1
            lane.show(request)
        else:
            self._held[request.request_id] = request
        self.update(family)

    def remove(self, request: Request) -> None:
        """Takes out one that waits; its status must still be the one it was added with."""
        lane = self._lanes[request.priority]
        lane.left(request)
        self.num_tenants -= request.account.tenant.waiting == 0
        self._num_waiting -= 1
        self.num_tokens -= request.prompt_length
        family = request.family
        if family is None:
            lane.hide(request)
            return
        place = bisect_left(family.waiting, by_turn(request), key=by_turn)
        del family.waiting[place]
        if place < family.num_shown:
            family.num_shown -= 1
            lane.hide(request)
        else:
            del self._held[request.request_id]
        self.update(family)

    def update(self, family: Family) -> None:
        """Lets in or holds back its samples; to be called when one of them started, stopped or computed the prompt."""
        wanted = family.num_admissible()
        while family.num_shown < wanted:
            request = family.waiting[family.num_shown]
            self._lanes[request.priority].show(self._held.pop(request.request_id))
            family.num_shown += 1
        while family.num_shown > wanted:
            family.num_shown -= 1
            request = family.waiting[family.num_shown]
            self._lanes[request.priority].hide(request)
            self._held[request.request_id] = request

    def turns(self, shares: FairShares) -> Turns:
        """A pass over the order; nothing may be added until it is closed."""
        return Turns([self._lanes[priority] for priority in self._priorities], self._priorities, shares)

    def lanes(self) -> list[tuple[int, Lane]]:
        """In order of priority."""
        return [(priority, self._lanes[priority]) for priority in self._priorities]

    def all(self) -> list[Request]:
        """Everything that waits, in order, those held back at the end. For checks, not for steps."""
        shown = [
            request
            for _, lane in self.lanes()
            for account in sorted(lane.requests, key=lambda account: account.served)
            for request in lane.requests[account]
        ]
        return [*shown, *self._held.values()]

    def _lane(self, priority: int) -> Lane:
        lane = self._lanes.get(priority)
        if lane is None:
            if len(self._lanes) >= MAX_IDLE_LANES:
                self._lanes = {number: item for number, item in self._lanes.items() if item.num_waiting}
                self._priorities = sorted(self._lanes)
            lane = self._lanes[priority] = Lane()
            insort(self._priorities, priority)
        return lane
