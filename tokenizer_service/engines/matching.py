"""Does an engine's model speak the ids of our tokenizer?

Must not know: grpc, how the engine is reached.
"""

from dataclasses import dataclass

from tokenizer_service.engines.messages import ModelInfo


@dataclass(frozen=True, slots=True)
class TokenizerIdentity:
    """Our side: the fingerprint (sha256 hex) of the tokenizer files and the number of ids they know."""

    fingerprint: str
    vocab_size: int


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """Compares models with `ours`; with `allow_mismatch` any model that has a context passes."""

    ours: TokenizerIdentity
    allow_mismatch: bool

    def complaint(self, model: ModelInfo) -> str | None:
        """Why the engine cannot be used, with both sides' values; None when it can."""
        if model.max_model_len < 2:
            return f"the engine's max_model_len is {model.max_model_len}"
        if self.allow_mismatch:
            return None
        if not model.tokenizer_fingerprint or model.tokenizer_fingerprint != self.ours.fingerprint:
            theirs = model.tokenizer_fingerprint or "none"
            return f"tokenizer fingerprint {self.ours.fingerprint or 'none'} is ours, {theirs} the engine's"
        if model.vocab_size < self.ours.vocab_size:
            return f"our tokenizer has {self.ours.vocab_size:,} ids, the engine's model {model.vocab_size:,}"
        return None
