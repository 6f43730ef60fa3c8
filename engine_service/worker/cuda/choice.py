"""Which attention kernel serves a model on this device: the first that neither refuses nor fails its test.

Must not know: a kernel's insides, graphs, requests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine_service.worker.attention import KvGeometry, LayerShape
from engine_service.worker.cuda.dense import DenseKernel
from engine_service.worker.cuda.kernel import AttentionKernel
from engine_service.worker.cuda.paged_decode import PagedDecodeKernel, has_triton
from engine_service.worker.cuda.pages import Pages
from engine_service.worker.cuda.varlen import VarlenApi, VarlenGatherKernel, VarlenPagedKernel, find_varlen

FindFault = Callable[[AttentionKernel, KvGeometry, Pages], str | None]


@dataclass(frozen=True, slots=True)
class PassedOver:
    kernel: str
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel, the blocks it will have, and those that were preferred to it, with why not."""

    kernel: AttentionKernel
    pages: Pages
    passed_over: tuple[PassedOver, ...]


def candidates(device: torch.device, *, batch_invariant: bool) -> list[AttentionKernel]:
    """Best first. Where there is no CUDA device only the reference can be asked."""
    if device.type != "cuda":
        return [DenseKernel()]
    found: list[AttentionKernel] = []
    splits = 1 if batch_invariant else None
    varlen = find_varlen()
    if varlen is not None:
        found += [VarlenPagedKernel(varlen, fills=True, splits=splits), VarlenPagedKernel(varlen, False, splits)]
        if has_triton():
            found.append(_with_triton(varlen, device, splits))
        found.append(VarlenGatherKernel(varlen, splits))
    return found


def _with_triton(varlen: VarlenApi, device: torch.device, splits: int | None) -> AttentionKernel:
    from engine_service.worker.cuda.triton_decode import attend_decodes

    processors = torch.cuda.get_device_properties(device).multi_processor_count
    # What is promised of batches is promised of decodes: chunks may be split.
    return PagedDecodeKernel(attend_decodes, VarlenGatherKernel(varlen), processors, splits)


def choose_kernel(
    kernels: Sequence[AttentionKernel],
    layers: tuple[LayerShape, ...],
    dtype: torch.dtype,
    device: torch.device,
    block_size: int | None,
    find_fault: FindFault,
) -> Choice | tuple[PassedOver, ...]:
    """With a `block_size` that was asked for, only kernels that can read such blocks. None fits: why, for each."""
    passed: list[PassedOver] = []
    for kernel in kernels:
        size = block_size or kernel.default_block_size
        page_size = kernel.pages.page_size(size)
        reason = kernel.refusal(layers, dtype)
        if reason is None and page_size is None:
            reason = f"blocks of {size} tokens are no whole pages of {kernel.pages.multiple}"
        if reason is None and page_size is not None:
            pages = Pages(size, page_size)
            reason = find_fault(kernel, KvGeometry(layers, size, dtype, device), pages)
            if reason is None:
                return Choice(kernel, pages, tuple(passed))
        passed.append(PassedOver(kernel.name, reason or "no reason"))
    return tuple(passed)
