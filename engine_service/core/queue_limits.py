"""Whether one more submission may wait: limits of the whole queue, and each tenant's part of it.

Must not know: blocks, steps, the clock.
"""

from collections.abc import Sequence

from engine_service.core.fairness import FairShares, Tenant
from engine_service.core.outcome import Refusal, RefusalCode
from engine_service.core.request import Request
from engine_service.core.scheduler_config import SchedulerConfig
from engine_service.core.speed import Speed
from engine_service.core.waiting import WaitingQueue

RETRY_AFTER_S = 1.0
"""Hint for a client that found the queue full, while nothing is known of its speed."""

ROOM_DIVISOR = 16
"""The hint is the time in which one place in so many becomes free, so that not all come back for the next one."""

_SHORTEST_RETRY_S, _LONGEST_RETRY_S = 0.1, 60.0

RESERVED_PART = 4
"""One place in so many is for tenants within their part of the queue, so that a flood of one keeps nobody out."""


class QueueLimits:
    """The nameless tenant, alone, may fill the queue: then nobody shares the engine."""

    def __init__(self, config: SchedulerConfig, waiting: WaitingQueue, shares: FairShares, speed: Speed) -> None:
        self._config = config
        self._speed = speed
        self._waiting = waiting
        self._shares = shares

    def check(self, samples: Sequence[Request]) -> Refusal | None:
        """For requests of one tenant that join together. An empty queue takes any prompt, however long."""
        waiting, config = self._waiting, self._config
        more, tokens = len(samples), sum(request.prompt_length for request in samples)
        if more > config.max_waiting_requests:  # to try again later would not help
            message = f"n {more:,} exceeds the {config.max_waiting_requests:,} requests that may wait"
            return Refusal(RefusalCode.INVALID, message, "request.sampling.n")
        if len(waiting) + more > config.max_waiting_requests:
            also = f", {more} more would exceed" if more > 1 else ","
            return self._full(
                f"{len(waiting):,} requests wait already{also} the limit is {config.max_waiting_requests:,}"
            )
        if len(waiting) and waiting.num_tokens + tokens > config.max_waiting_tokens:
            return self._full(
                f"{waiting.num_tokens:,} prompt tokens wait already, {tokens:,} more would "
                f"exceed the limit of {config.max_waiting_tokens:,}"
            )
        return self._check_share(samples[0].account.tenant, more, tokens)

    def _check_share(self, tenant: Tenant, more: int, tokens: int) -> Refusal | None:
        """Beyond its part of the queue a tenant may not take the places that are kept for others."""
        if not tenant.name and not self._shares.is_shared:
            return None
        waiting, config = self._waiting, self._config
        for mine, extra, used, limit, what in (
            (tenant.waiting, more, len(waiting), config.max_waiting_requests, "requests"),
            (tenant.waiting_tokens, tokens, waiting.num_tokens, config.max_waiting_tokens, "prompt tokens"),
        ):
            most = limit - limit // RESERVED_PART
            if used + extra > most and not self._shares.within_share(mine, extra, limit, tenant):
                return self._full(
                    f"{mine:,} {what} of this tenant wait already and {used:,} in all; beyond its share a tenant may "
                    f"fill the queue up to {most:,} of {limit:,}"
                )
        return None

    def _full(self, message: str) -> Refusal:
        return Refusal(RefusalCode.QUEUE_FULL, message, retry_after_s=self._retry_after_s())

    def _retry_after_s(self) -> float:
        rate = self._speed.starts_per_s()
        if rate is None:
            return RETRY_AFTER_S
        room = 1 + self._config.max_waiting_requests // ROOM_DIVISOR
        return min(max(room / rate, _SHORTEST_RETRY_S), _LONGEST_RETRY_S)
