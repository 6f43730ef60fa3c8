"""Draws tokens by the compiled kernels, from the model's own logits and the masks of the rows.

Must not know: requests, plans, which rows to draw.
"""

import ctypes
import weakref

import numpy as np
import numpy.typing as npt
import torch

from engine_service.worker.kernels.library import DrawRowsStruct, ThreadTeam
from engine_service.worker.sampling_rows import SamplingRows


class KernelDraw:
    """The `RowDraw` of the CPU; one call at a time, and none after the team is closed."""

    def __init__(self, vocab_size: int, team: ThreadTeam) -> None:
        self._vocab_size = vocab_size
        self._library = team.library
        self._handle = self._library.create("draw_create", vocab_size, team.handle)
        weakref.finalize(self, self._library.call, "draw_destroy", self._handle)

    def takes(self, logits: torch.Tensor) -> bool:
        """Whether these logits are as the kernels read them."""
        is_plain = logits.dtype is torch.float32 and logits.device.type == "cpu" and logits.is_contiguous()
        return is_plain and logits.shape[1] == self._vocab_size

    def draw(self, logits: torch.Tensor, index: npt.NDArray[np.int64], rows: SamplingRows) -> torch.Tensor:
        """See `RowDraw`. ValueError for masks that have not a bit for each token."""
        masks, mask_rows = _masks(rows, logits.shape)
        tokens = torch.empty(len(index), dtype=torch.int64)
        columns = {
            "places": index,
            "mask_rows": mask_rows[index],
            "temperatures": np.where(rows.greedy[index], np.float32(0.0), rows.temperature[index]),
            "top_ks": rows.top_k[index],
            "top_ps": rows.top_p[index],
            "min_ps": rows.min_p[index],
            "uniforms": rows.uniforms[index],
        }
        batch = DrawRowsStruct(
            rows=len(index),
            mask_words=masks.shape[1],
            logits=logits.data_ptr(),
            masks=masks.data_ptr(),
            tokens=tokens.data_ptr(),
            **{name: column.ctypes.data for name, column in columns.items()},
        )
        self._library.checked("draw", self._handle, ctypes.byref(batch))
        return tokens


def _masks(rows: SamplingRows, shape: torch.Size) -> tuple[torch.Tensor, npt.NDArray[np.int64]]:
    """The masks, int32 [M, words], and which of them each of the R rows has, -1 for none."""
    count, vocabulary = shape
    mask_rows = np.full(count, -1, dtype=np.int64)
    if rows.masks is None:
        return torch.empty(0, 0, dtype=torch.int32), mask_rows
    bits = rows.masks.bits.contiguous()
    if bits.dtype is not torch.int32 or bits.shape[1] * 32 < vocabulary:
        raise ValueError(f"masks of {bits.shape[1]} words of {bits.dtype} do not cover {vocabulary:,} tokens")
    mask_rows[rows.masks.places] = np.arange(len(bits))
    return bits, mask_rows
