"""The scheduler's figures at one moment: for metrics and load, and for the record of a step.

Must not know: when they are taken, exporters, the clock.
"""

from engine_service.core.fairness import FairShares
from engine_service.core.kv_manager import KvManager
from engine_service.core.plan import Plan
from engine_service.core.planner import StepDraft
from engine_service.core.roster import Roster
from engine_service.core.speculation import Speculation
from engine_service.core.stats import Counters, EngineStats, StepRecord


def engine_stats(
    kv: KvManager,
    roster: Roster,
    shares: FairShares,
    counters: Counters,
    speculation: Speculation | None,
    has_prefix_cache: bool,
) -> EngineStats:
    """O(1)."""
    pool = kv.pool
    return EngineStats(
        running=len(roster.running),
        waiting=len(roster.waiting),
        waiting_tokens=roster.waiting.num_tokens,
        total_blocks=pool.num_blocks,
        used_blocks=pool.num_used,
        cached_blocks=pool.num_cached,
        free_blocks=pool.num_free - pool.num_cached,
        steps=counters.steps,
        preemptions=counters.preemptions,
        prompt_tokens=counters.prompt_tokens,
        generated_tokens=counters.generated_tokens,
        cached_tokens=kv.cached_tokens,
        looked_up_tokens=kv.looked_up_tokens if has_prefix_cache else 0,
        evictions=kv.evictions,
        finished_by_reason=dict(counters.finished),
        tenants=shares.named_counts(),
        drafted_tokens=0 if speculation is None else speculation.drafted_tokens,
        accepted_tokens=0 if speculation is None else speculation.accepted_tokens,
    )


def step_record(plan: Plan, draft: StepDraft, kv: KvManager, roster: Roster) -> StepRecord:
    """What `plan`, which was made from `draft` just now, does."""
    pool = kv.pool
    return StepRecord(
        step=plan.step,
        decode_tokens=draft.decode_tokens,
        prefill_tokens=draft.prefill_tokens,
        running=len(roster.running),
        waiting=len(roster.waiting),
        used_blocks=pool.num_used,
        admitted=tuple(new.request_id for new in draft.new),
        preempted=tuple(draft.preempted),
        num_decodes=draft.num_decodes,
        cached_blocks=pool.num_cached,
        free_blocks=pool.num_free - pool.num_cached,
        draft_tokens=draft.draft_tokens,
    )
