"""When the stages of each live request began, all on the engine process's clock.

Must not know: the scheduler, exporters, other processes' clocks.
"""

from dataclasses import dataclass

from engine_service.core.outcome import RequestNews
from engine_service.core.plan import Plan
from engine_service.loop.messages import RequestTiming


@dataclass(slots=True)
class _Stages:
    arrived: float
    first_planned: float | None = None
    first_token: float | None = None


class RequestTimings:
    """One entry per live request; `settle` drops those that ended and returns their times."""

    def __init__(self) -> None:
        self._live: dict[int, _Stages] = {}

    def arrived(self, request_id: int, now: float) -> None:
        self._live[request_id] = _Stages(now)

    def planned(self, plan: Plan, now: float) -> None:
        """Notes the first step of requests that the worker has just been told of."""
        for new in plan.new:
            stages = self._live.get(new.request_id)
            if stages is not None and stages.first_planned is None:
                stages.first_planned = now

    def settle(self, news: tuple[RequestNews, ...], now: float) -> tuple[RequestTiming, ...]:
        finished: list[RequestTiming] = []
        for item in news:
            stages = self._live.get(item.request_id)
            if stages is None:
                continue
            if item.token_ids and stages.first_token is None:
                stages.first_token = now
            if item.finish is not None:
                del self._live[item.request_id]
                finished.append(_timing(item.request_id, stages, now))
        return tuple(finished)


def _timing(request_id: int, stages: _Stages, now: float) -> RequestTiming:
    planned, token = stages.first_planned, stages.first_token
    if planned is None:
        return RequestTiming(request_id, now - stages.arrived, None, None)
    if token is None:
        return RequestTiming(request_id, planned - stages.arrived, now - planned, None)
    return RequestTiming(request_id, planned - stages.arrived, token - planned, now - token)
