"""A blocking client for operators of one tokenizer service: its engines and their adapters, its status, its end.

Must not know: generations, the command line. It talks to the operators' port, not to the clients'.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

import grpc

from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb
from tokenwire.tokenizer.v1 import tokenizer_pb2_grpc
from tokenwire_client.operator_adapters import EngineAdapters, EngineOutcome, adapters, outcome
from tokenwire_client.operator_status import Engine, Status, engine, status
from tokenwire_client.sync_stream import translate_blocking
from tokenwire_client.tls import Tls, blocking_channel

DEFAULT_TIMEOUT_S = 10.0

Answer = TypeVar("Answer")


class Operator:
    """Lists, adds and removes engines, loads and unloads adapters on them, drains the service.

    `target` is the tokenizer service's operator address, `timeout` in seconds. The connection is encrypted
    with `tls`. Every method raises subclasses of TokenwireError. Nothing is tried again.
    """

    def __init__(self, target: str, *, timeout: float = DEFAULT_TIMEOUT_S, tls: Tls | None = None) -> None:
        self._timeout = timeout
        self._channel = blocking_channel(target, tls)
        self._service = tokenizer_pb2_grpc.OperatorServiceStub(self._channel)

    def engines(self) -> tuple[Engine, ...]:
        """In the order in which they were added."""
        answer = _ask(lambda: self._service.ListEngines(pb.ListEnginesRequest(), timeout=self._timeout))
        return tuple(engine(each) for each in answer.engines)

    def add_engine(self, address: str) -> None:
        """HOST:PORT. It gets requests once it is connected, and stays until the service's next start."""
        _ask(lambda: self._service.AddEngine(pb.AddEngineRequest(address=address), timeout=self._timeout))

    def remove_engine(self, address: str) -> None:
        """It gets no new requests; those that run there go on."""
        _ask(lambda: self._service.RemoveEngine(pb.RemoveEngineRequest(address=address), timeout=self._timeout))

    def status(self, max_requests: int | None = None) -> Status:
        """What the service, its engines and its requests (the oldest, so many, 0 to 1,000) do now."""
        request = pb.GetStatusRequest() if max_requests is None else pb.GetStatusRequest(max_requests=max_requests)
        return status(_ask(lambda: self._service.GetStatus(request, timeout=self._timeout)))

    def drain(self, grace: float | None = None) -> int:
        """The service takes no new requests, ends after `grace` seconds at the latest; requests that run now."""
        request = pb.DrainRequest()
        if grace is not None:
            request.grace.FromNanoseconds(int(grace * 1e9))
        return _ask(lambda: self._service.Drain(request, timeout=self._timeout)).live_requests

    def load_adapter(self, name: str) -> tuple[EngineOutcome, ...]:
        """On every connected engine, from the folder of that name below the engine's `--lora-dir`.

        Engines that refuse are told of, not raised. Reading takes time: `timeout` is for the slowest.
        """
        request = pb.LoadAdapterRequest(name=name)
        answer = _ask(lambda: self._service.LoadAdapter(request, timeout=self._timeout))
        return tuple(outcome(each) for each in answer.engines)

    def unload_adapter(self, name: str) -> tuple[EngineOutcome, ...]:
        """As `load_adapter`; running requests keep it."""
        request = pb.UnloadAdapterRequest(name=name)
        answer = _ask(lambda: self._service.UnloadAdapter(request, timeout=self._timeout))
        return tuple(outcome(each) for each in answer.engines)

    def adapters(self) -> tuple[EngineAdapters, ...]:
        """Of every engine, in the order of `engines`."""
        request = pb.ListAdaptersRequest()
        return _ask(lambda: tuple(map(adapters, self._service.ListAdapters(request, timeout=self._timeout))))

    def close(self) -> None:
        """Idempotent."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ask(call: Callable[[], Answer]) -> Answer:
    try:
        return call()
    except grpc.RpcError as error:
        raise translate_blocking(error) from error
