"""All engines of a service serve the same weights, so that each may go on with what another has begun.

Must not know: grpc, how engines are reached, tokenizers.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class OneModel:
    """The first engine that connects decides; once none is left, the next one does."""

    _weights: dict[str, str] = field(default_factory=dict)  # by address

    def join(self, address: str, weights: str) -> str | None:
        """Why the engine must not serve beside the others, with both sides' values; None: it has joined."""
        for other, theirs in self._weights.items():
            if other != address and theirs != weights:
                return f"its weights are {weights or 'unknown'}, those of {other} {theirs or 'unknown'}"
        self._weights[address] = weights
        return None

    def leave(self, address: str) -> None:
        """The engine is no longer connected."""
        self._weights.pop(address, None)
