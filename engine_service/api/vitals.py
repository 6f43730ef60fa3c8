"""The deeper levels of health: does the loop move, does the model answer.

Must not know: gRPC, how the engine runs, what is done about an engine that is not well.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from engine_service.api.engine_handle import EngineHandle
from engine_service.api.live_request import LiveRequest
from engine_service.api.parse import EngineRequest
from engine_service.core.outcome import FinishReason, Refusal, RefusalCode
from engine_service.core.sampling import SamplingParams
from engine_service.loop.messages import Ping

_FIRST_IN_LINE = -(2**31)
_PROBE_OVER = Refusal(RefusalCode.CANCELLED, "the probe is over")


@dataclass(frozen=True, slots=True)
class VitalLimits:
    """Seconds. `stall_s`: without a step while there is work. `silence_s`: without any answer of the model, until it
    is asked for one. `patience_s` and `probe_s`: for the answer to a ping and to a probe.
    """

    stall_s: float
    silence_s: float = 60.0
    patience_s: float = 1.0
    probe_s: float = 10.0


class Vitals:
    """`draw_name` gives a request id that nobody can guess."""

    def __init__(self, handle: EngineHandle, limits: VitalLimits, draw_name: Callable[[], str]) -> None:
        self._handle = handle
        self._limits = limits
        self._draw_name = draw_name
        self._one_at_a_time = asyncio.Lock()

    @property
    def stalled_s(self) -> float:
        """Seconds since the engine, which holds work, has finished a step; 0 without work or engine."""
        handle = self._handle
        return handle.pulse.silence_s if handle.num_live and handle.current is not None else 0.0

    async def loop_moves(self) -> bool:
        """A step has finished within the limit, or none was due. Cheap unless it is late."""
        if self._handle.current is None:
            return False
        return self.stalled_s <= self._limits.stall_s or not await self.is_stuck(self._limits.patience_s)

    async def is_stuck(self, patience_s: float) -> bool:
        """Asks an engine that is late. It is not stuck when no request is in its queue: their grammars compile."""
        connection = self._handle.current
        if connection is None:
            return False
        late_s = self.stalled_s
        connection.commands.send(Ping(), always=True)
        if not await self._handle.pulse.next_report(patience_s):
            return self.stalled_s > 0 and self._handle.current is connection
        has_stepped = self.stalled_s < late_s
        return not has_stepped and connection.stats.running + connection.stats.waiting > 0

    async def model_answers(self) -> bool:
        """From what was seen of late; after a fault or a long silence from a generation of one token."""
        async with self._one_at_a_time:
            if self._handle.current is None:
                return False
            return self._handle.pulse.is_fresh(self._limits.silence_s) or await self._probe()

    async def _probe(self) -> bool:
        woken: asyncio.Queue[LiveRequest] = asyncio.Queue()
        submission = self._handle.submit(self._probe_request(), woken.put_nowait)
        if isinstance(submission, Refusal):
            return False
        try:
            async with asyncio.timeout(self._limits.probe_s):
                while (finish := (await woken.get()).take().finish) is None:
                    pass
        except TimeoutError:
            return False
        finally:
            self._handle.cancel(submission.samples, _PROBE_OVER)
        is_answered = finish.reason in (FinishReason.LENGTH, FinishReason.STOP)
        if is_answered:
            self._handle.pulse.proven()
        return is_answered

    def _probe_request(self) -> EngineRequest:
        sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
        name = f"health-{self._draw_name()}"
        return EngineRequest(name, (0,), sampling, self._limits.probe_s, name, priority=_FIRST_IN_LINE)
