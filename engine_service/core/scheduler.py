"""Decides what each step computes, and settles what it computed.

Must not know: torch, gRPC, asyncio, the clock (`now` is an argument), how a plan is executed.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine_service.core.admission import check_length
from engine_service.core.block_pool import BlockPool
from engine_service.core.deadlines import DeadlineQueue
from engine_service.core.fairness import FairShares
from engine_service.core.invariants import check_nothing_held, check_shares, check_state
from engine_service.core.kv_events import KvEvent, KvEventLog
from engine_service.core.kv_manager import KvManager
from engine_service.core.outcome import Finish, FinishReason, Refusal, RefusalCode, RequestNews
from engine_service.core.plan import Chunk, Plan, Result
from engine_service.core.planner import Planner, StepDraft
from engine_service.core.prefix_index import (
    BlockIndex,
    HashFunction,
    NullPrefixIndex,
    PrefixIndex,
    sha256_digest,
)
from engine_service.core.punctuality import Punctuality
from engine_service.core.queue_limits import QueueLimits
from engine_service.core.request import Request, RequestStatus
from engine_service.core.roster import Roster
from engine_service.core.scheduler_config import SchedulerConfig as SchedulerConfig
from engine_service.core.snapshots import engine_stats, step_record
from engine_service.core.speculation import Speculation
from engine_service.core.speed import Speed
from engine_service.core.stats import Counters, EngineStats, StepRecord
from engine_service.core.stopping import finish_reason

SLACK_STEPS = 8
"""A tenant within its share may be ahead of others by so many steps' tokens."""

MAX_PLANS_IN_FLIGHT = 8
"""More unsettled plans than any pipeline needs: a caller that gets here does not settle."""

# Local names: in CPython 3.11 reading a member of an Enum class costs more than all else in these loops.
_RUNNING = RequestStatus.RUNNING
_FINISHED = RequestStatus.FINISHED


@dataclass(frozen=True, slots=True)
class _Flight:
    """A plan whose result has not been applied, the requests of its chunks, and its tokens if all it does is decode."""

    plan: Plan
    requests: tuple[Request, ...]
    decode_rows: int


