"""How long a step takes, as a linear model of what is in it: small enough to be fitted and read.

Must not know: where the figures were measured, clocks, requests.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from engine_service.core.plan import Chunk

_MAX_FILE_BYTES = 65_536


class BadStepModel(ValueError):
    """The file is not a step model; the message says why."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes: requests that decode and tokens of their drafts, prompt tokens, and the positions that
    their attention reads."""

    decode_rows: int
    prefill_tokens: int
    decode_context: int
    prefill_context: int

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> "StepWork":
        """A token reads all positions up to its own."""
        decodes = [chunk for chunk in chunks if chunk.length == 1 or chunk.draft]
        prefills = [chunk for chunk in chunks if chunk.length > 1 and not chunk.draft]
        return cls(
            sum(chunk.length for chunk in decodes),
            sum(chunk.length for chunk in prefills),
            sum(chunk.length * (chunk.start + 1) for chunk in decodes),
            sum(chunk.length * chunk.start + chunk.length * (chunk.length + 1) // 2 for chunk in prefills),
        )


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds of a step: `base_s` (weights are read whatever is in it) and so much for each unit of `StepWork`."""

    base_s: float
    decode_row_s: float
    prefill_token_s: float
    decode_context_s: float
    prefill_context_s: float

    def seconds(self, work: StepWork) -> float:
        """Of a step with this work; 0 for a step that computes nothing."""
        if work.decode_rows + work.prefill_tokens == 0:
            return 0.0
        return (
            self.base_s
            + self.decode_row_s * work.decode_rows
            + self.prefill_token_s * work.prefill_tokens
            + self.decode_context_s * work.decode_context
            + self.prefill_context_s * work.prefill_context
        )

    def save(self, path: Path, source: dict[str, object]) -> None:
        """JSON; `source` says what was measured, for the reader."""
        path.write_text(json.dumps({"step_model": asdict(self), "source": source}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "StepModel":
        """Raises BadStepModel for a file that cannot be used."""
        try:
            with path.open("rb") as file:
                text = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise BadStepModel(f"the step model cannot be read: {error.strerror}") from error
        if len(text) > _MAX_FILE_BYTES:
            raise BadStepModel(f"the step model has more than {_MAX_FILE_BYTES:,} bytes")
        try:
            values = json.loads(text)["step_model"]
            model = cls(**{field.name: float(values[field.name]) for field in fields(cls)})
        except (ValueError, TypeError, KeyError) as error:
            raise BadStepModel("the step model is not JSON with the numbers of `step_model`") from error
        model.check()
        return model

    def check(self) -> None:
        """Raises BadStepModel for times that no device has."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0.0 <= value < 60.0:
                raise BadStepModel(f"{field.name} {value} is not in 0..60 seconds")
        if self.base_s + self.decode_row_s == 0.0:
            raise BadStepModel("base_s and decode_row_s are both 0: a step would take no time")
