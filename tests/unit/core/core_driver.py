"""What the tests of `engine_service.core` share: a device that checks every plan, and a loop around it.

Must not know: torch. The device is a pure function of a request's tokens, but it takes them through paged
blocks as a real worker does, so that a wrong block, a lost token or an overwritten slot is seen at once.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from engine_service.core.family import Family
from engine_service.core.outcome import FinishReason, RequestNews
from engine_service.core.plan import Chunk, Failure, NewRequest, Plan, Result
from engine_service.core.request import Request
from engine_service.core.sampling import SamplingParams
from engine_service.core.scheduler import Scheduler, SchedulerConfig

VOCABULARY = 29
EOS = frozenset({0})


def config(**changes: Any) -> SchedulerConfig:
    """A small engine: 16 blocks of 4 tokens."""
    settings: dict[str, Any] = {
        "block_size": 4,
        "num_blocks": 16,
        "step_token_budget": 16,
        "prefill_chunk_size": 8,
        "max_num_requests": 4,
        "max_waiting_requests": 64,
        "max_waiting_tokens": 10_000,
        "max_model_len": 48,
        "eos_token_ids": EOS,
        "prefix_cache": True,
    }
    return SchedulerConfig(**{**settings, **changes})


def sampling(max_tokens: int = 8, seed: int = 1, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, **changes)


def request(
    request_id: int,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    arrival: float | None = None,
    deadline: float | None = None,
    cache_salt: str = "",
    priority: int = 0,
    family: Family | None = None,
    tenant: str = "",
    weight: int = 1,
    resumed: Sequence[int] = (),
    **sampling_changes: Any,
) -> Request:
    return Request(
        request_id,
        prompt,
        sampling(max_tokens, **sampling_changes),
        arrival=float(request_id) if arrival is None else arrival,
        deadline=deadline,
        cache_salt=cache_salt,
        priority=priority,
        family=family,
        tenant=tenant,
        weight=weight,
        resumed=resumed,
    )


def samples(first_id: int, count: int, prompt: Sequence[int], max_tokens: int = 8, **changes: Any) -> list[Request]:
    """`count` samples of a prompt; the device's next token depends on the seed, so they differ."""
    family = Family()
    return [
        request(first_id + i, prompt, max_tokens, arrival=float(first_id), family=family, seed=1 + i, **changes)
        for i in range(count)
    ]


def prompt_of(length: int, start: int = 1) -> list[int]:
    """Distinct starts give prompts that share no block; all ids are in the vocabulary and none is EOS."""
    return [1 + (start * 7 + i * (1 + start % 5)) % (VOCABULARY - 1) for i in range(length)]


def answer(plan: Plan, token: int = 5, **tokens: int) -> Result:
    """A scripted result: `token` for each request that samples, or `r1=7` for request 1."""
    pairs = [(c.request_id, tokens.get(f"r{c.request_id}", token)) for c in plan.chunks if c.samples]
    return Result(plan.step, tuple(pairs))


def _digest(before: int, token: int) -> int:
    return crc32(f"{before}:{token}".encode())


def history_digest(token_ids: Iterable[int]) -> int:
    digest = 0
    for token in token_ids:
        digest = _digest(digest, token)
    return digest


def pick(digest: int, seed: int, stops: frozenset[int], allow_stop: bool, last: int | None = None) -> int:
    """The device's next token after a history: any of the vocabulary, stops only where allowed. With `last`, the last
    token, the text repeats itself: three times in four it goes on as it did after this token before."""
    token = (digest + 13 * seed) % VOCABULARY
    if last is not None and digest % 4:
        token = 1 + (5 * last + 3) % 7
    while token in stops and not allow_stop:
        token = (token + 1) % VOCABULARY
    return token


def stop_tokens(params: SamplingParams) -> frozenset[int]:
    return params.stop_token_ids | (frozenset() if params.ignore_eos else EOS)


