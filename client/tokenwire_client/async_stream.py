"""One running generation, for asyncio.

Must not know: how requests are built, which connection carries them.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Self, cast

import grpc
from grpc.aio import AioRpcError, UnaryStreamCall

from tokenwire_client.assembly import Assembly, StreamResponse
from tokenwire_client.channels import Lease
from tokenwire_client.errors import Cancelled, ErrorCode, TokenwireError, Unavailable
from tokenwire_client.retry import Attempts
from tokenwire_client.rpc_errors import translate
from tokenwire_client.tracing import RequestTrace
from tokenwire_client.types import Completion, Delta


class OpenCall:
    """A call in flight and its place on a connection; both end together."""

    def __init__(self, call: UnaryStreamCall, lease: Lease) -> None:  # type: ignore[type-arg]
        self.call = call
        self._lease = lease

    def abandon(self, failure: TokenwireError) -> bool:
        """New calls avoid its connection if the service behind it is the reason. True: another may do better."""
        return isinstance(failure, Unavailable) and self._lease.retire()

    def end(self) -> None:
        """Cancels what still runs. Idempotent; only in the call's event loop."""
        self.call.cancel()
        self._lease.release()


class AsyncStream:
    """Async iterator over the deltas of one request, which was sent when the stream was made.

    Leaving an iteration early (break, exception, cancelled task), `aclose`, the end of `async with` and
    garbage collection cancel the request in the service. Errors are raised by the iteration; none is ever
    turned into a normal end. Only one task may read a stream at a time.
    """

    def __init__(
        self,
        first: OpenCall,
        reopen: Callable[[float | None], OpenCall],
        attempts: Attempts,
        assembly: Assembly,
        trace: RequestTrace,
    ) -> None:
        self._trace = trace
        self._current = first
        self._reopen = reopen
        self._attempts = attempts
        self._assembly = assembly
        self._failure: TokenwireError | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def completion(self) -> Completion | None:
        """The whole generation (of several samples the first), once the stream has been read to its end; None
        before.
        """
        return self._assembly.completion

    @property
    def completions(self) -> tuple[Completion, ...]:
        """Every sample in the order of their indices, once the stream has been read to its end; empty before."""
        return self._assembly.completions

    async def result(self) -> Completion:
        """Reads what is left and returns the whole generation; of several samples the first."""
        return (await self.results())[0]

    async def results(self) -> tuple[Completion, ...]:
        """Reads what is left and returns every sample in the order of their indices."""
        try:
            while await self._next() is not None:
                pass
        finally:
            self._leave()
        return self._assembly.completions

    async def aclose(self) -> None:
        """Ends the request, if it still runs. Idempotent."""
        self._leave()

    def __aiter__(self) -> AsyncGenerator[Delta, None]:
        return self._deltas()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    async def _deltas(self) -> AsyncGenerator[Delta, None]:
        # A generator, because only a generator is told when a loop over it is left.
        try:
            while (delta := await self._next()) is not None:
                yield delta
        finally:
            self._leave()

    async def _next(self) -> Delta | None:
        """The next delta, None at the end."""
        try:
            while self._assembly.completion is None:
                if self._failure is not None:
                    raise self._failure
                response = await self._read()
                if response is None:
                    self._assembly.finish()
                    self._end()
                elif (delta := self._assembly.add(response)) is not None:
                    return delta
        except TokenwireError as failure:
            self._failure = failure
            self._end()
            raise
        return None

    async def _read(self) -> StreamResponse | None:
        """The next message, None when the stream ended well; tries again before the first message."""
        while True:
            try:
                response = await self._current.call.read()
            except AioRpcError as error:
                failure = translate(error.code(), error.details(), error.trailing_metadata())
                elsewhere = self._current.abandon(failure)
                pause = None if self._assembly.started else self._attempts.pause_after(failure, elsewhere)
                if pause is None:
                    raise failure from error
            except asyncio.CancelledError:
                if being_cancelled():
                    raise
                # Not this task but the call was cancelled: by aclose or by the client's close.
                raise self._failure or Cancelled(ErrorCode.CANCELLED, "the client was closed") from None
            else:
                return None if response is grpc.aio.EOF else cast(StreamResponse, response)
            self._current.end()
            await asyncio.sleep(pause)
            if self._failure is not None:
                raise self._failure
            self._current = self._reopen(self._attempts.remaining())

    def _leave(self) -> None:
        if self._assembly.completion is None and self._failure is None:
            self._failure = Cancelled(ErrorCode.CANCELLED, "the stream was left before its end")
        self._end()

    def _end(self) -> None:
        """Nothing more comes, or is wanted."""
        self._current.end()
        self._trace.end(self._assembly.completions, self._failure)

    def __del__(self) -> None:
        # The collector may run in any thread, and the loop may be gone (then so is the call).
        if self._assembly.completion is None and self._failure is None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end)


def being_cancelled() -> bool:
    """Whether a CancelledError is meant for the current task."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
