"""Refuses at once a request that cannot have its first token before its deadline.

Must not know: the clock, how steps are planned.
"""

from engine_service.core.fairness import FairShares
from engine_service.core.kv_manager import KvManager
from engine_service.core.outcome import Refusal, RefusalCode
from engine_service.core.request import Request
from engine_service.core.roster import Roster
from engine_service.core.speed import Speed


class Punctuality:
    """An engine without requests refuses nobody: nothing is ahead, and what it measured may be out of date."""

    def __init__(self, speed: Speed, roster: Roster, kv: KvManager, shares: FairShares, slots: int) -> None:
        self._speed = speed
        self._roster = roster
        self._kv = kv
        self._shares = shares
        self._slots = slots

    def check(self, request: Request) -> Refusal | None:
        """For a request that is about to wait. Its time counts from its arrival."""
        roster = self._roster
        if request.deadline is None or not (roster.running or len(roster.waiting)):
            return None
        if request.is_resumed:  # it goes before all that is new, and half of it may be delivered
            return None
        left = request.deadline - request.arrival
        requests, tokens = self._ahead(request)
        free = self._slots - len(roster.running)
        least = self._speed.least_first_token_s(tokens + request.prompt_length, requests, free)
        if least <= left:
            return None
        # Only now: to look a prompt up costs as much as to hash it.
        own = request.prompt_length - self._kv.cached_prefix(request)
        least = self._speed.least_first_token_s(tokens + own, requests, free)
        if least <= left:
            return None
        return Refusal(
            RefusalCode.TOO_LATE,
            f"the first token would come in {least:.3g} s at the earliest, the deadline is in {max(0.0, left):.3g} s: "
            f"{requests:,} requests and {tokens:,} prompt tokens are ahead of {own:,} to be computed",
        )

    def _ahead(self, request: Request) -> tuple[int, int]:
        """Requests and prompt tokens that are served before it.

        All of better priorities; in its own those of its tenant, and of other tenants as much as a fair share gives
        them meanwhile, or all if that is less.
        """
        account, num_requests, num_tokens = request.account, 0, 0
        others = max(0, self._shares.total_weight - account.tenant.weight) / account.tenant.weight
        for priority, lane in self._roster.waiting.lanes():
            if priority < request.priority:
                num_requests += lane.num_waiting
                num_tokens += lane.num_tokens
            elif priority == request.priority:
                mine, my_tokens = account.waiting, account.waiting_tokens
                num_requests += mine + min(lane.num_waiting - mine, int(others * mine))
                num_tokens += my_tokens + min(lane.num_tokens - my_tokens, int(others * my_tokens))
        return num_requests, num_tokens
