"""What a tokenizer service tells its operator of itself, its engines and its requests, as plain data.

Counters (`..._total`) grow until the service or engine starts again. Must not know: how it is asked, how it is shown.
"""

from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb

_ENGINE_STATE, _REQUEST_STATE = "ENGINE_STATE_", "REQUEST_STATE_"


@dataclass(frozen=True, slots=True)
class Engine:
    """A replica. `state`: connecting, connected, draining or leaving; `sources`: who named it."""

    address: str
    sources: tuple[str, ...]
    state: str
    live_requests: int
    engine_epoch: str


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What an engine has to do, for all of its clients, and what it has done since its start."""

    running_requests: int
    waiting_requests: int
    waiting_tokens: int
    total_blocks: int
    used_blocks: int
    cached_blocks: int
    free_blocks: int
    steps_total: int
    step_seconds_total: float
    preemptions_total: int
    prompt_tokens_total: int
    generated_tokens_total: int
    cached_tokens_total: int
    looked_up_tokens_total: int
    evictions_total: int
    last_step_age: float | None


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """`figures` are None when the engine did not answer; `error` then says why."""

    engine: Engine
    figures: EngineFigures | None
    error: str


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """`state`: encoding, waiting (an engine has it, no token yet), generating or moving (between engines). Seconds."""

    request_id: str
    tenant: str
    method: str
    state: str
    prompt_tokens: int | None
    generated_tokens: int
    age: float
    time_to_first_token: float | None
    engines: tuple[str, ...]

    @property
    def tokens_per_second(self) -> float | None:
        """Since its first token."""
        if self.time_to_first_token is None or self.generated_tokens < 2:
            return None
        return (self.generated_tokens - 1) / max(self.age - self.time_to_first_token, 1e-6)


@dataclass(frozen=True, slots=True)
class ServiceFigures:
    """The tokenizer service itself. `generated_tokens_total` are delivered, those of running requests too."""

    model_name: str
    is_draining: bool
    uptime: float
    active_requests: int
    max_requests: int
    encode_queue: int
    prompt_tokens_total: int
    generated_tokens_total: int
    routed_requests_total: dict[str, int]
    failovers_total: dict[str, int]
    failed_failovers_total: dict[str, int]


@dataclass(frozen=True, slots=True)
class Status:
    """`requests`: the oldest first, as many as were asked for."""

    service: ServiceFigures
    engines: tuple[EngineStatus, ...]
    requests: tuple[LiveRequest, ...]


def engine(message: pb.Engine) -> Engine:
    state = engine_state(message.state)
    return Engine(message.address, tuple(message.sources), state, message.live_requests, message.engine_epoch)


def engine_state(state: "pb.EngineState.ValueType") -> str:
    return pb.EngineState.Name(state).removeprefix(_ENGINE_STATE).lower()


def status(message: pb.GetStatusResponse) -> Status:
    return Status(
        _service(message.service),
        tuple(_engine_status(each) for each in message.engines),
        tuple(_request(each) for each in message.requests),
    )


def _service(message: pb.ServiceFigures) -> ServiceFigures:
    return ServiceFigures(
        model_name=message.model_name,
        is_draining=message.is_draining,
        uptime=_seconds(message.uptime),
        active_requests=message.active_requests,
        max_requests=message.max_requests,
        encode_queue=message.encode_queue,
        prompt_tokens_total=message.prompt_tokens_total,
        generated_tokens_total=message.generated_tokens_total,
        routed_requests_total=dict(message.routed_requests_total),
        failovers_total=dict(message.failovers_total),
        failed_failovers_total=dict(message.failed_failovers_total),
    )


def _engine_status(message: pb.EngineStatus) -> EngineStatus:
    figures = _figures(message.figures) if message.HasField("figures") else None
    return EngineStatus(engine(message.engine), figures, message.error)


def _figures(message: pb.EngineFigures) -> EngineFigures:
    return EngineFigures(
        running_requests=message.running_requests,
        waiting_requests=message.waiting_requests,
        waiting_tokens=message.waiting_tokens,
        total_blocks=message.total_blocks,
        used_blocks=message.used_blocks,
        cached_blocks=message.cached_blocks,
        free_blocks=message.free_blocks,
        steps_total=message.steps_total,
        step_seconds_total=message.step_seconds_total,
        preemptions_total=message.preemptions_total,
        prompt_tokens_total=message.prompt_tokens_total,
        generated_tokens_total=message.generated_tokens_total,
        cached_tokens_total=message.cached_tokens_total,
        looked_up_tokens_total=message.looked_up_tokens_total,
        evictions_total=message.evictions_total,
        last_step_age=_seconds(message.last_step_age) if message.HasField("last_step_age") else None,
    )


def _request(message: pb.LiveRequest) -> LiveRequest:
    first = message.time_to_first_token
    return LiveRequest(
        request_id=message.request_id,
        tenant=message.tenant,
        method=message.method,
        state=pb.RequestState.Name(message.state).removeprefix(_REQUEST_STATE).lower(),
        prompt_tokens=message.prompt_tokens if message.HasField("prompt_tokens") else None,
        generated_tokens=message.generated_tokens,
        age=_seconds(message.age),
        time_to_first_token=_seconds(first) if message.HasField("time_to_first_token") else None,
        engines=tuple(message.engines),
    )


def _seconds(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9
