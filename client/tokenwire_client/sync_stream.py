"""One running generation, for blocking code.

Must not know: how requests are built, which connection carries them.
"""

import time
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Protocol, Self, cast

import grpc

from tokenwire_client.assembly import Assembly, StreamResponse
from tokenwire_client.channels import Lease
from tokenwire_client.errors import Cancelled, ErrorCode, TokenwireError, Unavailable
from tokenwire_client.retry import Attempts
from tokenwire_client.rpc_errors import translate
from tokenwire_client.tracing import RequestTrace
from tokenwire_client.types import Completion, Delta


class BlockingCall(Protocol):
    """What is used of a gRPC call that streams its answer."""

    def __iter__(self) -> Iterator[StreamResponse]: ...

    def cancel(self) -> bool: ...


class OpenCall:
    """A call in flight and its place on a connection; both end together."""

    def __init__(self, call: BlockingCall, lease: Lease) -> None:  # type: ignore[type-arg]
        self.responses = iter(call)
        self._call = call
        self._lease = lease

    def abandon(self, failure: TokenwireError) -> bool:
        """New calls avoid its connection if the service behind it is the reason. True: another may do better."""
        return isinstance(failure, Unavailable) and self._lease.retire()

    def end(self) -> None:
        """Cancels what still runs. Idempotent, from any thread."""
        self._call.cancel()
        self._lease.release()


class Stream:
    """Iterator over the deltas of one request, which was sent when the stream was made.

    Leaving an iteration early (break, exception, Ctrl-C), `close`, the end of `with` and garbage collection
    cancel the request in the service. Errors are raised by the iteration; none is ever turned into a normal
    end. Only one thread may read a stream at a time; `close` may be called by any.
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

    def result(self) -> Completion:
        """Reads what is left and returns the whole generation; of several samples the first."""
        return (self.results())[0]

    def results(self) -> tuple[Completion, ...]:
        """Reads what is left and returns every sample in the order of their indices."""
        try:
            while self._next() is not None:
                pass
        finally:
            self.close()
        return self._assembly.completions

    def close(self) -> None:
        """Ends the request, if it still runs. Idempotent."""
        if self._assembly.completion is None and self._failure is None:
            self._failure = Cancelled(ErrorCode.CANCELLED, "the stream was left before its end")
        self._end()

    def _end(self) -> None:
        """Nothing more comes, or is wanted."""
        self._current.end()
        self._trace.end(self._assembly.completions, self._failure)

    def __iter__(self) -> Generator[Delta, None, None]:
        # A generator, because only a generator is told when a loop over it is left.
        try:
            while (delta := self._next()) is not None:
                yield delta
        finally:
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _next(self) -> Delta | None:
        """The next delta, None at the end."""
        try:
            while self._assembly.completion is None:
                if self._failure is not None:
                    raise self._failure
                response = self._read()
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

    def _read(self) -> StreamResponse | None:
        """The next message, None when the stream ended well; tries again before the first message."""
        while True:
            try:
                return next(self._current.responses, None)
            except grpc.RpcError as error:
                failure = translate_blocking(error)
                elsewhere = self._current.abandon(failure)
                pause = None if self._assembly.started else self._attempts.pause_after(failure, elsewhere)
                if pause is None:
                    raise failure from error
            self._current.end()
            time.sleep(pause)
            self._current = self._reopen(self._attempts.remaining())
            if self._failure is not None:
                # Closed by another thread meanwhile.
                raise self._failure

    def __del__(self) -> None:
        if self._assembly.completion is None and self._failure is None:
            self._end()


def translate_blocking(error: grpc.RpcError) -> TokenwireError:
    """The exception for what a blocking call raised."""
    call = cast(grpc.Call, error)  # what gRPC raises is always the call as well
    return translate(call.code(), call.details(), call.trailing_metadata())
