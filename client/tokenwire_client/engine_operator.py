"""A blocking client for operators of one engine service: drains it, fetches its recorded steps.

Must not know: generations, the command line, what is in the recorded steps.
"""

from collections.abc import Iterator
from types import TracebackType
from typing import Self

import grpc

from tokenwire.engine.v1 import engine_pb2 as pb
from tokenwire.engine.v1 import engine_pb2_grpc
from tokenwire_client.sync_stream import translate_blocking
from tokenwire_client.tls import Tls, blocking_channel

DEFAULT_TIMEOUT_S = 60.0


class EngineOperator:
    """`target` is the engine's gRPC address, `timeout` in seconds, of each call. Encrypted with `tls`.

    What the engine was not started with the flag for is PermissionDenied. Every method raises subclasses of
    TokenwireError. Nothing is tried again.
    """

    def __init__(self, target: str, *, timeout: float = DEFAULT_TIMEOUT_S, tls: Tls | None = None) -> None:
        self._timeout = timeout
        self._channel = blocking_channel(target, tls)
        self._service = engine_pb2_grpc.EngineServiceStub(self._channel)

    def drain(self, grace: float | None = None) -> int:
        """The engine takes no new requests, ends after `grace` seconds at the latest; requests that run now."""
        request = pb.DrainRequest()
        if grace is not None:
            request.grace.FromNanoseconds(int(grace * 1e9))
        try:
            return self._service.Drain(request, timeout=self._timeout).live_requests
        except grpc.RpcError as error:
            raise translate_blocking(error) from error

    def steps(self, last: int | None = None) -> Iterator[bytes]:
        """The recorded steps (the `last` so many) as a file in the Chrome trace event format, part by part."""
        request = pb.DumpStepsRequest() if last is None else pb.DumpStepsRequest(steps=last)
        call = self._service.DumpSteps(request, timeout=self._timeout)
        try:
            for answer in call:
                yield answer.data
        except grpc.RpcError as error:
            raise translate_blocking(error) from error
        finally:
            call.cancel()

    def close(self) -> None:
        """Idempotent."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
