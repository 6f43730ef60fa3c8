"""Measured clients of our two services: text through the tokenizer service, token ids through the engine's Session.

Must not know: how the services are started, statistics.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from benchmarks.serving.closed_loop import OnTokens, Send
from benchmarks.serving.workload import BenchRequest
from service_runtime.grpc_server import channel_options
from tokenwire.common.v1 import sampling_pb2
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc
from tokenwire_client import AsyncClient, Sampling


@contextlib.asynccontextmanager
async def tokenizer_client(target: str) -> AsyncIterator[Send]:
    """Text in, text out, through the tokenizer service at `target`."""
    async with AsyncClient(target) as client:

        async def send(request: BenchRequest, on_tokens: OnTokens) -> int | None:
            sampling = Sampling(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True)
            stream = client.generate(request.text, sampling)
            async for delta in stream:
                if delta.token_ids:
                    on_tokens(len(delta.token_ids))
            assert stream.completion is not None
            return stream.completion.usage.completion_tokens

        yield send


@dataclass(slots=True)
class _Live:
    on_tokens: OnTokens
    finished: "asyncio.Future[engine_pb2.Finish]"


@dataclass(slots=True)
class EngineSession:
    """One multiplexed Session with an engine. Handles are unique for ever, as the protocol asks."""

    call: Any
    _live: dict[int, _Live] = field(default_factory=dict)
    _next_handle: int = 1
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def open(self) -> None:
        await self._write(engine_pb2.SessionRequest(open=engine_pb2.OpenSession(client_name="benchmark")))
        opened = await self.call.read()
        if not opened.HasField("opened"):
            raise ConnectionError("the engine did not open the session")

    async def read(self) -> None:
        """Passes news on until the session ends; then every live request fails."""
        try:
            while (message := await self.call.read()) is not grpc.aio.EOF:
                for output in message.step.outputs:
                    self._pass_on(output)
        finally:
            for live in self._live.values():
                if not live.finished.done():
                    live.finished.set_exception(ConnectionError("the session with the engine ended"))

    def _pass_on(self, output: engine_pb2.RequestOutput) -> None:
        live = self._live.get(output.handle)
        if live is None:
            return
        if output.token_ids:
            live.on_tokens(len(output.token_ids))
        if output.HasField("finish") and not live.finished.done():
            live.finished.set_result(output.finish)

    async def send(self, request: BenchRequest, on_tokens: OnTokens) -> int | None:
        """Raises RuntimeError when the engine refuses or ends the request; cancels it when left."""
        handle = self._next_handle
        self._next_handle += 1
        live = _Live(on_tokens, asyncio.get_running_loop().create_future())
        self._live[handle] = live
        try:
            await self._write(_submit(handle, request))
            finish = await live.finished
        except asyncio.CancelledError:
            await self._write(engine_pb2.SessionRequest(cancel=engine_pb2.CancelRequest(handle=handle)))
            raise
        finally:
            del self._live[handle]
        if finish.HasField("error"):
            raise RuntimeError(finish.error.message)
        return int(finish.usage.completion_tokens)

    async def _write(self, message: engine_pb2.SessionRequest) -> None:
        async with self._writing:
            await self.call.write(message)


@contextlib.asynccontextmanager
async def engine_client(target: str) -> AsyncIterator[Send]:
    """Token ids in, token ids out, through one session with the engine service at `target`."""
    async with grpc.aio.insecure_channel(target, options=channel_options()) as channel:
        session = EngineSession(engine_pb2_grpc.EngineServiceStub(channel).Session())
        await session.open()
        reader = asyncio.create_task(session.read())
        try:
            yield session.send
        finally:
            session.call.cancel()
            await asyncio.gather(reader, return_exceptions=True)


def _submit(handle: int, request: BenchRequest) -> engine_pb2.SessionRequest:
    sampling = sampling_pb2.SamplingParams(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True)
    tokens = engine_pb2.TokenRequest(prompt_token_ids=request.token_ids, sampling=sampling)
    return engine_pb2.SessionRequest(submit=engine_pb2.SubmitRequest(handle=handle, request=tokens))
