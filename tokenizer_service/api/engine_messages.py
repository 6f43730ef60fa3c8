"""An engine replica as operators see it.

Must not know: gRPC calls, requests.
"""

from tokenizer_service.routing.replicas import Replica
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb


def engine_message(replica: Replica) -> pb.Engine:
    connection = replica.connection
    return pb.Engine(
        address=replica.address,
        sources=sorted(replica.sources),
        state=state_of(replica),
        live_requests=connection.num_live,
        engine_epoch=connection.model.engine_epoch if connection.model is not None else "",
    )


def state_of(replica: Replica) -> "pb.EngineState.ValueType":
    connection = replica.connection
    if connection.is_leaving:
        return pb.ENGINE_STATE_LEAVING
    if connection.model is None:
        return pb.ENGINE_STATE_CONNECTING
    return pb.ENGINE_STATE_DRAINING if connection.is_draining else pb.ENGINE_STATE_CONNECTED
