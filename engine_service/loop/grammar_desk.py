"""Where requests with a grammar wait until it is compiled: beside the queue, off the loop.

Must not know: how a grammar is compiled, the scheduler, torch.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Protocol

from engine_service.core.outcome import Refusal, RefusalCode
from engine_service.core.sampling import StructuredOutput
from engine_service.loop.messages import Submit

_RETRY_AFTER_S = 1.0


class Compiler(Protocol):
    """Compiles constraints in a thread of its own."""

    def prepare(self) -> None:
        """Begins, in that thread, what no constraint can be compiled without."""
        ...

    def compile(self, constraint: StructuredOutput, resumed: Sequence[int] = ()) -> "Future[object]":
        """The compiled grammar, which is the worker's business, or a Refusal. It has taken the `resumed` tokens."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Waiting:
    command: Submit
    arrived: float
    compiled: "Future[object]"
    aborted: dict[int, Refusal] = field(default_factory=dict)

    @property
    def deadline(self) -> float | None:
        timeout_s = self.command.timeout_s
        return None if timeout_s is None else self.arrived + timeout_s


@dataclass(frozen=True, slots=True)
class Decided:
    """A request leaves the desk. With a `refusal` it ends; without, it goes on to the scheduler as it is here.

    `aborted`: samples that were given up meanwhile, and why.
    """

    command: Submit
    arrived: float
    refusal: Refusal | None
    aborted: dict[int, Refusal]


class GrammarDesk:
    """Holds at most `max_waiting` requests. The loop calls it; `wake` is called from another thread."""

    def __init__(self, compiler: Compiler, *, max_waiting: int, wake: Callable[[], None]) -> None:
        self._compiler = compiler
        self._max_waiting = max_waiting
        self._wake = wake
        self._waiting: dict[int, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def prepare(self) -> None:
        """Call when the engine is ready: requests that come before the compiler is wait at the desk."""
        self._compiler.prepare()

    def accept(self, command: Submit, now: float) -> Refusal | None:
        """Takes a request with a constraint in; it comes out of `decided`. Or says why not."""
        constraint = command.sampling.structured_output
        assert constraint is not None
        if len(self._waiting) >= self._max_waiting:
            message = f"{len(self._waiting):,} grammars wait to be compiled, the limit is {self._max_waiting:,}"
            return Refusal(RefusalCode.QUEUE_FULL, message, retry_after_s=_RETRY_AFTER_S)
        compiled = self._compiler.compile(constraint, command.resumed)
        self._waiting[command.request_id] = _Waiting(command, now, compiled)
        compiled.add_done_callback(lambda _: self._wake())
        return None

    def abort(self, request_id: int, cause: Refusal) -> None:
        """Nothing happens for an id that is not here. The last sample's abort ends the wait."""
        for waiting in self._waiting.values():
            first = waiting.command.request_id
            if first <= request_id < first + waiting.command.samples:
                waiting.aborted.setdefault(request_id, cause)
                if len(waiting.aborted) == waiting.command.samples:
                    waiting.compiled.cancel()
                return

    def next_deadline(self) -> float | None:
        """When `decided` has to be called at the latest."""
        return min((w.deadline for w in self._waiting.values() if w.deadline is not None), default=None)

    def decided(self, now: float) -> Iterator[Decided]:
        """The requests whose grammar is there, or whose wait is over for another reason."""
        for waiting in list(self._waiting.values()):
            decided = self._decide(waiting, now)
            if decided is not None:
                del self._waiting[waiting.command.request_id]
                yield decided

    def close(self) -> None:
        self._compiler.close()

    def _decide(self, waiting: _Waiting, now: float) -> Decided | None:
        command, arrived, aborted = waiting.command, waiting.arrived, waiting.aborted
        if len(aborted) == command.samples:
            return Decided(command, arrived, next(iter(aborted.values())), aborted)
        if waiting.deadline is not None and now >= waiting.deadline:
            waiting.compiled.cancel()
            refusal = Refusal(RefusalCode.DEADLINE, "the deadline passed while the grammar was compiled")
            return Decided(command, arrived, refusal, aborted)
        if not waiting.compiled.done():
            return None
        error = waiting.compiled.exception()
        found = Refusal(RefusalCode.FAILED, "the grammar could not be compiled") if error else waiting.compiled.result()
        if isinstance(found, Refusal):
            return Decided(command, arrived, found, aborted)
        constraint = command.sampling.structured_output
        assert constraint is not None
        sampling = replace(command.sampling, structured_output=replace(constraint, compiled=found))
        return Decided(replace(command, sampling=sampling), arrived, None, aborted)
