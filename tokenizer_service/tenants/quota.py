"""What each tenant uses now, and whether its limits allow more.

Must not know: transports, how tenants are recognised, what a request does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tokenizer_service.engines.refusal import QuotaBreach, Refusal, RefusalCode, invalid_field
from tokenizer_service.tenants.tenant import Tenant

_MINUTE_S = 60.0
_DEFAULT_RETRY_S = 1.0
_SHORTEST_RETRY_S = 0.1
_LONGEST_RETRY_S = 60.0
_SMOOTHING = 0.2  # weight of the latest request in the mean of their times


@dataclass(slots=True)
class Quota:
    """One tenant's use. The limits come with each call, since they may change while it runs. Times in seconds.

    `spent` is what the bucket lacks to be full. `mean_s` is how long a request takes.
    """

    clock: Callable[[], float]
    active: int = 0
    tokens_in_flight: int = 0
    spent: float = 0.0
    updated: float = 0.0
    mean_s: float | None = None

    def enter(self, tenant: Tenant, otherwise: int) -> Refusal | None:
        """Takes a place among the tenant's requests, to be given back with `leave`. `otherwise`: without a limit."""
        limit = tenant.limits.max_requests or otherwise
        if self.active >= limit:
            text = f"{self.active:,} requests of this tenant are being served, its limit is {limit:,}"
            return self._exhausted(tenant, "max_requests", text, self._next_end_s())
        self.active += 1
        return None

    def leave(self, seconds: float) -> None:
        """Gives the place of a request back that took so long."""
        self.free()
        before = seconds if self.mean_s is None else self.mean_s
        self.mean_s = before + _SMOOTHING * (seconds - before)

    def free(self) -> None:
        """Gives a place back that was no request's."""
        self.active -= 1

    def reserve(self, tenant: Tenant, prompt: int, completion: int) -> Refusal | None:
        """Takes tokens, to be settled with `settle`; or says which limit does not allow it, and when it will."""
        tokens = prompt + completion
        refusal = self._check_in_flight(tenant, prompt, tokens) or self._check_rate(tenant, prompt, tokens)
        if refusal is None:
            self.tokens_in_flight += tokens
            self.spent += tokens
        return refusal

    def settle(self, reserved: int, used: int) -> None:
        """The request has ended: what it did not use goes back to the bucket."""
        self.tokens_in_flight -= reserved
        self.spent = max(0.0, self.spent - max(0, reserved - used))

    def _check_in_flight(self, tenant: Tenant, prompt: int, tokens: int) -> Refusal | None:
        limit = tenant.limits.max_tokens_in_flight
        if limit is None or self.tokens_in_flight + tokens <= limit:
            return None
        if tokens > limit:
            return _too_much("max_tokens_in_flight", prompt, tokens, limit)
        text = f"{self.tokens_in_flight:,} tokens of this tenant are in flight, {tokens:,} more would exceed {limit:,}"
        return self._exhausted(tenant, "max_tokens_in_flight", text, self._next_end_s())

    def _check_rate(self, tenant: Tenant, prompt: int, tokens: int) -> Refusal | None:
        limit = tenant.limits.tokens_per_minute
        if limit is None:
            self.spent = 0.0
            return None
        now = self.clock()
        self.spent = max(0.0, self.spent - (now - self.updated) * limit / _MINUTE_S)
        self.updated = now
        missing = self.spent + tokens - limit
        if missing <= 0:
            return None
        if tokens > limit:
            return _too_much("tokens_per_minute", prompt, tokens, limit)
        left = max(0, int(limit - self.spent))
        text = f"{left:,} of {limit:,} tokens per minute are left to this tenant, the request may take {tokens:,}"
        return self._exhausted(tenant, "tokens_per_minute", text, missing * _MINUTE_S / limit)

    def _next_end_s(self) -> float:
        """When the next of the running requests ends, by how long they take."""
        if self.mean_s is None:
            return _DEFAULT_RETRY_S
        return self.mean_s / max(1, self.active)

    def _exhausted(self, tenant: Tenant, limit: str, text: str, retry_s: float) -> Refusal:
        delay = min(max(retry_s, _SHORTEST_RETRY_S), _LONGEST_RETRY_S)
        breach = QuotaBreach(f"tenant:{tenant.name}", limit, text)
        return Refusal(RefusalCode.RESOURCE_EXHAUSTED, text, retry_after_s=delay, quota=breach)


def _too_much(limit_name: str, prompt: int, tokens: int, limit: int) -> Refusal:
    """To try again would not help."""
    new = tokens - prompt
    text = f"prompt of {prompt:,} tokens and up to {new:,} new ones exceed {limit_name} {limit:,} of this tenant"
    return invalid_field("options.sampling.max_tokens", text)


@dataclass(frozen=True, slots=True)
class Quotas:
    """By tenant name. `max_requests` bounds all requests of the service: a tenant alone gets three quarters."""

    clock: Callable[[], float]
    max_requests: int
    _by_name: dict[str, Quota] = field(default_factory=dict)

    def of(self, tenant: Tenant) -> Quota:
        quota = self._by_name.get(tenant.name)
        if quota is None:
            quota = self._by_name[tenant.name] = Quota(self.clock, updated=self.clock())
        return quota

    def enter(self, tenant: Tenant) -> Refusal | None:
        most = self.max_requests if not tenant.name else max(1, self.max_requests * 3 // 4)
        return self.of(tenant).enter(tenant, most)

    @contextmanager
    def place_to_read(self, tenant: Tenant) -> Iterator[Refusal | None]:
        """A place among the tenant's requests while one is read; or why there is none."""
        refusal = self.enter(tenant)
        try:
            yield refusal
        finally:
            if refusal is None:
                self.of(tenant).free()

    def named(self) -> Iterator[tuple[str, Quota]]:
        """Of all tenants with a name that were seen."""
        return ((name, quota) for name, quota in list(self._by_name.items()) if name)
