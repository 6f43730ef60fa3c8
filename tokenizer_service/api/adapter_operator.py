"""LoRA adapters of all engines, for operators: loaded and unloaded everywhere at once, listed engine by engine.

Must not know: gRPC servers, what an engine does with an adapter.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import structlog

from service_runtime.adapter_names import NAME_RULE, is_adapter_name
from tokenizer_service.api.engine_messages import state_of
from tokenizer_service.engines import adapter_calls
from tokenizer_service.engines.connection import EngineConnection
from tokenizer_service.engines.refusal import Refusal, invalid_field
from tokenizer_service.routing.replicas import Replica, Replicas
from tokenizer_service.routing.router import no_engine
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb

TIMEOUT_SECONDS = 60.0
# Of what the caller still waits: the rest is for telling what the other engines said.
_SHARE = 0.9
_MAX_SHOWN = 130

_log = structlog.get_logger()
Call = Callable[[EngineConnection, str, float], Awaitable[Refusal | None]]


@dataclass(frozen=True, slots=True)
class AdapterOperator:
    """`model_name` is what clients call the model itself: no adapter can have it."""

    replicas: Replicas
    model_name: str

    async def load(self, name: str, time_left_s: float | None) -> pb.LoadAdapterResponse | Refusal:
        """`time_left_s`: how long the caller waits; None: for ever."""
        outcomes = await self._everywhere("load_adapter", adapter_calls.load, name, time_left_s)
        return outcomes if isinstance(outcomes, Refusal) else pb.LoadAdapterResponse(engines=outcomes)

    async def unload(self, name: str, time_left_s: float | None) -> pb.UnloadAdapterResponse | Refusal:
        outcomes = await self._everywhere("unload_adapter", adapter_calls.unload, name, time_left_s)
        return outcomes if isinstance(outcomes, Refusal) else pb.UnloadAdapterResponse(engines=outcomes)

    def all(self) -> Iterator[pb.ListAdaptersResponse]:
        """An engine each, in the order in which they were added."""
        return (_adapters(replica) for replica in self.replicas.all())

    async def _everywhere(
        self, event: str, call: Call, name: str, time_left_s: float | None
    ) -> list[pb.EngineOutcome] | Refusal:
        refusal = self._check(name)
        if refusal is not None:
            return refusal
        connections = [each.connection for each in self.replicas.all() if each.connection.is_connected]
        if not connections:
            return no_engine()
        timeout_s = TIMEOUT_SECONDS if time_left_s is None else min(TIMEOUT_SECONDS, _SHARE * time_left_s)
        refusals = await asyncio.gather(*(call(each, name, timeout_s) for each in connections))
        refused = sum(each is not None for each in refusals)
        _log.info(event, adapter=name, done=len(refusals) - refused, refused=refused)
        return [_outcome(each.address, why) for each, why in zip(connections, refusals, strict=True)]

    def _check(self, name: str) -> Refusal | None:
        if not is_adapter_name(name):
            shown = repr(name) if len(name) <= _MAX_SHOWN else f"{len(name):,} characters"
            return invalid_field("name", f"{NAME_RULE}; got {shown}")
        return invalid_field("name", f"{name!r} is the model itself") if name == self.model_name else None


def _outcome(address: str, refusal: Refusal | None) -> pb.EngineOutcome:
    outcome = pb.EngineOutcome(address=address)
    if refusal is not None:
        outcome.error.grpc_code, outcome.error.message = refusal.code.value, refusal.message
    return outcome


def _adapters(replica: Replica) -> pb.ListAdaptersResponse:
    model = replica.connection.model
    known = {} if model is None else model.adapters
    return pb.ListAdaptersResponse(
        address=replica.address,
        state=state_of(replica),
        adapters=[
            pb.EngineAdapter(name=name, fingerprint=each.fingerprint, in_memory=each.in_memory)
            for name, each in sorted(known.items())
        ],
    )
