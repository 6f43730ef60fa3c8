"""The settings of the rows of a step that sample: what the sampler gets beside the logits.

Must not know: requests, plans, how a token is drawn.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine_service.worker.row_rules import RowRules

# Below this temperature the second best token is out of reach for any logits worth the name.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class RuledRow:
    """A row whose logits are edited: its `place` among the R rows, and where its tokens are.

    The `length` known tokens of its request, prompt first, begin at `begin` of the token buffer.
    """

    place: int
    rules: RowRules
    begin: int
    length: int


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """The rows with rules, by rising place, and the token buffer of all requests, int32 on the device."""

    rows: tuple[RuledRow, ...]
    tokens: torch.Tensor


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens may come in M of the rows: `places` int64 [M], rising; `bits` int32 [M, ceil(vocabulary / 32)].

    Token t may come if bit t % 32 (the lowest is 0) of word t // 32 is set.
    """

    places: npt.NDArray[np.int64]
    bits: torch.Tensor


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The settings of R rows, one array entry each; `top_k` 0, `top_p` 1 and `min_p` 0 are off.

    `uniforms` are in [0, 1). `suppressed` pairs rows with token ids that must not come, int64 [2, S]; where a mask
    leaves a row nothing else, they may.
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float32]
    uniforms: npt.NDArray[np.float64]
    suppressed: npt.NDArray[np.int64] | None = None
    edits: LogitEdits | None = None
    masks: TokenMasks | None = None
    are_edited: bool = False  # these rows come with edited logits, many of them perhaps -inf

    @property
    def greedy(self) -> npt.NDArray[np.bool_]:
        return (self.temperature < GREEDY_BELOW) | (self.top_k == 1)

    @property
    def is_edited(self) -> bool:
        """Whether the model's logits are not what some row chooses by."""
        return self.suppressed is not None or self.edits is not None or self.masks is not None

    @property
    def is_plain_greedy(self) -> bool:
        """Every row takes its best token, whichever it is."""
        return not self.is_edited and bool(self.greedy.all())

    @property
    def edited(self) -> npt.NDArray[np.bool_]:
        """Which rows choose by other logits than the model's, [R]."""
        return self.ruled | self.masked

    @property
    def masked(self) -> npt.NDArray[np.bool_]:
        """Which rows have a mask, [R]."""
        marks = np.zeros(len(self.temperature), dtype=np.bool_)
        if self.masks is not None:
            marks[self.masks.places] = True
        return marks

    @property
    def ruled(self) -> npt.NDArray[np.bool_]:
        """Which rows' logits are edited by more than a mask, [R]."""
        marks = np.zeros(len(self.temperature), dtype=np.bool_)
        if self.suppressed is not None:
            marks[self.suppressed[0]] = True
        if self.edits is not None:
            marks[[row.place for row in self.edits.rows]] = True
        return marks

    def settings_of(self, index: npt.NDArray[np.int64]) -> "SamplingRows":
        """Some rows, without what is done to their logits."""
        return SamplingRows(
            self.temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.min_p[index],
            self.uniforms[index],
            are_edited=True,
        )
