"""Chooses the chunks of one step: decodes, then prefills, then requests from the waiting queue.

Where tenants share the engine, prefills and waiting requests compete for the budget: the least served tenant first.
Must not know: results, finishing, deadlines, torch, the clock.
"""

from contextlib import closing

from engine_service.core.fairness import Account, FairShares
from engine_service.core.kv_manager import KvManager
from engine_service.core.plan import Chunk, NewRequest
from engine_service.core.request import Request, RequestStatus
from engine_service.core.roster import Roster
from engine_service.core.scheduler_config import MIN_PREFILL_BESIDE_DECODES, ROWS_PER_TILE, SchedulerConfig
from engine_service.core.waiting import Service, Turns, service_order

MAX_TIMES_PASSED = 16
"""So many later requests may be admitted before one that does not fit yet; then the queue waits for it."""

MAX_PASSED_OVER = 4
"""So many requests that do not fit are passed over in one step."""

RESERVE_DIVISOR = 64
"""One block in so many stays free at an admission, for the growth of those that run already."""

# A local name: in CPython 3.11 reading a member of an Enum class costs as much as half a loop turn.
_RUNNING = RequestStatus.RUNNING


class StepDraft:
    """A step under construction. `requests` are those of `chunks`, one by one.

    `room` is what is left of the step's tokens, `budget` what prompts may take of it beside the decodes. `lifts`: the
    decodes are all of tenants that ask for more than their share, so prompts of others may take the whole room.
    """

    __slots__ = (
        "budget",
        "chunks",
        "copies",
        "decode_tokens",
        "draft_tokens",
        "lifts",
        "new",
        "num_decodes",
        "preempted",
        "prefill_tokens",
        "requests",
        "room",
        "short_of_blocks",
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.room = budget
        self.chunks: list[Chunk] = []
        self.requests: list[Request] = []
        self.new: list[NewRequest] = []
        self.copies: list[tuple[int, int]] = []
        self.preempted: list[int] = []
        self.num_decodes = 0
        self.decode_tokens = 0
        self.draft_tokens = 0
        self.prefill_tokens = 0
        self.short_of_blocks = False
        self.lifts = False


class Planner:
    """Fills drafts. All requests are treated alike: known tokens minus scheduled ones are to be computed.

    The budget holds a token for every running request (see SchedulerConfig), so decodes never wait for it.
    """

    def __init__(self, config: SchedulerConfig, kv: KvManager, roster: Roster, shares: FairShares) -> None:
        self._config = config
        self._kv = kv
        self._roster = roster
        self._shares = shares

    def draft(self) -> StepDraft:
        draft = StepDraft(self._config.step_token_budget)
        prefilling = self._add_decodes(draft)
        self._shares.outstanding = len(self._roster.running) + len(self._roster.waiting)
        with closing(self._roster.waiting.turns(self._shares)) as turns:
            if self._shares.is_shared:
                self._charge_decodes(draft)
                self._add_by_service(draft, prefilling, turns)
            else:
                self._add_prefills(draft, prefilling)
            self._add_waiting(draft, turns)
        return draft

    def _add_decodes(self, draft: StepDraft) -> list[Request]:
        """A chunk for each running request with one token to compute; returns those with more."""
        prefilling: list[Request] = []
        chunks, requests = draft.chunks, draft.requests
        order = self._decode_order()
        for request in order:
            start = request.num_scheduled
            known = len(request.token_ids) + request.num_sampling
            if known - start > 1:
                prefilling.append(request)
                continue
            # At the limit, the sample in flight is the last token.
            if known >= request.length_limit or request.status is not _RUNNING or request.num_drafted:
                continue
            new_blocks: tuple[int, ...] = ()
            if start >= request.num_slots:
                new_blocks = self._grow(request, draft, order)
                if not new_blocks:
                    continue
            allow_stop = known - request.prompt_length >= request.sampling.min_tokens
            chunks.append(Chunk(request.request_id, start, 1, new_blocks, True, allow_stop))
            requests.append(request)
            request.num_scheduled = known
            request.num_sampling += 1
            request.in_flight += 1
        draft.num_decodes = len(chunks)
        draft.decode_tokens = len(chunks)
        draft.room -= draft.decode_tokens
        draft.budget = self._prefill_budget(draft.budget, draft.decode_tokens)
        return prefilling

    def _prefill_budget(self, budget: int, decode_tokens: int) -> int:
        """Prompt tokens that fit beside so many decodes: together they are the nearest number of whole tiles."""
        room = budget - decode_tokens
        per_decode = self._config.prefill_per_decode
        if per_decode == 0 or decode_tokens == 0:
            return room
        rows = (1 + per_decode) * decode_tokens
        tiles = max(1, (rows + ROWS_PER_TILE // 2 - 1) // ROWS_PER_TILE)
        return min(room, max(MIN_PREFILL_BESIDE_DECODES, tiles * ROWS_PER_TILE - decode_tokens))

    def _decode_order(self) -> list[Request]:
        """By rank; the last may be preempted for the first. Where blocks are short and tenants share them, the most
        served tenant of the worst priority comes last."""
        running = self._roster.running
        if self._shares.is_shared and self._kv.pool.num_free < len(running):
            return sorted(running, key=service_order(self._shares))
        return running.copy()

    def _grow(self, request: Request, draft: StepDraft, order: list[Request]) -> tuple[int, ...]:
        """A block for the request, taken from others if need be; nothing if it has to wait.

        The victim is always the last running request of `order`, possibly this one: none that the draft names. Victims
        that a plan in flight names give their blocks back later: then no further victim is chosen.
        """
        while not (block := self._kv.grow(request)):
            draft.short_of_blocks = True
            if self._roster.leaving:
                return ()
            while order[-1].status is not _RUNNING:
                order.pop()
            victim = order[-1]
            self._roster.preempt(victim)
            draft.preempted.append(victim.request_id)
            if victim is request:
                return ()
        return block

    def _charge_decodes(self, draft: StepDraft) -> None:
        tokens: dict[Account, int] = {}
        for request in draft.requests:
            account = request.account
            tokens[account] = tokens.get(account, 0) + 1
        for account, count in tokens.items():
            account.charge(0, count)
        draft.lifts = all(self._shares.asks_beyond(account.tenant) for account in tokens)

    def _budget_for(self, draft: StepDraft, request: Request) -> int:
        """Tokens that the step has left for this request."""
        if draft.lifts and not self._shares.asks_beyond(request.account.tenant):
            return draft.room
        return draft.budget

    def _add_by_service(self, draft: StepDraft, prefilling: list[Request], turns: Turns) -> None:
        """Prefills of the least served tenants first; before each, those that wait and are served less."""
        for request in sorted(prefilling, key=service_order(self._shares)):
            self._add_waiting(draft, turns, (request.priority, self._shares.urgency(request.account)))
            if request.status is _RUNNING and (budget := self._budget_for(draft, request)):
                self._add_chunk(draft, request, budget)

    def _add_prefills(self, draft: StepDraft, prefilling: list[Request]) -> None:
        for request in prefilling:
            if draft.budget == 0:
                return
            if request.status is _RUNNING:
                self._add_chunk(draft, request, draft.budget)

    def _add_waiting(self, draft: StepDraft, turns: Turns, before: Service | None = None) -> None:
        """Admits in order. A request that does not fit lets later ones pass, a bounded number of times."""
        running, most = self._roster.running, self._config.max_num_requests
        if draft.short_of_blocks:
            return
        while not turns.is_over and draft.room and len(running) < most:
            request = turns.next(before)
            if request is None or not (budget := self._budget_for(draft, request)):
                return
            if not self._shares.may_start(request.account.tenant, len(running), self._roster.waiting.num_tenants):
                turns.skip_tenant(request)
            elif self._admit(draft, request):
                self._start(draft, request, budget)
                for other in turns.passed:
                    other.times_passed += 1
            else:
                turns.pass_over(request)
            turns.is_over = len(turns.passed) > MAX_PASSED_OVER or any(
                other.times_passed >= MAX_TIMES_PASSED for other in turns.passed
            )

    def _admit(self, draft: StepDraft, request: Request) -> bool:
        if request.in_flight:  # preempted, and its blocks are not back yet
            return False
        num_blocks = self._config.num_blocks
        reserve = min(len(self._roster.running), max(1, num_blocks // RESERVE_DIVISOR))
        reserve += self._shares.block_reserve(request.account.tenant, num_blocks)
        donor = None if request.family is None else request.family.donor()
        if donor is None or self._kv.holds_more(request):
            return self._kv.admit(request, reserve)
        copies = self._kv.fork(request, donor, reserve)
        if copies is None:
            return False
        draft.copies.extend(copies)
        return True

    def _start(self, draft: StepDraft, request: Request, budget: int) -> None:
        self._roster.start(request)
        draft.new.append(
            NewRequest(
                request.request_id,
                tuple(request.token_ids),
                request.prompt_length,
                tuple(request.block_table),
                request.sampling,
                request.known_prompt_logprobs if request.sampling.prompt_logprobs is not None else 0,
                request.adapter,
            )
        )
        self._add_chunk(draft, request, budget)

    def _add_chunk(self, draft: StepDraft, request: Request, budget: int) -> None:
        """As many of the tokens to compute as budget and chunk size allow; their blocks exist already."""
        start = request.num_scheduled
        known = len(request.token_ids) + request.num_sampling
        length = min(known - start, budget, self._config.prefill_chunk_size)
        samples = start + length == known
        allow_stop = known - request.prompt_length >= request.sampling.min_tokens
        draft.chunks.append(Chunk(request.request_id, start, length, (), samples, allow_stop or not samples))
        draft.requests.append(request)
        draft.budget = max(0, draft.budget - length)
        draft.room -= length
        draft.prefill_tokens += length
        request.num_scheduled = start + length
        request.num_sampling += samples
        request.in_flight += 1
        if self._shares.is_shared:
            request.account.charge(length, samples)
