"""Drafts: guessed tokens that a decode computes along with its own, as many as pay, where the step has room.

A draft never takes a token of the budget or a block from anything else: it comes last, and nobody is preempted for it.
Which drafts there are changes how many steps a text takes, never the text. Must not know: how a guess is made or
verified, torch, the clock.
"""

from collections import Counter

from engine_service.core.fairness import OUTPUT_COST, PROMPT_COST, FairShares
from engine_service.core.hit_rates import CommonRates, HitRates
from engine_service.core.kv_manager import KvManager
from engine_service.core.plan import Chunk
from engine_service.core.planner import StepDraft
from engine_service.core.prompt_lookup import PromptLookup
from engine_service.core.request import Request
from engine_service.core.roster import Roster
from engine_service.core.row_costs import CostCurve, RowCosts
from engine_service.core.scheduler_config import SchedulerConfig
from engine_service.core.token_rules import stop_tokens

MOST_STRETCH = 1.25
"""A step may take so many times as long for the drafts of some of its requests as for all others in it."""

LEAST_CHANCE = 0.02
"""A guess that is less likely to count pays nowhere."""

LEAST_ROWS = 64
"""So many positions of a step may sample; more, where more requests may run: devices have memory for their logits."""

CATCH_UP_TOKENS = 2048
"""Tokens that are indexed in one step: a long prompt takes several, so that no step is held up."""

_Candidate = tuple[float, int]


class Speculation:
    """Adds drafts to steps, settles them, and learns what both are worth."""

    def __init__(self, config: SchedulerConfig, kv: KvManager, roster: Roster, shares: FairShares) -> None:
        self._config = config
        self._kv = kv
        self._roster = roster
        self._shares = shares
        self._common = CommonRates()
        self._costs = RowCosts()
        self.drafted_tokens = 0
        self.accepted_tokens = 0

    def observe(self, seconds: float, decode_rows: int) -> None:
        """How long a step took that did nothing but decode."""
        self._costs.observe(decode_rows, seconds)

    def add_drafts(self, step: StepDraft) -> None:
        """Makes chunks of the step longer. O(decodes + drafted tokens)."""
        if step.decode_tokens == 0 or step.room == 0:
            return
        candidates, drafting = self._candidates(step)
        if not candidates:
            return
        curve = self._costs.curve()
        rows = step.decode_tokens + step.prefill_tokens
        free_rows = max(self._config.max_num_requests, LEAST_ROWS) - len(step.chunks)
        most = min(step.room, free_rows, curve.most_rows(rows) - rows)
        if most <= 0:
            return
        candidates.sort(reverse=True)
        are_alone = drafting == len(step.chunks)
        count = _best_count(curve, step, candidates[:most], float("inf") if are_alone else MOST_STRETCH)
        for place, length in Counter(place for _, place in candidates[:count]).items():
            self._extend(step, place, length)

    def settle(self, request: Request, chunk: Chunk, accepted: tuple[int, ...]) -> Chunk:
        """Takes the part of a draft that was right, gives the rest's blocks back, and returns the chunk without it."""
        right = chunk._replace(length=chunk.length - len(chunk.draft) + len(accepted), draft=())
        self.drafted_tokens += len(chunk.draft)
        self.accepted_tokens += len(accepted)
        request.num_drafted = 0
        request.token_ids.extend(accepted)
        request.num_scheduled = right.start + right.length
        if self._shares.is_shared:
            request.account.charge(0, len(accepted))
        self._kv.give_back(request)
        return right

    def _candidates(self, step: StepDraft) -> tuple[list[_Candidate], int]:
        """(chance, place of the chunk) for each token that could be drafted, and how many chunks have some."""
        found: list[_Candidate] = []
        left, drafting = CATCH_UP_TOKENS, 0
        for place in range(step.decode_tokens):
            chunk, request = step.chunks[place], step.requests[place]
            if len(request.token_ids) != chunk.start + 1:
                continue  # its last token is not known yet
            lookup = request.lookup
            if lookup is None:
                rates = HitRates(self._common)
                lookup = PromptLookup(request.token_ids, request.num_given, request.length_limit, rates)
                request.lookup = lookup
            left -= lookup.catch_up(left)
            before = len(found)
            if lookup.is_ready:
                for chance in lookup.chances(self._most_tokens(request)):
                    if chance < LEAST_CHANCE:
                        break
                    found.append((chance, place))
            drafting += len(found) > before
        return found, drafting

    def _most_tokens(self, request: Request) -> int:
        """The last token allowed is never drafted: it is sampled and computed no more. All rows of a draft are on the
        same side of `min_tokens`."""
        most = min(
            self._config.max_draft_tokens,
            self._config.prefill_chunk_size - 1,
            request.length_limit - len(request.token_ids) - 1,
        )
        until_stop = request.sampling.min_tokens - request.num_completion
        return min(most, until_stop - 1) if until_stop > 0 else most

    def _extend(self, step: StepDraft, place: int, length: int) -> None:
        chunk, request = step.chunks[place], step.requests[place]
        draft = self._until_stop(request, request.lookup.guess(length) if request.lookup is not None else ())
        blocks = self._make_room(request, chunk, len(draft))
        draft = draft[: request.num_slots - chunk.start - 1]
        if not draft:
            return
        step.chunks[place] = chunk._replace(length=1 + len(draft), new_block_ids=blocks, draft=draft)
        step.room -= len(draft)
        step.draft_tokens += len(draft)
        request.num_drafted = len(draft)

    def _until_stop(self, request: Request, draft: tuple[int, ...]) -> tuple[int, ...]:
        """A token that ends the request has nothing behind it that could be computed."""
        stops = stop_tokens(request.sampling, self._config.eos_token_ids)
        if stops.isdisjoint(draft):
            return draft
        return draft[: next(place for place, token in enumerate(draft) if token in stops)]

    def _make_room(self, request: Request, chunk: Chunk, length: int) -> tuple[int, ...]:
        """Blocks for the draft, of those that nobody needs for the next step; what the worker is told of the table."""
        least_free, before = len(self._roster.running), request.num_slots
        while request.num_slots <= chunk.start + length and self._kv.pool.num_free > least_free:
            self._kv.grow(request)
        if request.num_slots == before:
            return chunk.new_block_ids
        return tuple(request.block_table[-(-chunk.start // self._config.block_size) :])


def _best_count(curve: CostCurve, step: StepDraft, candidates: list[_Candidate], most_stretch: float) -> int:
    """How many of the candidates, best first, make the most of the step's time."""
    value = step.decode_tokens + step.prefill_tokens * PROMPT_COST / OUTPUT_COST
    rows = step.decode_tokens + step.prefill_tokens
    alone = curve.time(rows)
    best, best_count = value / alone, 0
    for count, (chance, _) in enumerate(candidates, 1):
        value += chance
        time = curve.time(rows + count)
        if time > most_stretch * alone:
            break
        if value / time > best:
            best, best_count = value / time, count
    return best_count
