"""Whether one more submission may wait: limits of the whole queue, and each tenant's part of it.

Must not know: blocks, steps, the clock.
"""

from collections.abc import Sequence

from engine_service.core.fairness import FairShares, Tenant
from engine_service.core.outcome import Refusal, RefusalCode
from engine_service.core.request import Request
from engine_service.core.scheduler_config import SchedulerConfig
from engine_service.core.waiting import WaitingQueue

RETRY_AFTER_S = 1.0
"""Hint for a client that found the queue full, while nothing is known of its speed."""

RESERVED_PART = 4
"""One place in so many is for tenants within their part of the queue, so that a flood of one keeps nobody out."""


class QueueLimits:
    """The nameless tenant, alone, may fill the queue: then nobody shares the engine."""

    def __init__(self, config: SchedulerConfig, waiting: WaitingQueue, shares: FairShares) -> None:
        self._config = config
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
            return _full(f"{len(waiting):,} requests wait already{also} the limit is {config.max_waiting_requests:,}")
        if len(waiting) and waiting.num_tokens + tokens > config.max_waiting_tokens:
            return _full(
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
                return _full(
                    f"{mine:,} {what} of this tenant wait already and {used:,} in all; beyond its share a tenant may "
                    f"fill the queue up to {most:,} of {limit:,}"
                )
        return None


def _full(message: str) -> Refusal:
    return Refusal(RefusalCode.QUEUE_FULL, message, retry_after_s=RETRY_AFTER_S)
