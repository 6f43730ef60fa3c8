"""A worker that computes nothing: it waits as long as a step would take, and says the tokens of a simulated model.

Scheduler, loop, KV pool and services around it are the real ones. Must not know: torch, how long a step takes.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine_service.core.outcome import PositionLogprobs
from engine_service.core.plan import Chunk, NewRequest, Plan, PromptLogprobs, Result
from engine_service.simulated.step_model import StepModel, StepWork
from engine_service.simulated.tokens import token_at


@dataclass(frozen=True, slots=True)
class _Flight:
    result: Result
    ready_at: float


class SimulatedWorker:
    """Honours seed, length and stop ids. Other sampling settings change nothing: there are no logits to change.

    Every token has the log probability that it has among `vocab_size` equal ones.
    """

    def __init__(
        self,
        model: StepModel,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._sleep = sleep
        self._requests: dict[int, NewRequest] = {}
        self._flights: deque[_Flight] = deque()
        self._logprob = -math.log(vocab_size)

    def submit(self, plan: Plan) -> None:
        """The device starts on it when it is done with the plan before."""
        for request_id in plan.dropped:
            self._requests.pop(request_id, None)
        for new in plan.new:
            self._requests[new.request_id] = new
        started = max(self._clock(), self._flights[-1].ready_at if self._flights else 0.0)
        self._flights.append(_Flight(self._compute(plan), started + self._model.seconds(StepWork.of(plan.chunks))))

    def result(self) -> Result:
        """Waits until the oldest plan in flight is done."""
        flight = self._flights.popleft()
        while (left := flight.ready_at - self._clock()) > 0:
            self._sleep(left)
        return flight.result

    def close(self) -> None:
        self._flights.clear()
        self._requests.clear()

    def _compute(self, plan: Plan) -> Result:
        sampling = [chunk for chunk in plan.chunks if chunk.samples]
        tokens = [(chunk.request_id, self._tokens(chunk)) for chunk in sampling]
        wanted = [
            (request_id, self._entry(token, count))
            for request_id, some in tokens
            if (count := self._requests[request_id].sampling.logprobs) is not None
            for token in some
        ]
        scored = [part for chunk in plan.chunks if (part := self._score(chunk)) is not None]
        return Result(
            plan.step,
            tuple((request_id, some[-1]) for request_id, some in tokens),
            (),
            tuple(wanted),
            tuple(scored),
            tuple((request_id, some[:-1]) for request_id, some in tokens if len(some) > 1),
        )

    def _tokens(self, chunk: Chunk) -> tuple[int, ...]:
        """What is right of the chunk's draft, and the token after it."""
        position = chunk.start + chunk.length - len(chunk.draft)
        right = 0
        while right < len(chunk.draft) and chunk.draft[right] == self._token(chunk, position + right):
            right += 1
        return (*chunk.draft[:right], self._token(chunk, position + right))

    def _token(self, chunk: Chunk, position: int) -> int:
        sampling = self._requests[chunk.request_id].sampling
        return token_at(sampling.seed, position, self._vocab_size, self._eos_token_ids | sampling.stop_token_ids)

    def _score(self, chunk: Chunk) -> PromptLogprobs | None:
        request = self._requests[chunk.request_id]
        count = request.sampling.prompt_logprobs
        if count is None:
            return None
        first = max(chunk.start + 1, request.known_prompt_logprobs)
        end = min(chunk.start + chunk.length + 1, request.prompt_length)
        if first >= end:
            return None
        entries = tuple(self._entry(token, count) for token in request.token_ids[first:end])
        return PromptLogprobs(chunk.request_id, first, entries)

    def _entry(self, token: int, count: int) -> PositionLogprobs:
        """Equal tokens are ranked by id."""
        top = tuple((other, self._logprob) for other in range(min(count, self._vocab_size)))
        return PositionLogprobs((token, self._logprob), 1, top)