class Scheduler:
    """Continuous batching over a paged KV pool. One thread calls it.

    A caller either alternates `plan` and `apply`, or plans ahead of the results (overlap); `apply` settles
    the oldest plan in flight. Which requests a request meets changes when it is computed, never what.
    """

    def __init__(self, config: SchedulerConfig, *, hash_function: HashFunction = sha256_digest) -> None:
        """`hash_function` keys the prefix index; any function is correct, see PrefixIndex."""
        self._config = config
        index: BlockIndex = PrefixIndex(config.block_size, hash_function) if config.prefix_cache else NullPrefixIndex()
        self._kv = KvManager(BlockPool(config.num_blocks), index, config.block_size)
        self._roster = Roster(self._kv)
        self._shares = FairShares(config.max_num_requests, SLACK_STEPS * config.step_token_budget)
        self._planner = Planner(config, self._kv, self._roster, self._shares)
        self._speed = Speed(config.step_token_budget)
        self._speculation = (
            Speculation(config, self._kv, self._roster, self._shares) if config.max_draft_tokens else None
        )
        self._decode_rows = 0  # of the latest result, if its step only decoded
        self._num_started = 0
        self._queue_limits = QueueLimits(config, self._roster.waiting, self._shares, self._speed)
        self._punctuality = Punctuality(self._speed, self._roster, self._kv, self._shares, config.max_num_requests)
        self._live: dict[int, Request] = {}
        self._flights: deque[_Flight] = deque()
        self._deadlines = DeadlineQueue()
        self._with_news: dict[Request, None] = {}
        self._counters = Counters()
        self._kv_events = KvEventLog()
        self.last_record: StepRecord | None = None

    def submit(self, *samples: Request) -> Refusal | None:
        """Queues a request, or all samples of one prompt (see `Family`), or says why not and queues none.

        ValueError when an id is live (the caller's bug).
        """
        for request in samples:
            if request.request_id in self._live:
                raise ValueError(f"request id {request.request_id} is submitted while it is live")
        refusal = self._check_fits(samples[0])
        if refusal is None:
            self._open_accounts(samples)
            refusal = self._queue_limits.check(samples) or self._punctuality.check(samples[0])
        if refusal is None:
            for request in samples:
                request.length_limit = min(request.length_limit, self._config.max_model_len)
                self._live[request.request_id] = request
                self._roster.waiting.add(request)
                self._deadlines.add(request)
        return refusal

    def abort(self, request_id: int, cause: Refusal | None = None) -> None:
        """Ends a request now; nothing happens for an unknown or finished id."""
        request = self._live.get(request_id)
        if request is not None:
            self._finish(request, FinishReason.ABORT, error=cause)

    def watch_kv_events(self, is_on: bool, with_tokens: bool = True) -> None:
        """From now on `take_kv_events` tells of the prefix cache, beginning with a snapshot; or it is silent."""
        self._kv_events = KvEventLog()
        self._kv.index.watch(self._kv_events if is_on else None, with_tokens)

    def take_kv_events(self) -> tuple[KvEvent, ...]:
        return self._kv_events.take()

    def plan(self, now: float) -> Plan | None:
        """The next step, or None when there is nothing to compute and nothing to tell the worker.

        A plan may be without chunks, when requests have ended that the worker has to forget.
        """
        if len(self._flights) >= MAX_PLANS_IN_FLIGHT:
            raise RuntimeError(f"{len(self._flights)} plans are in flight: apply the oldest result first")
        self._expire(now)
        self._shares.expire(now)
        draft = self._planner.draft()
        if self._speculation is not None:
            self._speculation.add_drafts(draft)
        if not draft.chunks and not self._roster.dropped:
            return None
        return self._launch(draft)

    def apply(self, result: Result) -> None:
        """Settles the oldest plan in flight. ValueError when the result is not that plan's."""
        flight = self._flights[0] if self._flights else None
        if flight is None or result.step != flight.plan.step:
            expected = "no plan" if flight is None else f"step {flight.plan.step}"
            raise ValueError(f"result of step {result.step}, but {expected} is the oldest in flight")
        self._flights.popleft()
        self._decode_rows = flight.decode_rows
        accepted = dict(result.accepted)
        sampled = dict(result.sampled)
        failures = {failure.request_id: failure for failure in result.failures}
        self._keep_logprobs(result)
        for chunk, request in zip(flight.plan.chunks, flight.requests, strict=True):
            was_running = request.status is _RUNNING
            request.in_flight -= 1
            if chunk.start < request.prompt_length:
                end = min(chunk.start + chunk.length, request.prompt_length)
                self._counters.prompt_tokens += end - chunk.start
            if request.status is not _FINISHED:
                if failures and request.request_id in failures:
                    failure = failures[request.request_id]
                    code = RefusalCode.INVALID if failure.is_clients else RefusalCode.FAILED
                    self._finish(request, FinishReason.ERROR, error=Refusal(code, failure.message))
                else:
                    self._settle(request, self._take_draft(request, chunk, accepted) if chunk.draft else chunk, sampled)
            if not was_running and request.in_flight == 0:
                self._roster.settled(request)

    def observe_step(self, seconds: float, num_tokens: int) -> None:
        """How long a step took that was planned and applied, for estimates of how soon requests are served."""
        self._speed.observe_step(seconds, num_tokens)
        if self._speculation is not None and self._decode_rows:
            self._speculation.observe(seconds, self._decode_rows)
        if len(self._roster.waiting):
            self._speed.observe_queue(seconds, self._num_started)
        self._num_started = 0

    def take_news(self) -> tuple[RequestNews, ...]:
        """What happened to requests since the last call: at most one entry for each."""
        news = tuple([request.take_news() for request in self._with_news])
        self._with_news.clear()
        return news

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, a plan unsettled, or the worker has to forget requests."""
        return bool(self._live or self._flights or self._roster.dropped)

    def next_deadline(self) -> float | None:
        """When `plan` has to be called at the latest, on the clock of the requests' deadlines."""
        return self._deadlines.next()

    def stats(self) -> EngineStats:
        """A snapshot, O(1)."""
        return engine_stats(
            self._kv, self._roster, self._shares, self._counters, self._speculation, self._config.prefix_cache
        )

    def check_idle(self) -> None:
        """AssertionError with the numbers when blocks are held although there is no work. O(1), for the loop.

        Without requests every block table is empty, so this is the sum of what `check_invariants` looks at.
        """
        if not self.has_work:
            check_nothing_held(self._kv.pool, self._roster)

    def check_invariants(self) -> None:
        """AssertionError with the numbers when blocks, queues and counters do not agree; slow."""
        holders = {id(r): r for flight in self._flights for r in flight.requests}
        holders.update({id(r): r for r in self._live.values()})
        check_state(self._kv.pool, self._kv.index, self._roster, self._live.values(), list(holders.values()))
        check_shares(self._shares, self._roster, self._live.values())

    def _open_accounts(self, samples: Sequence[Request]) -> None:
        for request in samples:
            own = request.account.tenant
            request.account = self._shares.account(own.name, own.weight, request.priority, request.arrival)

    def _check_fits(self, request: Request) -> Refusal | None:
        config = self._config
        return check_length(
            request.prompt_length,
            request.sampling,
            config.max_model_len,
            config.block_size,
            config.num_blocks,
        )

    def _expire(self, now: float) -> None:
        for request in self._deadlines.pop_passed(now):
            message = f"the deadline passed after {request.num_completion:,} generated tokens"
            self._finish(request, FinishReason.ABORT, error=Refusal(RefusalCode.DEADLINE, message))

    def _launch(self, draft: StepDraft) -> Plan:
        self._counters.steps += 1
        self._counters.preemptions += len(draft.preempted)
        self._num_started += len(draft.new)
        plan = Plan(
            self._counters.steps,
            tuple(draft.chunks),
            tuple(draft.new),
            self._roster.take_dropped(),
            tuple(draft.copies),
            draft.prefill_tokens,
        )
        decode_rows = 0 if draft.prefill_tokens else draft.decode_tokens + draft.draft_tokens
        self._flights.append(_Flight(plan, tuple(draft.requests), decode_rows))
        self.last_record = step_record(plan, draft, self._kv, self._roster)
        return plan

    def _keep_logprobs(self, result: Result) -> None:
        """Log probabilities wait at their requests for the next news."""
        for request_id, entry in result.logprobs:
            if request_id in self._live:
                self._live[request_id].logprobs.append(entry)
        for part in result.prompt_logprobs:
            if part.request_id in self._live:
                self._live[part.request_id].keep_prompt_logprobs(part.entries)

    def _take_draft(self, request: Request, chunk: Chunk, accepted: dict[int, tuple[int, ...]]) -> Chunk:
        """The chunk without the part of its draft that was wrong; what was right is appended."""
        assert self._speculation is not None
        tokens = accepted.get(request.request_id, ())
        self._counters.generated_tokens += len(tokens)
        return self._speculation.settle(request, chunk, tokens)

    def _settle(self, request: Request, chunk: Chunk, sampled: dict[int, int]) -> None:
        """The chunk's KV exists now; its token, if it sampled one, is appended and judged."""
        request.num_computed = chunk.start + chunk.length
        if request.num_computed >= request.publish_at:
            self._kv.publish(request)
        if request.family is not None and chunk.start < request.prompt_length:
            self._roster.waiting.update(request.family)
        if not chunk.samples:
            return
        request.token_ids.append(sampled[request.request_id])
        request.num_sampling -= 1
        self._counters.generated_tokens += 1
        self._with_news[request] = None
        reason = finish_reason(request, self._config.eos_token_ids)
        if reason is not None:
            stop = request.token_ids[-1] if reason is FinishReason.STOP else None
            self._finish(request, reason, stop_token_id=stop)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        error: Refusal | None = None,
    ) -> None:
        self._roster.finish(request)
        request.finish = Finish(
            reason, request.prompt_length, request.num_completion, request.cached_tokens, stop_token_id, error
        )
        del self._live[request.request_id]
        self._counters.finished[reason] += 1
        self._with_news[request] = None
