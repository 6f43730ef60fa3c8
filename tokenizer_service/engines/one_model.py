"""All engines of a service serve the same model, so that each may go on with what another has begun.

Must not know: grpc, how engines are reached, tokenizers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from tokenizer_service.engines.messages import ModelInfo, SamplingOptions


@dataclass(slots=True)
class OneModel:
    """The first engine that connects decides; once none is left, the next one does."""

    _models: dict[str, ModelInfo] = field(default_factory=dict)  # by address

    def join(self, address: str, model: ModelInfo) -> str | None:
        """Why the engine must not serve beside the others, with both sides' values; None: it has joined."""
        for other, its in self._others(address):
            if its.weights_fingerprint != model.weights_fingerprint:
                mine, theirs = model.weights_fingerprint or "unknown", its.weights_fingerprint or "unknown"
                return f"its weights are {mine}, those of {other} {theirs}"
            if its.vocab_size != model.vocab_size:
                return f"its model has {model.vocab_size:,} ids, that of {other} {its.vocab_size:,}"
        self._models[address] = model
        return None

    def leave(self, address: str) -> None:
        """The engine is no longer connected."""
        self._models.pop(address, None)

    def differences(self, address: str) -> Iterator[str]:
        """In what one that has joined may differ from another, as in a rolling change: with both sides' values."""
        model = self._models[address]
        for other, its in self._others(address):
            if its.max_model_len != model.max_model_len:
                yield f"its max_model_len is {model.max_model_len:,}, that of {other} {its.max_model_len:,}"
            changed = _changed(model.default_sampling, its.default_sampling)
            if changed:
                yield f"its default sampling is not that of {other}: {changed}"
            if changed or its.max_model_len != model.max_model_len:
                return

    def _others(self, address: str) -> Iterator[tuple[str, ModelInfo]]:
        return ((other, model) for other, model in self._models.items() if other != address)


def _changed(mine: SamplingOptions, theirs: SamplingOptions) -> str:
    pairs = [(item.name, getattr(mine, item.name), getattr(theirs, item.name)) for item in fields(SamplingOptions)]
    return ", ".join(f"{name} {ours} here, {its} there" for name, ours, its in pairs if ours != its)
