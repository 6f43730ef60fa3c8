"""The C++ KV pool and attention alone, for models whose other layers run in torch.

Must not know: requests, plans, projections.
"""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine_service.worker.kernels.cpu_model import PoolSize
from engine_service.worker.kernels.library import AttentionShapeStruct, BatchStruct, NumberType, ThreadTeam, int_pairs


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of every layer; scores are query . key * scale."""

    query_heads: int
    kv_heads: int
    head_size: int
    scale: float


class PagedAttention:
    """Owns the KV pool of all layers in the kernels' layout. The thread team must outlive it."""

    def __init__(self, shape: HeadShape, layers: int, pool: PoolSize, dtype: torch.dtype, team: ThreadTeam) -> None:
        self.shape = shape
        self.dtype = dtype
        # Kept: the kernels call into its threads.
        self._team = team
        self._library = team.library
        struct = AttentionShapeStruct(shape.query_heads, shape.kv_heads, shape.head_size, shape.scale, 0)
        self._handle = self._library.create(
            "paged_create",
            NumberType.of(dtype),
            ctypes.byref(struct),
            layers,
            pool.num_blocks,
            pool.block_size,
            team.handle,
        )
        self._end = weakref.finalize(self, self._library.call, "paged_destroy", self._handle)

    def write(self, layer: int, batch: BatchStruct, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores key and value [T, KV heads, head size] of the batch's tokens; the last dimension is dense."""
        self._check(key)
        self._check(value)
        strides = (ctypes.c_int64 * 4)(*key.stride()[:2], *value.stride()[:2])
        self._library.checked(
            "paged_write", self._handle, layer, ctypes.byref(batch), key.data_ptr(), value.data_ptr(), strides
        )

    def attend(self, layer: int, batch: BatchStruct, query: torch.Tensor, window: int | None) -> torch.Tensor:
        """Causal attention of [T, query heads, head size] over each token's request -> the same shape."""
        self._check(query)
        strides = (ctypes.c_int64 * 2)(*query.stride()[:2])
        out = torch.empty(query.shape, dtype=self.dtype)
        self._library.checked(
            "paged_attend",
            self._handle,
            layer,
            ctypes.byref(batch),
            window or 0,
            query.data_ptr(),
            strides,
            out.data_ptr(),
        )
        return out

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks of every layer; see `CpuModel.copy_blocks`."""
        self._library.call("paged_copy_blocks", self._handle, len(pairs), int_pairs(pairs))

    def _check(self, tensor: torch.Tensor) -> None:
        if tensor.dtype is not self.dtype or tensor.stride(-1) != 1:
            raise ValueError(f"heads must be {self.dtype} with a dense last dimension")

    def close(self) -> None:
        """Frees the pool; no call may follow."""
        self._end()
