"""The hold on a request that one engine has.

Must not know: grpc, what the request is.
"""

from dataclasses import dataclass, field
from typing import Protocol

from tokenizer_service.engines.messages import ModelInfo


class HandleOwner(Protocol):
    """The connection on which the request was sent."""

    address: str

    def cancel(self, handle: int, index: int | None) -> None: ...

    def forget(self, handle: int) -> None: ...


@dataclass(slots=True)
class HandleStream:
    """ReplicaStream of one handle."""

    connection: HandleOwner
    handle: int
    num_samples: int
    model: ModelInfo
    cancelled: set[int] = field(default_factory=set)

    @property
    def replica(self) -> str:
        return self.connection.address

    @property
    def engines(self) -> tuple[str, ...]:
        return (self.connection.address,)

    def replicas(self) -> tuple[str, ...]:
        return (self.connection.address,)

    def cancel(self, index: int | None = None) -> None:
        if self.num_samples == 1:
            index = None  # the one sample is all
        new = set(range(self.num_samples)) if index is None else {index}
        if new <= self.cancelled:
            return
        self.cancelled |= new
        self.connection.cancel(self.handle, index)

    def close(self) -> None:
        self.cancel()
        self.connection.forget(self.handle)
