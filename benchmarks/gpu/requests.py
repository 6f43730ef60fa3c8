"""Requests that the check puts through a worker by itself, without a scheduler: prefills in chunks, then decodes.

Must not know: the model, timing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine_service.core.plan import Chunk, NewRequest, Plan
from engine_service.core.sampling import SamplingParams
from engine_service.worker.worker import Worker


@dataclass(slots=True)
class Running:
    """One request: so many of its tokens are computed, in these blocks."""

    request_id: int
    prompt: tuple[int, ...]
    computed: int = 0
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


class Requests:
    """A batch of greedy requests in a worker that holds no others."""

    def __init__(self, worker: Worker, prompts: Sequence[Sequence[int]]) -> None:
        self._worker = worker
        self._size = worker.info.block_size
        self._free = iter(range(worker.info.num_blocks))
        self._running = [Running(number + 1, tuple(prompt)) for number, prompt in enumerate(prompts)]
        self._step = 0

    @property
    def answers(self) -> list[list[int]]:
        return [request.tokens for request in self._running]

    def prefill(self, budget: int) -> None:
        """All prompts, `budget` tokens a step; each gives its first token."""
        for plan in self._prefill_plans(budget):
            self._worker.submit(plan)
            self._read()

    def decode(self, steps: int, *, overlap: bool) -> None:
        """So many tokens for each; with `overlap` a step is submitted before the one before is read."""
        unread = 0
        for _ in range(steps):
            self._worker.submit(self._decode_plan())
            unread += 1
            if not overlap or unread == 2:
                self._read()
                unread -= 1
        for _ in range(unread):
            self._read()

    def leave(self) -> None:
        """The worker forgets them."""
        self._worker.submit(Plan(0, (), (), tuple(request.request_id for request in self._running)))
        self._worker.result()

    def _prefill_plans(self, budget: int) -> Iterator[Plan]:
        chunks: list[Chunk] = []
        new: list[NewRequest] = []
        room = budget
        for request in self._running:
            while request.computed < len(request.prompt):
                length = min(room, len(request.prompt) - request.computed)
                if request.computed == 0:
                    new.append(self._introduce(request))
                chunks.append(self._chunk(request, length))
                room -= length
                if room == 0:
                    yield self._plan(chunks, new)
                    chunks, new, room = [], [], budget
        if chunks:
            yield self._plan(chunks, new)

    def _introduce(self, request: Running) -> NewRequest:
        sampling = SamplingParams(max_tokens=1_000_000, seed=0, temperature=0.0, ignore_eos=True)
        return NewRequest(request.request_id, request.prompt, len(request.prompt), (), sampling)

    def _decode_plan(self) -> Plan:
        return self._plan([self._chunk(request, 1) for request in self._running], [])

    def _chunk(self, request: Running, length: int) -> Chunk:
        start, end = request.computed, request.computed + length
        missing = -(-end // self._size) - len(request.blocks)
        new_blocks = tuple(next(self._free) for _ in range(missing))
        request.blocks += new_blocks
        request.computed = end
        return Chunk(request.request_id, start, length, new_blocks, end >= len(request.prompt))

    def _plan(self, chunks: list[Chunk], new: list[NewRequest]) -> Plan:
        self._step += 1
        ordered = sorted(chunks, key=lambda chunk: chunk.length > 1)
        return Plan(self._step, tuple(ordered), tuple(new))

    def _read(self) -> None:
        result = self._worker.result()
        if result.failures:
            raise RuntimeError(f"a request failed: {result.failures[0].message}")
        for request_id, token in result.sampled:
            self._running[request_id - 1].tokens.append(token)
