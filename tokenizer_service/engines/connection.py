"""One engine replica: a channel, and on it one Session stream that is opened again whenever it breaks.

Demultiplexes the engine's step messages to the sinks of the live requests.
Must not know: text, clients, other replicas.
"""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import grpc
import structlog

from service_runtime.tls import Dialer
from tokenizer_service.engines.breaker import Breaker, BreakerLimits
from tokenizer_service.engines.convert import (
    cancel_message,
    engine_finish,
    engine_load,
    model_info,
    submit_message,
    with_logprobs,
)
from tokenizer_service.engines.handle_stream import HandleStream
from tokenizer_service.engines.hang_watch import HangWatch
from tokenizer_service.engines.kv_watch import watch_blocks
from tokenizer_service.engines.live_request import LiveRequest
from tokenizer_service.engines.losses import HUNG, LOST, is_failure
from tokenizer_service.engines.matching import ModelCheck
from tokenizer_service.engines.messages import (
    EngineFinish,
    ModelInfo,
    ReplicaStream,
    TokenNews,
    TokenSink,
    TokenSubmission,
)
from tokenizer_service.engines.one_model import OneModel
from tokenizer_service.engines.prefix_map import Holder
from tokenizer_service.engines.refusal import Refusal, RefusalCode
from tokenizer_service.engines.replica_load import ReplicaLoad
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc

