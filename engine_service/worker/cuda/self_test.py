"""Does a kernel do on this device, with these heads, what the dense reference does? Asked before it serves anyone.

What cannot be known without the device is found here: whether block tables are taken, whether grouped heads work with
one query token, whether a tensor that was to be filled is. Must not know: which kernel is preferred.
"""

from collections.abc import Sequence

import torch

from engine_service.worker.attention import BatchLayout, KvGeometry, LayerShape
from engine_service.worker.cuda.attention import PagedAttention, StartedStep
from engine_service.worker.cuda.dense import DenseKernel
from engine_service.worker.cuda.kernel import AttentionKernel
from engine_service.worker.cuda.pages import Pages

_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.02, torch.float16: 0.005}
# Pairs (tokens before the chunk, tokens of the chunk): decodes alone, then chunks of all kinds beside decodes.
_DECODES = ((0, 1), (1, 1), (299, 1), (511, 1))
_MIXED = ((17, 1), (512, 1), (0, 40), (130, 7), (256, 65))


def find_fault(kernel: AttentionKernel, geometry: KvGeometry, pages: Pages) -> str | None:
    """None for a kernel that attends as the reference does, else what is wrong with it, in one line."""
    try:
        for shape in dict.fromkeys(geometry.layers):
            for chunks in (_DECODES, _MIXED):
                error = _relative_error(kernel, geometry, pages, shape, chunks)
                if not error <= _TOLERANCES.get(geometry.dtype, 0.02):  # NaN never passes
                    words = "one token each" if chunks is _DECODES else "chunks of several tokens"
                    return f"its attention of {words} differs from the reference by {error:.3g}"
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return f"{error}".strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return None


def _relative_error(
    kernel: AttentionKernel,
    geometry: KvGeometry,
    pages: Pages,
    shape: LayerShape,
    chunks: Sequence[tuple[int, int]],
) -> float:
    """Of random numbers: the largest difference over the largest number."""
    one_layer = KvGeometry((shape,), geometry.block_size, geometry.dtype, geometry.device)
    layout = scattered_layout(chunks, geometry.block_size, geometry.device)
    num_blocks = int(layout.block_tables.max()) + 2
    tested = PagedAttention(kernel, one_layer, pages, num_blocks)
    dense = DenseKernel()
    page_size = dense.pages.page_size(geometry.block_size) or geometry.block_size
    reference = PagedAttention(dense, one_layer, Pages(geometry.block_size, page_size), num_blocks)
    outputs = []
    for attention in (tested, reference):
        generator = torch.Generator(geometry.device).manual_seed(1)
        outputs.append(_attend(attention, layout, shape, geometry, generator, num_blocks))
    got, expected = (output.float() for output in outputs)
    return float((got - expected).abs().max() / expected.abs().max())


def _attend(
    attention: PagedAttention,
    layout: BatchLayout,
    shape: LayerShape,
    geometry: KvGeometry,
    generator: torch.Generator,
    num_blocks: int,
) -> torch.Tensor:
    def random(count: int, heads: int, size: int) -> torch.Tensor:
        return torch.randn(count, heads, size, generator=generator, device=geometry.device, dtype=torch.float32).to(
            geometry.dtype
        )

    step = attention.prepare(layout)
    slots = torch.arange(num_blocks * geometry.block_size, device=geometry.device)
    keys = random(len(slots), shape.num_kv_heads, shape.key_dim)
    values = random(len(slots), shape.num_kv_heads, shape.value_dim)
    attention.write_kv(0, keys, values, StartedStep(slots, step.attend))
    query = random(len(layout.slot_mapping), shape.num_query_heads, shape.key_dim)
    return attention.attend(0, query, step)


def scattered_layout(chunks: Sequence[tuple[int, int]], block_size: int, device: torch.device) -> BatchLayout:
    """Requests (tokens before, tokens now) whose blocks lie in the pool from the last to the first, none shared."""
    counts = [-(-(before + now) // block_size) for before, now in chunks]
    free = iter(range(sum(counts), 0, -1))  # block 0 is nobody's
    tables = [[next(free) for _ in range(count)] for count in counts]
    slots = [
        table[place // block_size] * block_size + place % block_size
        for table, (before, now) in zip(tables, chunks, strict=True)
        for place in range(before, before + now)
    ]
    starts = [0]
    for _, now in chunks:
        starts.append(starts[-1] + now)
    seq_lens = [before + now for before, now in chunks]
    width = max(counts)
    padded = [table + [0] * (width - len(table)) for table in tables]
    return BatchLayout(
        slot_mapping=torch.tensor(slots, device=device),
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_tables=torch.tensor(padded, dtype=torch.int32, device=device),
        query_lens_list=[now for _, now in chunks],
        seq_lens_list=seq_lens,
    )
