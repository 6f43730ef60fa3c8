"""The KV pool on the device, and attention over it by whichever kernel was chosen.

Must not know: how a kernel was chosen, graphs, requests.
"""

from dataclasses import dataclass

import torch

from engine_service.worker.attention import BatchLayout, BlockCopies, KvGeometry, LayerShape
from engine_service.worker.cuda.kernel import Attend, AttentionKernel, KernelStep
from engine_service.worker.cuda.pages import Pages
from engine_service.worker.kv_storage import LayerKv, allocate_kv


@dataclass(frozen=True, slots=True)
class StartedStep:
    """A step that the kernel has prepared for."""

    slot_mapping: torch.Tensor
    attend: Attend


class PagedAttention:
    """AttentionBackend over blocks in the layout [blocks, block size, KV heads, size of a head]."""

    def __init__(self, kernel: AttentionKernel, geometry: KvGeometry, pages: Pages, num_blocks: int) -> None:
        self._kernel = kernel
        self._pages = pages
        self._device = geometry.device
        self._shapes: tuple[LayerShape, ...] = geometry.layers
        self._layers: tuple[LayerKv, ...] = allocate_kv(geometry, num_blocks)
        self._paged = tuple(LayerKv(pages.of_pool(kv.keys), pages.of_pool(kv.values)) for kv in self._layers)

    @property
    def is_static(self) -> bool:
        """Whether `prepare_static` may be used."""
        return self._kernel.is_static

    def prepare(self, layout: BatchLayout) -> StartedStep:
        return self._start(layout, max(layout.query_lens_list), max(layout.seq_lens_list), is_static=False)

    def prepare_static(self, layout: BatchLayout, max_keys: int) -> StartedStep:
        """For decodes whose tensors will hold other numbers each time: nothing of the lists is read."""
        return self._start(layout, 1, max_keys, is_static=True)

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor, step: StartedStep) -> None:
        kv = self._layers[layer]
        kv.keys.flatten(0, 1).index_copy_(0, step.slot_mapping, key)
        kv.values.flatten(0, 1).index_copy_(0, step.slot_mapping, value)

    def attend(self, layer: int, query: torch.Tensor, step: StartedStep) -> torch.Tensor:
        kv = self._paged[layer]
        return step.attend(query.contiguous(), kv.keys, kv.values, self._shapes[layer])

    def copy_blocks(self, pairs: BlockCopies) -> None:
        sources, destinations = torch.tensor(pairs, device=self._device).unbind(1)
        for kv in self._layers:
            kv.keys.index_copy_(0, destinations, kv.keys.index_select(0, sources))
            kv.values.index_copy_(0, destinations, kv.values.index_select(0, sources))

    def _start(self, layout: BatchLayout, max_query: int, max_keys: int, *, is_static: bool) -> StartedStep:
        step = KernelStep(
            slot_mapping=layout.slot_mapping,
            query_start=layout.query_start,
            key_start=key_starts(layout.seq_lens),
            seq_lens=layout.seq_lens,
            tables=self._pages.tables(layout.block_tables),
            page_size=self._pages.page_size,
            max_query=max_query,
            max_keys=max_keys,
            query_lens=None if is_static else layout.query_lens_list,
            key_lens=None if is_static else layout.seq_lens_list,
        )
        return StartedStep(layout.slot_mapping, self._kernel.start(step))


def key_starts(seq_lens: torch.Tensor) -> torch.Tensor:
    """int32 [N] -> int32 [N + 1], the sums before each and of all."""
    sums = torch.cumsum(seq_lens, dim=0, dtype=torch.int32)
    return torch.nn.functional.pad(sums, (1, 0))
