"""Draws tokens by the compiled kernels: rows without top_k and top_p, masked or not, without a copy of their logits.

Must not know: requests, plans, which rows to draw.
"""

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from engine_service.worker.kernels.library import DrawRowsStruct, ThreadTeam
from engine_service.worker.sampling_rows import SamplingRows


class KernelDraw:
    """The `RowDraw` of the CPU; the team must outlive it."""

    def __init__(self, team: ThreadTeam) -> None:
        self._team = team

    def takes(self, logits: torch.Tensor) -> bool:
        """Whether these logits are as the kernels read them."""
        return logits.dtype is torch.float32 and logits.device.type == "cpu" and logits.is_contiguous()

    def draw(self, logits: torch.Tensor, index: npt.NDArray[np.int64], rows: SamplingRows) -> torch.Tensor:
        """See `RowDraw`. ValueError for a mask that has not a bit for each token."""
        masks, mask_rows = _masks(rows, logits.shape)
        mask_rows = mask_rows[index]
        temperatures = np.where(rows.greedy[index], np.float32(0.0), rows.temperature[index])
        min_ps, uniforms = rows.min_p[index], rows.uniforms[index]
        tokens = torch.empty(len(index), dtype=torch.int64)
        batch = DrawRowsStruct(
            rows=len(index),
            vocabulary=logits.shape[1],
            mask_words=masks.shape[1],
            logits=logits.data_ptr(),
            places=index.ctypes.data,
            mask_rows=mask_rows.ctypes.data,
            masks=masks.data_ptr(),
            temperatures=temperatures.ctypes.data,
            min_ps=min_ps.ctypes.data,
            uniforms=uniforms.ctypes.data,
            tokens=tokens.data_ptr(),
        )
        self._team.library.checked("draw", ctypes.byref(batch), self._team.handle)
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
