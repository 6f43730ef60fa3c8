"""LoRA adapters as a tokenizer service tells its operator of them, engine by engine, as plain data.

Must not know: how it is asked, how it is shown.
"""

from dataclasses import dataclass

import grpc

from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb
from tokenwire_client.errors import ErrorCode
from tokenwire_client.operator_status import engine_state

_CODES = {code.value[0]: ErrorCode[code.name] for code in grpc.StatusCode if code is not grpc.StatusCode.OK}


@dataclass(frozen=True, slots=True)
class EngineOutcome:
    """What one engine made of a call. `error` None: it is done; otherwise `message` says why not."""

    address: str
    error: ErrorCode | None
    message: str


@dataclass(frozen=True, slots=True)
class Adapter:
    """The same `fingerprint` means the same tokens. Not `in_memory`: it is read when a request wants it."""

    name: str
    fingerprint: str
    in_memory: bool


@dataclass(frozen=True, slots=True)
class EngineAdapters:
    """`state` as of `Engine`; of one without a session no adapters are known."""

    address: str
    state: str
    adapters: tuple[Adapter, ...]


def outcome(message: pb.EngineOutcome) -> EngineOutcome:
    if not message.HasField("error"):
        return EngineOutcome(message.address, None, "")
    return EngineOutcome(message.address, _CODES.get(message.error.grpc_code, ErrorCode.UNKNOWN), message.error.message)


def adapters(message: pb.ListAdaptersResponse) -> EngineAdapters:
    found = tuple(Adapter(each.name, each.fingerprint, each.in_memory) for each in message.adapters)
    return EngineAdapters(message.address, engine_state(message.state), found)