_log = structlog.get_logger()
SessionCall: TypeAlias = "grpc.aio.StreamStreamCall[engine_pb2.SessionRequest, engine_pb2.SessionResponse]"


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Times in seconds. `max_queued_submits`: accepted but not yet written to the engine.

    `hang_timeout_s`: an engine that holds work and neither says anything nor takes a step for so long is given up.
    """

    open_timeout_s: float = 5.0
    first_backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    max_queued_submits: int = 1024
    hang_timeout_s: float = 30.0


@dataclass(slots=True)
class EngineConnection:
    """`run` keeps the session; `submit` uses it. `jitter` gives numbers in [0, 1).

    `on_change` is called when the replica becomes usable or stops being so. `blocks` follows what it can reuse.
    `one_model` is shared by the connections whose engines may go on with each other's requests.
    """

    address: str
    client_name: str
    check: ModelCheck
    limits: ConnectionLimits
    dialer: Dialer
    jitter: Callable[[], float]
    on_change: Callable[[], None]
    blocks: Holder | None = None
    one_model: OneModel = field(default_factory=OneModel)
    breaker: Breaker = field(default_factory=lambda: Breaker(BreakerLimits(), time.monotonic))
    model: ModelInfo | None = None
    is_draining: bool = False
    load: ReplicaLoad = field(default_factory=ReplicaLoad)
    is_leaving: bool = False
    outstanding_tokens: int = 0
    _left: asyncio.Event = field(default_factory=asyncio.Event)
    _next_handle: int = 1
    _live: dict[int, LiveRequest] = field(default_factory=dict)
    _submits: OrderedDict[int, TokenSubmission] = field(default_factory=OrderedDict)
    _cancels: OrderedDict[tuple[int, int | None], None] = field(default_factory=OrderedDict)
    _has_commands: asyncio.Event = field(default_factory=asyncio.Event)
    _last_complaint: str = ""
    _hang: HangWatch = field(init=False)

    def __post_init__(self) -> None:
        self._hang = HangWatch(self.limits.hang_timeout_s, lambda: bool(self._live), time.monotonic)

    @property
    def is_connected(self) -> bool:
        """The session is open, the model fits our tokenizer and the engine takes new requests."""
        return self.model is not None and not self.is_draining and not self.is_leaving

    @property
    def block_size(self) -> int:
        """Tokens per KV block; 0 while it is not known."""
        return 0 if self.model is None else self.model.block_size

    @property
    def is_usable(self) -> bool:
        """It is connected, and has not just failed again and again."""
        return self.is_connected and self.breaker.allows

    @property
    def num_live(self) -> int:
        return len(self._live)

    def leave(self) -> None:
        """No new requests from now on; those that run go on."""
        self.is_leaving = True
        self._note_left()

    def stay(self) -> None:
        """Takes `leave` back."""
        self.is_leaving = False
        self._left.clear()

    async def wait_left(self) -> None:
        """Returns when it is leaving and no request is live."""
        await self._left.wait()

    def _note_left(self) -> None:
        if self.is_leaving and not self._live:
            self._left.set()

    async def run(self) -> None:
        """Holds a session until cancelled; a broken one is opened again after a backoff with jitter."""
        failures = 0
        while True:
            credentials = self.dialer.credentials()
            async with self.dialer.open(self.address, credentials) as channel:
                stub = engine_pb2_grpc.EngineServiceStub(channel)
                # A channel keeps its certificates: with new ones a new session needs a new channel.
                while credentials is self.dialer.credentials():
                    failures = 0 if await self._try_session(stub) else failures + 1
                    await asyncio.sleep(self._backoff(failures))

    async def _try_session(self, stub: "engine_pb2_grpc.EngineServiceAsyncStub") -> bool:
        try:
            return await self._hold_session(stub)
        except Exception:
            # Whatever it was: without this task the replica would be lost until a restart.
            _log.exception("engine_session_broken", engine=self.address)
            return False

    def _backoff(self, failures: int) -> float:
        ceiling = min(self.limits.max_backoff_s, self.limits.first_backoff_s * 2 ** min(failures, 16))
        return float(ceiling * (0.5 + self.jitter() / 2))

    async def _hold_session(self, stub: "engine_pb2_grpc.EngineServiceAsyncStub") -> bool:
        """Opens a session and serves it to its end. True if it was usable."""
        call: SessionCall = stub.Session(wait_for_ready=True)
        try:
            model = await self._open(call)
            if not self._accept(model):
                return False
            await self._serve_while_alive(stub, call, model)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            _log.debug("engine_session_failed", engine=self.address, error=type(error).__name__)
            return self._disconnect()
        finally:
            self._disconnect()
            call.cancel()
        return True

    async def _serve_while_alive(
        self, stub: "engine_pb2_grpc.EngineServiceAsyncStub", call: SessionCall, model: ModelInfo
    ) -> None:
        """To the end of the session, or of our patience with an engine that hangs."""
        serving = asyncio.create_task(self._serve(call))
        hang = asyncio.create_task(self._hang.wait(partial(_step_age, stub)))
        watching = asyncio.create_task(self._watch_blocks(stub, model))
        try:
            await asyncio.wait({serving, hang}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            else:
                hang.result()
                _log.error("engine_hangs", engine=self.address, live_requests=self.num_live)
                self.breaker.trip(at_least_s=self.limits.hang_timeout_s)
                self._disconnect(HUNG)
        finally:
            for task in (serving, hang, watching):
                task.cancel()
            await asyncio.gather(serving, hang, watching, return_exceptions=True)

    async def _watch_blocks(self, stub: "engine_pb2_grpc.EngineServiceAsyncStub", model: ModelInfo) -> None:
        if self.blocks is not None:
            await watch_blocks(stub, model, self.blocks, self.address)

    async def _open(self, call: SessionCall) -> ModelInfo:
        """Raises TimeoutError when the engine does not answer, AioRpcError when it refuses."""
        async with asyncio.timeout(self.limits.open_timeout_s):
            opening = engine_pb2.OpenSession(client_name=self.client_name, tell_load=True)
            with contextlib.suppress(asyncio.InvalidStateError):  # the read tells why the call has ended
                await call.write(engine_pb2.SessionRequest(open=opening))
            answer = await call.read()
        if not isinstance(answer, engine_pb2.SessionResponse) or not answer.HasField("opened"):
            raise TimeoutError("the engine ended the session without opening it")
        return model_info(answer.opened)

    def _accept(self, model: ModelInfo) -> bool:
        complaint = self.check.complaint(model) or self.one_model.join(self.address, model.weights_fingerprint) or ""
        if complaint and complaint != self._last_complaint:
            _log.error("engine_mismatch", engine=self.address, reason=complaint)
        self._last_complaint = complaint
        if complaint:
            return False
        self.model = model
        _log.info("engine_connected", engine=self.address, model=model.name, epoch=model.engine_epoch)
        self.on_change()
        return True

    async def _serve(self, call: SessionCall) -> None:
        writer = asyncio.create_task(self._write_commands(call))
        try:
            while isinstance(message := await call.read(), engine_pb2.SessionResponse):
                self._hang.heard()
                if message.HasField("draining"):
                    self._note_draining()
                if message.HasField("load"):
                    self.load.note(engine_load(message.load))
                self._dispatch(message.step)
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    def _note_draining(self) -> None:
        """The engine will stop: its running requests go on, new ones go elsewhere."""
        self.is_draining = True
        _log.info("engine_draining", engine=self.address)
        self.on_change()

    async def _write_commands(self, call: SessionCall) -> None:
        """The only writer. Ends quietly with the call: the reader reports how it ended."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._has_commands.wait()
                self._has_commands.clear()
                while self._cancels or self._submits:
                    if self._cancels:
                        await call.write(cancel_message(*self._cancels.popitem(last=False)[0]))
                    if self._submits:
                        handle, submission = self._submits.popitem(last=False)
                        await call.write(submit_message(handle, submission, loop.time()))

    def _dispatch(self, step: engine_pb2.StepOutputs) -> None:
        for output in step.outputs:
            handle, index = output.handle, output.index
            live = self._live.get(handle)
            if live is None or index not in live.unfinished:
                continue  # closed on our side; the engine did not know yet
            token_ids = output.token_ids[:]  # read from here on: a list is much cheaper than the message's own
            if token_ids:
                if live.prompt_work:
                    self.load.began(handle)
                self.outstanding_tokens -= live.progress(index, len(token_ids))
            finish = None
            if output.HasField("finish"):
                finish = engine_finish(output.finish)
                self._judge(finish)
                self.outstanding_tokens -= live.finish(index)
                self.load.sample_ended(finish.usage)
                if not live.unfinished:
                    self._forget(handle)
            news = TokenNews(index, token_ids, finish, (), (), output.cached_tokens)
            live.sink.on_news(with_logprobs(news, output) if live.has_logprobs else news)
        if self.breaker.is_troubled and any(output.token_ids for output in step.outputs):
            self.breaker.on_success()

    def _judge(self, finish: EngineFinish) -> None:
        if finish.refusal is not None and is_failure(finish.refusal) and not self.is_draining:
            self.breaker.on_failure()

    def submit(self, submission: TokenSubmission, sink: TokenSink, cached_tokens: int = 0) -> ReplicaStream | Refusal:
        """Hands a generation to the engine; refused at once when not connected or too much is unsent.

        `cached_tokens`: of the prompt and what is resumed, as far as is known.
        """
        if self.model is None or not self.is_connected:
            return Refusal(RefusalCode.UNAVAILABLE, "the engine takes no new requests", retry_after_s=1.0)
        if len(self._submits) >= self.limits.max_queued_submits:
            return Refusal(
                RefusalCode.RESOURCE_EXHAUSTED,
                f"{len(self._submits):,} requests wait to be sent to the engine",
                retry_after_s=1.0,
            )
        self.breaker.on_sent()
        if not self._live:
            self._hang.begin_work()
        handle = self._next_handle
        self._next_handle += 1
        prompt = len(submission.token_ids)
        room = max(0, self.model.max_model_len - prompt)
        limit, samples = submission.sampling.max_tokens, submission.sampling.num_samples
        work = [room if limit is None else min(limit, room)] * samples
        live = LiveRequest(sink, prompt, work, set(range(samples)), submission.sampling.has_logprobs)
        self._live[handle] = live
        self.outstanding_tokens += live.work()
        known = prompt + len(submission.resumed_token_ids)
        self.load.sent(handle, max(0, known - cached_tokens), samples)
        self._submits[handle] = submission
        self._has_commands.set()
        return HandleStream(self, handle, samples, self.model)

    def cancel(self, handle: int, index: int | None) -> None:
        """Asks the engine to end a live request, or one sample of it; one that was not sent yet never is."""
        live = self._live.get(handle)
        if live is None or (index is not None and index not in live.unfinished):
            return
        if self._submits.pop(handle, None) is not None:
            self._forget(handle)
            live.sink.on_lost(Refusal(RefusalCode.CANCELLED, "the request was cancelled before it started"))
            return
        self._cancels[handle, index] = None
        self._has_commands.set()

    def forget(self, handle: int) -> None:
        if handle in self._live:
            self._forget(handle)

    def _forget(self, handle: int) -> None:
        live = self._live.pop(handle)
        self.outstanding_tokens -= live.work()
        self.load.forget(handle, len(live.unfinished))
        self._note_left()

    def _disconnect(self, loss: Refusal = LOST) -> bool:
        """Ends every live request with UNAVAILABLE. Returns whether the replica had been usable."""
        was_usable = self.model is not None
        if was_usable and not self.is_draining and loss is LOST:
            self.breaker.on_failure()
        self.one_model.leave(self.address)
        self.model = None
        self.is_draining = False
        self.load.lost()
        self._submits.clear()
        self._cancels.clear()
        for handle in list(self._live):
            live = self._live[handle]
            self._forget(handle)
            live.sink.on_lost(loss)
        if was_usable:
            _log.warning("engine_disconnected", engine=self.address)
            self.on_change()
        return was_usable


async def _step_age(stub: "engine_pb2_grpc.EngineServiceAsyncStub", timeout_s: float) -> float | None:
    """Seconds since the engine's last step; None when it does not answer in time or has taken none."""
    try:
        load = await stub.GetLoad(engine_pb2.GetLoadRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError:
        return None
    return load.last_step_age.ToNanoseconds() / 1e9 if load.HasField("last_step_age") else None
