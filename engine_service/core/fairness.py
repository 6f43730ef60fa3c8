"""Fair sharing between tenants: who has been served how much, who is present, what a fair share is.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), one for each
tenant and priority: served += (PROMPT_COST * prompt tokens computed + OUTPUT_COST * tokens generated) / weight. The
queue takes the next request of the least served tenant; a tenant that had nothing waiting is lifted to the least
counter of those that wait, so that nobody saves up service. Must not know: requests, blocks, queues, the clock.
"""

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

PROMPT_COST = 1.0
"""Of a prompt token that is computed (one from the prefix cache costs nothing)."""

OUTPUT_COST = 2.0
"""Of a generated token: a step computes it alone, prompt tokens together."""

MAX_WEIGHT = 1000
RECENT_S = 30.0
"""So long after its last request a tenant without any keeps its counter and its place among those who share."""

MAX_TENANTS = 1024
"""Tenants that are remembered although they have no request."""

MAX_REPORTED = 64
"""Tenants whose numbers are told after each step."""

MAX_PRIORITIES = 64
"""Priorities of a tenant whose counters are remembered although nothing waits."""

RESERVE_DIVISOR = 8
"""One slot and one block in so many stay for tenants below their share, while some of those present have no queue."""


class Tenant:
    """What one tenant has in the engine now. `weight` is its part of what is shared."""

    __slots__ = ("accounts", "last_seen", "name", "running", "waiting", "waiting_tokens", "weight")

    def __init__(self, name: str, weight: int) -> None:
        self.name = name
        self.weight = weight
        self.running = 0
        self.waiting = 0
        self.waiting_tokens = 0
        self.last_seen = 0.0
        self.accounts: dict[int, Account] = {}  # by priority


class Account:
    """A tenant's virtual token counter within one priority, and what waits there."""

    __slots__ = ("served", "tenant", "waiting", "waiting_tokens")

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.served = 0.0
        self.waiting = 0
        self.waiting_tokens = 0

    def charge(self, prompt_tokens: int, generated_tokens: int) -> None:
        """The formula of this module."""
        self.served += (PROMPT_COST * prompt_tokens + OUTPUT_COST * generated_tokens) / self.tenant.weight

    def entered(self, prompt_tokens: int, least_served: Callable[[], float]) -> None:
        """A request joins the queue. `least_served`: counter of those that wait or, if none does, waited last."""
        if self.waiting == 0:
            self.served = max(self.served, least_served())
        self.waiting += 1
        self.waiting_tokens += prompt_tokens
        self.tenant.waiting += 1
        self.tenant.waiting_tokens += prompt_tokens

    def left(self, prompt_tokens: int) -> None:
        """A request leaves the queue, whatever for."""
        self.waiting -= 1
        self.waiting_tokens -= prompt_tokens
        self.tenant.waiting -= 1
        self.tenant.waiting_tokens -= prompt_tokens


