"""Chooses the engine replica of a request: the connected one with the least outstanding work.

Must not know: how a replica is reached, text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizer_service.engines.connection import EngineConnection
from tokenizer_service.engines.messages import ModelInfo, ReplicaStream, TokenSink, TokenSubmission
from tokenizer_service.engines.refusal import Refusal, RefusalCode


@dataclass(slots=True)
class Router:
    """Over the replicas that `connections` holds at the time; equal ones take turns."""

    connections: Sequence[EngineConnection]
    _turn: int = field(default=0)

    @property
    def num_connected(self) -> int:
        return sum(connection.is_connected for connection in self.connections)

    def model(self) -> ModelInfo | None:
        """The model of any connected replica (all have our tokenizer); None when there is none."""
        return next((c.model for c in self.connections if c.is_connected), None)

    def submit(
        self, submission: TokenSubmission, sink: TokenSink, avoid: frozenset[str] = frozenset()
    ) -> ReplicaStream | Refusal:
        """Hands a generation to a replica; to one that `avoid` names (addresses) only if there is no other."""
        chosen = self._choose(avoid)
        return no_engine() if chosen is None else chosen.submit(submission, sink)

    def _choose(self, avoid: frozenset[str]) -> EngineConnection | None:
        usable = [connection for connection in self.connections if connection.is_connected]
        usable = [connection for connection in usable if connection.address not in avoid] or usable
        if not usable:
            return None
        least = min(connection.outstanding_tokens for connection in usable)
        equal = [connection for connection in usable if connection.outstanding_tokens == least]
        self._turn += 1
        return equal[self._turn % len(equal)]


def no_engine() -> Refusal:
    return Refusal(RefusalCode.UNAVAILABLE, "no engine is connected", retry_after_s=1.0)
