"""Chooses the engine replica of a request: the connected one with the least outstanding work.

Must not know: how a replica is reached, text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizer_service.engines.connection import EngineConnection
from tokenizer_service.engines.messages import ModelInfo, TokenSink, TokenStream, TokenSubmission
from tokenizer_service.engines.refusal import Refusal, RefusalCode


@dataclass(slots=True)
class Router:
    """Over a fixed set of replicas; equal ones take turns."""

    connections: Sequence[EngineConnection]
    _turn: int = field(default=0)

    @property
    def num_connected(self) -> int:
        return sum(connection.is_connected for connection in self.connections)

    def model(self) -> ModelInfo | None:
        """The model of any connected replica (all have our tokenizer); None when there is none."""
        return next((c.model for c in self.connections if c.is_connected), None)

    def submit(self, submission: TokenSubmission, sink: TokenSink) -> TokenStream | Refusal:
        chosen = self._choose()
        return no_engine() if chosen is None else chosen.submit(submission, sink)

    def _choose(self) -> EngineConnection | None:
        usable = [connection for connection in self.connections if connection.is_connected]
        if not usable:
            return None
        least = min(connection.outstanding_tokens for connection in usable)
        equal = [connection for connection in usable if connection.outstanding_tokens == least]
        self._turn += 1
        return equal[self._turn % len(equal)]


def no_engine() -> Refusal:
    return Refusal(RefusalCode.UNAVAILABLE, "no engine is connected", retry_after_s=1.0)
