"""What crosses the mailbox between the front process and the engine process: frozen data.

Must not know: sockets, gRPC, torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from engine_service.core.kv_events import KvEvent
from engine_service.core.outcome import Finish, PositionLogprobs, Refusal, RequestNews
from engine_service.core.plan import Plan
from engine_service.core.sampling import NEUTRAL_DEFAULTS, SamplingDefaults, SamplingParams
from engine_service.core.stats import EngineStats
from engine_service.core.weight_report import WeightReport
from engine_service.loop.step_recorder import DumpPiece

_PLAIN_FIELDS = 3  # of a RequestNews without log probabilities and cached tokens
_stats_values = attrgetter(*(item.name for item in fields(EngineStats)))
_step_values = attrgetter("seconds", "num_tokens", "prefill_tokens", "num_requests")


@dataclass(frozen=True, slots=True)
class Submit:
    """A validated request. `timeout_s` counts from its arrival in the engine process.

    It is `samples` requests of one prompt, with ids request_id, request_id + 1, ... and seeds seed, seed + 1, ...
    (wrapping at int64). A lower `priority` is served earlier; within one, `tenant`s share by `weight`. `resumed`: see
    `Request`; then there is one sample. `name` is what its sender calls it. `adapter` is one that the engine knows by
    this name, with the content of `adapter_fingerprint` if that is given; its number is the engine process's own.
    """

    request_id: int
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    timeout_s: float | None = None
    cache_salt: str = ""
    samples: int = 1
    priority: int = 0
    resumed: tuple[int, ...] = ()
    tenant: str = ""
    weight: int = 1
    name: str = ""
    adapter: str = ""
    adapter_fingerprint: str = ""
    adapter_number: int = 0


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends requests. Unknown and finished ids are fine."""

    request_ids: tuple[int, ...]
    cause: Refusal


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The engine process ends now, whatever still runs."""


@dataclass(frozen=True, slots=True)
class WatchKvEvents:
    """From now on reports tell what happens in the prefix cache, beginning with a snapshot; or no longer."""

    is_on: bool
    with_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Ping:
    """A report is due even if nothing is new."""


@dataclass(frozen=True, slots=True)
class DumpSteps:
    """The next reports tell what the step recorder holds: of the last `last_steps`, or all. Ends an earlier dump."""

    number: int
    last_steps: int | None = None


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """From now on the name means the adapter in the folder. A report answers, by the ticket."""

    ticket: int
    name: str
    folder: str


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """The name means nothing any more. A report answers, by the ticket."""

    ticket: int
    name: str


@dataclass(frozen=True, slots=True)
class AdapterState:
    """One that requests may name. `is_resident`: in memory; else it is read when a request wants it."""

    name: str
    fingerprint: str
    rank: int
    is_resident: bool


@dataclass(frozen=True, slots=True)
class AdapterNews:
    """All adapters there are, and answers (ticket, why not). `loads` into memory and `evictions` only grow."""

    adapters: tuple[AdapterState, ...] = ()
    answers: tuple[tuple[int, Refusal | None], ...] = ()
    loads: int = 0
    evictions: int = 0


Command = Submit | Abort | WatchKvEvents | Ping | DumpSteps | LoadAdapter | UnloadAdapter | Shutdown


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine is; `epoch` differs at each start. `model_folder` is for this machine alone.

    The last fields are for those who watch it; `kv_block_bytes` are those of one rank.
    """

    pid: int
    epoch: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    tokenizer_fingerprint: str
    architecture: str
    dtype: str
    block_size: int
    num_blocks: int
    max_num_requests: int
    default_sampling: SamplingDefaults = NEUTRAL_DEFAULTS
    model_folder: str = ""
    weights_fingerprint: str = ""
    device: str = ""
    backend: str = ""
    weight_format: str = ""
    tensor_parallel_size: int = 1
    kv_block_bytes: int = 0
    max_waiting_requests: int = 0
    step_token_budget: int = 0
    weights: WeightReport | None = None


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Seconds of the parts of a start: the model in place and the KV pool allocated; the first generation."""

    load_s: float = 0.0
    warm_up_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineReady:
    info: EngineInfo
    stats: EngineStats
    times: StartTimes = StartTimes()
    adapters: AdapterNews = AdapterNews()


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The engine cannot start; `message` says why in one line."""

    message: str


@dataclass(frozen=True, slots=True)
class EngineFatal:
    """The engine failed while it ran and ends now."""

    message: str


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One step: seconds from its plan (overlapped: from the step before) to its result, and what it computed.

    `prefill_tokens` of `num_tokens` are not of decodes. `num_requests` counts each sample by itself.
    """

    seconds: float
    num_tokens: int
    prefill_tokens: int = 0
    num_requests: int = 0

    @classmethod
    def of(cls, plan: Plan, seconds: float) -> "StepTiming":
        return cls(seconds, plan.num_tokens, plan.prefill_tokens, len(plan.chunks))


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Seconds a finished request spent in each stage; None for a stage it never reached.

    Their sum is its whole time in the engine process. A request that ended in `prefill` has no `decode_s`.
    `arrived_ns`: wall time since 1970 of its arrival. The steps are those that the engine took in the meantime.
    """

    request_id: int
    queue_s: float
    prefill_s: float | None
    decode_s: float | None
    arrived_ns: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class StepReport:
    """All news since the report before: one message per step, or several steps merged for a slow front."""

    news: tuple[RequestNews, ...]
    stats: EngineStats
    steps: tuple[StepTiming, ...] = ()
    finished: tuple[RequestTiming, ...] = ()
    kv_events: tuple[KvEvent, ...] = ()
    dump: tuple[DumpPiece, ...] = ()
    adapters: AdapterNews | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Plain tuples pickle several times faster than one dataclass per request.
        news = tuple(_plain(item) for item in self.news)
        steps = tuple(_step_values(step) for step in self.steps)
        return _rebuild, (
            news,
            _stats_values(self.stats),
            steps,
            self.finished,
            self.kv_events,
            self.dump,
            self.adapters,
        )


def _plain(news: RequestNews) -> tuple[Any, ...]:
    request_id, token_ids, finish, logprobs, prompt_logprobs, cached_tokens = news
    if not logprobs and not prompt_logprobs and not cached_tokens:
        return request_id, token_ids, finish
    return request_id, token_ids, finish, tuple(map(tuple, logprobs)), prompt_logprobs, cached_tokens


def _news(
    request_id: int,
    token_ids: tuple[int, ...],
    finish: Finish | None,
    logprobs: tuple[tuple[Any, ...], ...] = (),
    prompt_logprobs: Sequence[PositionLogprobs] = (),
    cached_tokens: int = 0,
) -> RequestNews:
    per_token = tuple(PositionLogprobs(*entry) for entry in logprobs)
    return RequestNews(request_id, token_ids, finish, per_token, prompt_logprobs, cached_tokens)


def _rebuild(
    news: tuple[tuple[Any, ...], ...],
    stats: tuple[Any, ...],
    steps: tuple[tuple[float, int, int, int], ...],
    finished: tuple[RequestTiming, ...],
    kv_events: tuple[KvEvent, ...],
    dump: tuple[DumpPiece, ...] = (),
    adapters: AdapterNews | None = None,
) -> StepReport:
    # Most news are without log probabilities, and then need none of the work for them.
    rebuilt = tuple(RequestNews(*item) if len(item) == _PLAIN_FIELDS else _news(*item) for item in news)
    timings = tuple(StepTiming(*step) for step in steps)
    return StepReport(rebuilt, EngineStats(*stats), timings, finished, kv_events, dump, adapters)
