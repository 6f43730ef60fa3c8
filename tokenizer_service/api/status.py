"""What the service tells its operator: of itself, its engines and its requests. Names and numbers, never text.

Must not know: how the figures come about, gRPC calls.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration
from prometheus_client import CollectorRegistry

from tokenizer_service.api.call import Call
from tokenizer_service.api.engine_messages import engine_message
from tokenizer_service.api.live_calls import LiveCalls
from tokenizer_service.api.totals import read_totals
from tokenizer_service.engines.figures import Answer, FigureReader
from tokenizer_service.engines.refusal import Refusal, invalid_field
from tokenizer_service.routing.replicas import Replica, Replicas
from tokenizer_service.sessions.admission import Admission
from tokenwire.engine.v1 import engine_pb2
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb

MAX_REQUESTS = 1000
DEFAULT_REQUESTS = 50


@dataclass(frozen=True, slots=True)
class StatusReader:
    """`started` on the event loop's clock; `registry` has the service's metrics; `encode_queue` gives the texts that
    wait for a thread.
    """

    model_name: str
    max_requests: int
    started: float
    replicas: Replicas
    admission: Admission
    calls: LiveCalls
    registry: CollectorRegistry
    encode_queue: Callable[[], int]
    figures: FigureReader

    async def read(self, request: pb.GetStatusRequest) -> pb.GetStatusResponse | Refusal:
        count = request.max_requests if request.HasField("max_requests") else DEFAULT_REQUESTS
        if count > MAX_REQUESTS:
            return invalid_field("max_requests", f"{count:,} is not between 0 and {MAX_REQUESTS:,}")
        replicas = self.replicas.all()
        answers = await self.figures.ask([each.connection for each in replicas])
        now = asyncio.get_running_loop().time()
        return pb.GetStatusResponse(
            service=self._service(now),
            engines=[_engine(each, answers[each.address]) for each in replicas],
            requests=[_request(call, now) for call in self.calls.oldest(count)],
        )

    def _service(self, now: float) -> pb.ServiceFigures:
        totals = read_totals(self.registry)
        return pb.ServiceFigures(
            model_name=self.model_name,
            is_draining=self.admission.draining.is_set(),
            uptime=_duration(now - self.started),
            active_requests=self.admission.num_active,
            max_requests=self.max_requests,
            encode_queue=self.encode_queue(),
            prompt_tokens_total=totals.prompt_tokens + self.calls.prompt_tokens,
            generated_tokens_total=totals.generated_tokens + self.calls.tokens,
            routed_requests_total=totals.routed,
            failovers_total=totals.failovers,
            failed_failovers_total=totals.failed_failovers,
        )


def _engine(replica: Replica, answer: Answer) -> pb.EngineStatus:
    message = pb.EngineStatus(engine=engine_message(replica))
    if answer.load is None:
        message.error = answer.error
    else:
        message.figures.CopyFrom(_figures(answer.load))
    return message


def _figures(load: engine_pb2.GetLoadResponse) -> pb.EngineFigures:
    message = pb.EngineFigures(
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        waiting_tokens=load.waiting_tokens,
        total_blocks=load.total_blocks,
        used_blocks=load.used_blocks,
        cached_blocks=load.cached_blocks,
        free_blocks=load.free_blocks,
        steps_total=load.steps_total,
        step_seconds_total=load.step_seconds_total,
        preemptions_total=load.preemptions_total,
        prompt_tokens_total=load.prompt_tokens_total,
        generated_tokens_total=load.generated_tokens_total,
        cached_tokens_total=load.cached_tokens_total,
        looked_up_tokens_total=load.looked_up_tokens_total,
        evictions_total=load.evictions_total,
    )
    if load.HasField("last_step_age"):
        message.last_step_age.CopyFrom(load.last_step_age)
    return message


def _request(call: Call, now: float) -> pb.LiveRequest:
    engines = () if call.session is None else call.session.replicas
    message = pb.LiveRequest(
        request_id=call.request_id,
        tenant=call.tenant.name,
        method=call.method,
        state=_state(call),
        generated_tokens=call.completion_tokens,
        age=_duration(now - call.started),
        engines=engines,
    )
    if call.prompt_tokens is not None:
        message.prompt_tokens = call.prompt_tokens
    if call.first_token_at is not None:
        message.time_to_first_token.CopyFrom(_duration(call.first_token_at - call.started))
    return message


def _state(call: Call) -> "pb.RequestState.ValueType":
    session = call.session
    if session is None:
        return pb.REQUEST_STATE_ENCODING
    if not session.replicas and not session.is_over:
        return pb.REQUEST_STATE_MOVING
    return pb.REQUEST_STATE_WAITING if call.first_token_at is None else pb.REQUEST_STATE_GENERATING


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(max(0.0, seconds) * 1e9))
    return duration
