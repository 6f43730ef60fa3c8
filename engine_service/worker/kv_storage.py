"""The KV pool as plain tensors, one key and one value tensor per layer.

The layout [blocks, block size, kv heads, head size] is the one of the torch reference and of CUDA's
variable-length attention; a backend with another layout allocates its own.
Must not know: requests, which block is free, the model.
"""

from dataclasses import dataclass

import torch

from engine_service.worker.attention import KvGeometry


@dataclass(frozen=True, slots=True)
class LayerKv:
    """keys [blocks, block size, kv heads, key dim] and values [.., value dim]."""

    keys: torch.Tensor
    values: torch.Tensor


def kv_bytes_per_block(geometry: KvGeometry) -> int:
    """Bytes of one block in this layout, all layers together."""
    numbers = sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in geometry.layers)
    return numbers * geometry.block_size * geometry.dtype.itemsize


def allocate_kv(geometry: KvGeometry, num_blocks: int) -> tuple[LayerKv, ...]:
    """Zeroed tensors for every layer.

    Zeros rather than uninitialised memory, because a kernel may multiply masked values by a weight of 0,
    and 0 * NaN is NaN. On a CPU the pages are only touched when they are used.
    """
    if num_blocks < 1:
        raise ValueError(f"a KV pool needs at least 1 block, not {num_blocks}")

    def tensor(heads: int, size: int) -> torch.Tensor:
        shape = (num_blocks, geometry.block_size, heads, size)
        return torch.zeros(shape, dtype=geometry.dtype, device=geometry.device)

    return tuple(
        LayerKv(
            keys=tensor(layer.num_kv_heads, layer.key_dim),
            values=tensor(layer.num_kv_heads, layer.value_dim),
        )
        for layer in geometry.layers
    )
