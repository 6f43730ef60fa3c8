"""Reports that wait for a slow front, merged into one.

Must not know: sockets, gRPC, torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine_service.core.kv_events import KvEventLog
from engine_service.core.outcome import Finish, PositionLogprobs, RequestNews
from engine_service.core.stats import EngineStats
from engine_service.loop.messages import AdapterNews, RequestTiming, StepReport, StepTiming
from engine_service.loop.step_recorder import DumpPiece

# Those of steps feed histograms only: past this many unread ones the rest of a stall is left out.
MAX_UNREAD_TIMINGS = 4096


@dataclass(slots=True)
class _Unread:
    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[PositionLogprobs] = ()
    cached_tokens: int = 0

    def add(self, news: RequestNews) -> None:
        self.token_ids.extend(news.token_ids)
        self.finish = news.finish or self.finish
        self.logprobs.extend(news.logprobs)
        self.prompt_logprobs = news.prompt_logprobs or self.prompt_logprobs
        self.cached_tokens = news.cached_tokens or self.cached_tokens

    def news(self, request_id: int) -> RequestNews:
        tokens, logprobs = tuple(self.token_ids), tuple(self.logprobs)
        return RequestNews(request_id, tokens, self.finish, logprobs, self.prompt_logprobs, self.cached_tokens)


class Outbox:
    """Holds at most one report's worth of entries: one per request with unread news, its tokens joined.

    Bounded by what the requests known to the engine may still generate; a new request needs the front.
    """

    def __init__(self) -> None:
        self._news: dict[int, _Unread] = {}
        self._stats: EngineStats | None = None
        self._steps: list[StepTiming] = []
        self._finished: list[RequestTiming] = []
        self._kv_events = KvEventLog()
        self._dump: tuple[DumpPiece, ...] = ()
        self._adapters: AdapterNews | None = None

    def add(self, report: StepReport) -> None:
        for item in report.news:
            self._news.setdefault(item.request_id, _Unread()).add(item)
        self._kv_events.add(report.kv_events)
        if report.dump:
            # What a dump before has left unread is of no use to the one who began this.
            self._dump = (*(piece for piece in self._dump if piece.number == report.dump[0].number), *report.dump)
        if report.adapters is not None:
            before = () if self._adapters is None else self._adapters.answers
            self._adapters = replace(report.adapters, answers=before + report.adapters.answers)
        self._stats = report.stats
        self._steps.extend(report.steps[: MAX_UNREAD_TIMINGS - len(self._steps)])
        self._finished.extend(report.finished)  # one for each request at most

    def take(self) -> StepReport | None:
        """Everything unread as one report, or None."""
        if self._stats is None:
            return None
        news = tuple(unread.news(request_id) for request_id, unread in self._news.items())
        timings = tuple(self._steps), tuple(self._finished)
        report = StepReport(news, self._stats, *timings, self._kv_events.take(), self._dump, self._adapters)
        self._news, self._stats, self._steps, self._finished, self._dump = {}, None, [], [], ()
        self._adapters = None
        return report