def alone(
    prompt: Sequence[int], params: SamplingParams, max_model_len: int, *, repeats: bool = False
) -> tuple[list[int], FinishReason]:
    """The plain reference: what the request must give, whatever happens around it."""
    tokens: list[int] = []
    stops = stop_tokens(params)
    while len(tokens) < params.max_tokens and len(prompt) + len(tokens) < max_model_len:
        allow_stop = len(tokens) >= params.min_tokens
        history = [*prompt, *tokens]
        last = history[-1] if repeats else None
        tokens.append(pick(history_digest(history), params.seed, stops, allow_stop, last))
        if tokens[-1] in stops and allow_stop:
            return tokens, FinishReason.STOP
    return tokens, FinishReason.LENGTH


@dataclass
class _Held:
    token_ids: list[int]
    block_table: list[int]
    seed: int
    stops: frozenset[int]


@dataclass
class CheckingDevice:
    """Executes plans over slots that hold the digest of the history up to there, and checks each plan."""

    config: SchedulerConfig
    repeats: bool = False
    held: dict[int, _Held] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    failing: set[int] = field(default_factory=set)

    def execute(self, plan: Plan) -> Result:
        self._check(plan)
        for request_id in plan.dropped:
            del self.held[request_id]
        for new in plan.new:
            self._add(new)
        for source, destination in plan.copies:
            self._copy(source, destination)
        sampled, accepted, failures = [], [], []
        for chunk in plan.chunks:
            tokens = self._compute(chunk)
            if chunk.request_id in self.failing:
                failures.append(Failure(chunk.request_id, "made to fail"))
            elif tokens:
                sampled.append((chunk.request_id, tokens[-1]))
                if len(tokens) > 1:
                    accepted.append((chunk.request_id, tuple(tokens[:-1])))
        return Result(plan.step, tuple(sampled), tuple(failures), accepted=tuple(accepted))

    def _check(self, plan: Plan) -> None:
        ids = [chunk.request_id for chunk in plan.chunks]
        assert len(set(ids)) == len(ids) <= self.config.max_num_requests
        assert plan.num_tokens <= self.config.step_token_budget
        assert all(1 <= chunk.length <= self.config.prefill_chunk_size for chunk in plan.chunks)
        assert {new.request_id for new in plan.new} <= set(ids)
        assert len(set(plan.dropped)) == len(plan.dropped)
        sources, destinations = [pair[0] for pair in plan.copies], [pair[1] for pair in plan.copies]
        assert len(set(destinations)) == len(destinations), "two copies into one block"
        assert not set(sources) & set(destinations), "the order of the copies would matter"

    def _add(self, new: NewRequest) -> None:
        assert new.request_id not in self.held
        assert len(self.held) < self.config.max_num_requests
        self.held[new.request_id] = _Held(
            list(new.token_ids), list(new.block_ids), new.sampling.seed, stop_tokens(new.sampling)
        )

    def _copy(self, source: int, destination: int) -> None:
        """Slots that were never written are copied as what they are: nothing."""
        size = self.config.block_size
        for place in range(size):
            self.slots.pop(destination * size + place, None)
            if source * size + place in self.slots:
                self.slots[destination * size + place] = self.slots[source * size + place]

    def _compute(self, chunk: Chunk) -> list[int]:
        """The tokens that come of it: none, one, or those of a draft that were right and one more."""
        held = self.held[chunk.request_id]
        if chunk.new_block_ids:
            held.block_table[-(-chunk.start // self.config.block_size) :] = chunk.new_block_ids
        end = chunk.start + chunk.length - len(chunk.draft)
        assert end <= len(held.token_ids)
        assert chunk.samples == (end == len(held.token_ids))
        assert chunk.samples or not chunk.draft
        digests = self._store(chunk, held)
        if not chunk.samples:
            return []
        tokens = [self._pick(held, digests[end - 1], held.token_ids[end - 1], chunk)]
        for place, guessed in enumerate(chunk.draft):
            if guessed != tokens[-1]:
                break
            tokens.append(self._pick(held, digests[end + place], guessed, chunk))
        held.token_ids.extend(tokens)
        if chunk.draft:  # the scheduler has the blocks behind the next token back
            del held.block_table[(len(held.token_ids) - 1) // self.config.block_size + 1 :]
        return tokens

    def _pick(self, held: _Held, digest: int, last: int, chunk: Chunk) -> int:
        return pick(digest, held.seed, held.stops, chunk.allow_stop, last if self.repeats else None)

    def _store(self, chunk: Chunk, held: _Held) -> list[int]:
        """The digests of all positions up to the chunk's last, its draft's too: guesses are written like tokens."""
        digest, digests = 0, []
        tokens = [*held.token_ids, *chunk.draft] if chunk.draft else held.token_ids
        for position in range(chunk.start + chunk.length):
            digest = _digest(digest, tokens[position])
            digests.append(digest)
            slot = self._slot(held, position)
            if position >= chunk.start:
                self._check_private(chunk.request_id, slot // self.config.block_size)
                self.slots[slot] = digest
            assert self.slots.get(slot) == digest, f"request {chunk.request_id}: wrong KV at {position}"
        return digests

    def _check_private(self, request_id: int, block: int) -> None:
        owners = [other for other, held in self.held.items() if block in held.block_table]
        assert owners == [request_id], f"request {request_id} writes to block {block} of requests {owners}"

    def _slot(self, held: _Held, position: int) -> int:
        size = self.config.block_size
        return held.block_table[position // size] * size + position % size


class Engine:
    """Scheduler and device joined; `depth` plans may be in flight while the next one is made."""

    def __init__(
        self, settings: SchedulerConfig, *, depth: int = 0, repeats: bool = False, **scheduler_arguments: Any
    ) -> None:
        self.scheduler = Scheduler(settings, **scheduler_arguments)
        self.device = CheckingDevice(settings, repeats)
        self.depth = depth
        self.in_flight: deque[Result] = deque()
        self.news: list[RequestNews] = []
        self.plans: list[Plan] = []
        self.now = 0.0

    def plan(self) -> Plan | None:
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append(self.device.execute(plan))
        return plan

    def settle(self) -> None:
        self.scheduler.apply(self.in_flight.popleft())
        self.news.extend(self.scheduler.take_news())

    def step(self) -> Plan | None:
        """One turn of the engine loop."""
        plan = self.plan()
        if self.in_flight and (plan is None or len(self.in_flight) > self.depth):
            self.settle()
        return plan

    def run(self, *requests: Request, steps: int = 5_000) -> None:
        """Submits, then drains; AssertionError when that takes more steps than given."""
        for item in requests:
            assert self.scheduler.submit(item) is None
        for _ in range(steps):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, f"unfinished after {steps} steps: {self.scheduler.stats()}"
        self.news.extend(self.scheduler.take_news())
        self.scheduler.check_invariants()

    def tokens_of(self, request_id: int) -> list[int]:
        return [token for news in self.news if news.request_id == request_id for token in news.token_ids]

    def finish_of(self, request_id: int) -> Any:
        """Its only finish; nothing may come after it."""
        news = [item for item in self.news if item.request_id == request_id]
        finishes = [item.finish for item in news if item.finish is not None]
        assert len(finishes) == 1
        assert news[-1].finish is not None
        return finishes[0]

    def assert_as_alone(self, item: Request) -> None:
        prompt = item.token_ids[: item.prompt_length]
        tokens, reason = alone(prompt, item.sampling, self.device.config.max_model_len, repeats=self.device.repeats)
        finish = self.finish_of(item.request_id)
        assert (self.tokens_of(item.request_id), finish.reason) == (tokens, reason)
        assert (finish.prompt_tokens, finish.completion_tokens) == (len(prompt), len(tokens))
