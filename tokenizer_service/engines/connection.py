"""One engine replica: a channel, and on it one Session stream that is opened again whenever it breaks.

Must not know: text, clients, other replicas.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import grpc
import structlog

from service_runtime.tls import Dialer
from tokenizer_service.engines.breaker import Breaker, BreakerLimits
from tokenizer_service.engines.changes import Changes
from tokenizer_service.engines.command_writer import SessionCall, write_commands
from tokenizer_service.engines.convert import adapters_of, engine_load, model_info
from tokenizer_service.engines.hang_watch import HangWatch
from tokenizer_service.engines.kv_watch import watch_blocks
from tokenizer_service.engines.losses import HUNG, LOST, is_failure
from tokenizer_service.engines.matching import ModelCheck
from tokenizer_service.engines.messages import EngineFinish, ModelInfo, ReplicaStream, TokenSink, TokenSubmission
from tokenizer_service.engines.one_model import OneModel
from tokenizer_service.engines.opening import open_session
from tokenizer_service.engines.prefix_map import Holder
from tokenizer_service.engines.probes import LinkTrouble, step_age
from tokenizer_service.engines.refusal import Refusal, RefusalCode
from tokenizer_service.engines.replica_load import ReplicaLoad
from tokenizer_service.engines.request_table import RequestTable
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc

_log = structlog.get_logger()
_MIN_HEARTBEAT_S, _MAX_HEARTBEAT_S = 0.1, 10.0


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

    @property
    def heartbeat_s(self) -> float:
        """What we promise to the engine, which gives us up after three times as long: as soon as we would it."""
        return min(max(self.hang_timeout_s / 3, _MIN_HEARTBEAT_S), _MAX_HEARTBEAT_S)


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
    stub: "engine_pb2_grpc.EngineServiceAsyncStub | None" = None
    adapters_changed: Changes = field(default_factory=Changes)
    is_draining: bool = False
    is_leaving: bool = False
    _left: asyncio.Event = field(default_factory=asyncio.Event)
    requests: RequestTable = field(init=False)
    _last_complaint: str = ""
    _hang: HangWatch = field(init=False)
    _trouble: LinkTrouble = field(init=False)

    def __post_init__(self) -> None:
        self.requests = RequestTable(self.address, self.limits.max_queued_submits, self._judge, self._note_left)
        self._trouble = LinkTrouble(self.address)
        self._hang = HangWatch(self.limits.hang_timeout_s, lambda: self.num_live > 0, time.monotonic)

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
        return len(self.requests.live)

    @property
    def outstanding_tokens(self) -> int:
        """Work that the engine has from us."""
        return self.requests.outstanding_tokens

    @property
    def load(self) -> ReplicaLoad:
        return self.requests.load

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
        if self.is_leaving and not self.requests.live:
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
            opened = await open_session(call, self.client_name, self.limits.heartbeat_s, self.limits.open_timeout_s)
            model = model_info(opened)
            if not self._accept(model):
                return False
            heartbeat_s = self.limits.heartbeat_s if opened.takes_heartbeats else None
            self.stub = stub
            await self._serve_while_alive(stub, self._serve(call, heartbeat_s), model)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            _log.debug("engine_session_failed", engine=self.address, error=type(error).__name__)
            was_usable = self._disconnect()
            if not was_usable:
                await self._trouble.after(stub, error)
            return was_usable
        finally:
            self._disconnect()
            call.cancel()
        return True

    async def _serve_while_alive(
        self, stub: "engine_pb2_grpc.EngineServiceAsyncStub", session: Coroutine[Any, Any, None], model: ModelInfo
    ) -> None:
        """To the end of the session, or of our patience with an engine that hangs."""
        serving = asyncio.create_task(session)
        hang = asyncio.create_task(self._hang.wait(partial(step_age, stub)))
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

    def _accept(self, model: ModelInfo) -> bool:
        self._trouble.over()
        complaint = self.check.complaint(model) or self.one_model.join(self.address, model) or ""
        if complaint and complaint != self._last_complaint:
            _log.error("engine_mismatch", engine=self.address, reason=complaint)
        self._last_complaint = complaint
        if complaint:
            return False
        self.model = model
        _log.info("engine_connected", engine=self.address, model=model.name, epoch=model.engine_epoch)
        for difference in self.one_model.differences(self.address):
            _log.warning("engine_differs", engine=self.address, difference=difference)
        self.on_change()
        return True

    async def _serve(self, call: SessionCall, heartbeat_s: float | None) -> None:
        """To the end of the session; raises what one of its two tasks died of."""
        reader = asyncio.create_task(self._read(call))
        writer = asyncio.create_task(write_commands(call, self.requests, heartbeat_s))
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done() and not writer.cancelled():
                writer.result()  # a session that is not written to any more would only look alive
            await reader
        finally:
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def _read(self, call: SessionCall) -> None:
        while isinstance(message := await call.read(), engine_pb2.SessionResponse):
            self._hang.heard()
            if message.HasField("draining"):
                self._note_draining()
            if message.HasField("load"):
                self.load.note(engine_load(message.load))
            if message.HasField("adapters") and self.model is not None:
                self.model = replace(self.model, adapters=adapters_of(message.adapters.adapters))
                self.adapters_changed.tell()
            self._take(message.step)

    def _note_draining(self) -> None:
        """The engine will stop: its running requests go on, new ones go elsewhere."""
        self.is_draining = True
        _log.info("engine_draining", engine=self.address)
        self.on_change()

    def _take(self, step: engine_pb2.StepOutputs) -> None:
        has_tokens = self.requests.dispatch(step)
        if has_tokens and self.breaker.is_troubled:
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
        is_idle = self.num_live == 0
        stream = self.requests.add(submission, sink, self.model, cached_tokens)
        if not isinstance(stream, Refusal):
            self.breaker.on_sent()
            if is_idle:
                self._hang.begin_work()
        return stream

    def _disconnect(self, loss: Refusal = LOST) -> bool:
        """Ends every live request with UNAVAILABLE. Returns whether the replica had been usable."""
        was_usable = self.model is not None
        left_on_purpose = (self.is_draining or self.is_leaving) and not self.requests.live
        if was_usable and not self.is_draining and loss is LOST:
            self.breaker.on_failure()
        self.one_model.leave(self.address)
        self.model = None
        self.stub = None
        self.is_draining = False
        self.adapters_changed.tell()
        self.requests.lose_all(loss)
        if was_usable:
            if left_on_purpose:
                _log.info("engine_drained", engine=self.address)
            else:
                _log.warning("engine_disconnected", engine=self.address)
            self.on_change()
        return was_usable