class FairShares:
    """The tenants that are present: with requests, or without for at most RECENT_S seconds.

    With one tenant nothing is shared: no rule here holds it back and its counters need not move.
    """

    def __init__(self, slots: int, slack: float = 0.0) -> None:
        """`slots` requests may run at the same time. `slack`: see `urgency`."""
        self._slots = slots
        self._slack = slack
        self._reserve = max(1, slots // RESERVE_DIVISOR)
        self._present: OrderedDict[str, Tenant] = OrderedDict()  # the longest unseen first
        self._total_weight = 0
        self.outstanding = 0  # requests, running and waiting; told before each step

    @property
    def is_shared(self) -> bool:
        return len(self._present) > 1

    @property
    def total_weight(self) -> int:
        """Of all present."""
        return self._total_weight

    def tenants(self) -> tuple[Tenant, ...]:
        return tuple(self._present.values())

    def named_counts(self) -> tuple[tuple[str, int, int], ...]:
        """Name, running and waiting requests of tenants with a name and a request: of MAX_REPORTED at most."""
        if not self.is_shared and "" in self._present:
            return ()
        busy = (item for item in self._present.values() if item.name and (item.running or item.waiting))
        return tuple((item.name, item.running, item.waiting) for item in islice(busy, MAX_REPORTED))

    def account(self, name: str, weight: int, priority: int, now: float) -> Account:
        """The account that a new request belongs to. The last weight given for a tenant counts."""
        tenant = self._present.get(name)
        if tenant is None:
            tenant = self._present[name] = Tenant(name, weight)
            self._total_weight += weight
            self._bound()
        self._total_weight += weight - tenant.weight
        tenant.weight = weight
        tenant.last_seen = max(tenant.last_seen, now)
        self._present.move_to_end(name)
        account = tenant.accounts.get(priority)
        if account is None:
            if len(tenant.accounts) >= MAX_PRIORITIES:
                tenant.accounts = {number: item for number, item in tenant.accounts.items() if item.waiting}
            account = tenant.accounts[priority] = Account(tenant)
        return account

    def expire(self, now: float) -> None:
        """Forgets tenants that have been without requests for RECENT_S. O(1) on average."""
        while self.is_shared:
            tenant = next(iter(self._present.values()))
            if tenant.last_seen + RECENT_S > now:
                return
            if tenant.running or tenant.waiting:
                tenant.last_seen = now
                self._present.move_to_end(tenant.name)
            else:
                self._forget(tenant)

    def exceeds_share(self, tenant: Tenant, more: int = 0) -> bool:
        """Whether it runs, with `more` requests, more than its part of the slots."""
        return (tenant.running + more) * self._total_weight > self._slots * tenant.weight

    def asks_beyond(self, tenant: Tenant) -> bool:
        """Whether it has more requests, running and waiting, than its part of the slots, and more than half of its part
        of all requests (a burst beside a flood is no flood).
        """
        mine = (tenant.running + tenant.waiting) * self._total_weight
        return mine > self._slots * tenant.weight and 2 * mine > self.outstanding * tenant.weight

    def urgency(self, account: Account) -> float:
        """The lower, the earlier: what it was served, less `slack` (over its weight) while it asks for no more than its
        share.

        Such a tenant is served about as much as others, now less, now a bit more: without slack it would then wait
        until all others have caught up. What tenants differ by grows by the slack, not more.
        """
        if self.asks_beyond(account.tenant):
            return account.served
        return account.served - self._slack / account.tenant.weight

    def may_start(self, tenant: Tenant, num_running: int, num_queues: int) -> bool:
        """Whether one more of its requests may run beside `num_running`. A tenant with none always may.

        `num_queues`: so many tenants have requests waiting.

        The last free slots are not for a tenant beyond its share, as long as one of those present has no queue: its
        next request finds a place without waiting for the end of another's.
        """
        if not self.is_shared or self._slots - num_running > self._reserve or tenant.running == 0:
            return True
        return not self.exceeds_share(tenant, 1) or num_queues >= len(self._present)

    def block_reserve(self, tenant: Tenant, num_blocks: int) -> int:
        """Blocks to be left free by a request of a tenant that has others running."""
        return num_blocks // RESERVE_DIVISOR if self.is_shared and tenant.running else 0

    def within_share(self, mine: int, more: int, limit: int, tenant: Tenant) -> bool:
        """Whether `mine` and `more` are within the tenant's part of `limit`, or the tenant has none yet.

        A tenant that is alone has no part: others may come.
        """
        return mine == 0 or (self.is_shared and (mine + more) * self._total_weight <= limit * tenant.weight)

    def _bound(self) -> None:
        """Drops the longest unseen idle tenant beyond MAX_TENANTS; those with requests are bounded by these."""
        for _ in range(len(self._present) - MAX_TENANTS):
            tenant = next(iter(self._present.values()))
            if tenant.running or tenant.waiting:
                self._present.move_to_end(tenant.name)
            else:
                self._forget(tenant)

    def _forget(self, tenant: Tenant) -> None:
        del self._present[tenant.name]
        self._total_weight -= tenant.weight
