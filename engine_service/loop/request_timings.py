"""When the stages of each live request began, all on the engine process's clock.

Must not know: the scheduler, exporters, other processes' clocks.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine_service.core.outcome import RequestNews
from engine_service.core.plan import Plan
from engine_service.loop.messages import RequestTiming


@dataclass(slots=True)
class _Stages:
    """Times on the engine process's clock; `wall_ns` is the wall time of `arrived`. Steps by their numbers."""

    arrived: float
    wall_ns: int
    first_planned: float | None = None
    first_token: float | None = None
    first_step: int = 0
    token_step: int = 0
    preemptions: int = 0


class RequestTimings:
    """One entry per live request; `settle` drops those that ended and returns their times."""

    def __init__(self, wall_clock: Callable[[], int] = time.time_ns) -> None:
        self._live: dict[int, _Stages] = {}
        self._wall_clock = wall_clock
        self.last_step = 0
        """The last one whose result is known."""

    def arrived(self, request_id: int, now: float) -> None:
        self._live[request_id] = _Stages(now, self._wall_clock())

    def planned(self, plan: Plan, now: float) -> None:
        """Notes the first step of requests that the worker has just been told of."""
        for new in plan.new:
            stages = self._live.get(new.request_id)
            if stages is not None and stages.first_planned is None:
                stages.first_planned, stages.first_step = now, plan.step

    def preempted(self, request_ids: tuple[int, ...]) -> None:
        for request_id in request_ids:
            if request_id in self._live:
                self._live[request_id].preemptions += 1

    def settle(self, news: tuple[RequestNews, ...], now: float) -> tuple[RequestTiming, ...]:
        finished: list[RequestTiming] = []
        for item in news:
            stages = self._live.get(item.request_id)
            if stages is None:
                continue
            if item.token_ids and stages.first_token is None:
                stages.first_token, stages.token_step = now, self.last_step
            if item.finish is not None:
                del self._live[item.request_id]
                finished.append(self._timing(item.request_id, stages, now))
        return tuple(finished)

    def _timing(self, request_id: int, stages: _Stages, now: float) -> RequestTiming:
        planned, token = stages.first_planned, stages.first_token
        if planned is None:
            return RequestTiming(request_id, now - stages.arrived, None, None, stages.wall_ns)
        last = self.last_step if token is None else stages.token_step
        return RequestTiming(
            request_id,
            planned - stages.arrived,
            (now if token is None else token) - planned,
            None if token is None else now - token,
            stages.wall_ns,
            prefill_steps=max(0, last - stages.first_step + 1),
            decode_steps=self.last_step - last,
            preemptions=stages.preemptions,
        )
