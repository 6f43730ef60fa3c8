"""Kernels over torch's varlen attention, in all its versions, against the reference; and which one is chosen."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from engine_service.worker.attention import KvGeometry, LayerShape
from engine_service.worker.cuda.choice import Choice, PassedOver, candidates, choose_kernel
from engine_service.worker.cuda.dense import DenseKernel
from engine_service.worker.cuda.kernel import Attend, AttentionKernel, KernelStep
from engine_service.worker.cuda.pages import PageRule, Pages
from engine_service.worker.cuda.self_test import find_fault
from engine_service.worker.cuda.varlen import VarlenGatherKernel, VarlenPagedKernel, find_varlen, group_lengths
from tests.fixtures.fake_varlen import (
    api_of,
    varlen,
    varlen_of_2_10,
    varlen_out,
    varlen_out_forgetful,
    varlen_without_paging,
)

CPU = torch.device("cpu")
GROUPED = LayerShape(4, 2, 16, 16, 0.25)
WINDOW = LayerShape(4, 2, 16, 16, 0.25, sliding_window=20)
LAYERS = (GROUPED, WINDOW, GROUPED)
NEW, OLD = api_of(varlen, varlen_out), api_of(varlen_without_paging)


def fault_of(kernel: AttentionKernel, layers: tuple[LayerShape, ...] = LAYERS, size: int | None = None) -> str | None:
    block_size = size or kernel.default_block_size
    page_size = kernel.pages.page_size(block_size)
    assert page_size is not None
    return find_fault(kernel, KvGeometry(layers, block_size, torch.bfloat16, CPU), Pages(block_size, page_size))


@pytest.mark.parametrize(
    ("kernel", "size"),
    [
        (VarlenPagedKernel(NEW, fills=True), 256),
        (VarlenPagedKernel(NEW, fills=False), 512),
        (VarlenPagedKernel(NEW, fills=True, splits=1), 256),
        (VarlenGatherKernel(NEW), 16),
        (VarlenGatherKernel(OLD), 48),
        (DenseKernel(), 64),
    ],
    ids=[
        "paged",
        "paged by a function that fills nothing",
        "paged in one piece",
        "gathered",
        "gathered by 2.10",
        "dense",
    ],
)
def test_a_sound_kernel_passes(kernel: AttentionKernel, size: int) -> None:
    assert kernel.refusal(LAYERS, torch.bfloat16) is None
    assert fault_of(kernel, size=size) is None


def test_a_torch_without_scale_and_window_serves_what_needs_neither() -> None:
    kernel = VarlenGatherKernel(api_of(varlen_of_2_10))
    assert kernel.refusal((GROUPED,), torch.float16) is None
    assert fault_of(kernel, (GROUPED,)) is None
    assert "sliding window" in str(kernel.refusal((WINDOW,), torch.float16))
    assert "scale by 0.3" in str(kernel.refusal((LayerShape(4, 2, 16, 16, 0.3),), torch.float16))


def test_what_is_not_filled_is_found() -> None:
    fault = fault_of(VarlenPagedKernel(api_of(varlen, varlen_out_forgetful), fills=True))
    assert fault is not None
    assert fault.startswith("its attention of one token each differs from the reference by ")


def refusing_pages(*places: Any, block_table: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    raise RuntimeError("Paged KV cache is not supported\nException raised from mha_varlen_fwd")


def without_gqa(*places: Any, **options: Any) -> torch.Tensor:
    return varlen(*places, **options | {"enable_gqa": False})


def not_aligned(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *places: Any, **options: Any
) -> torch.Tensor:
    """Causal from the front: wrong for chunks that are not a whole prompt."""
    return varlen(query, key, value, *places, **options | {"window_size": (0, 0)})


@pytest.mark.parametrize(
    ("attend", "said"),
    [
        (refusing_pages, "Paged KV cache is not supported"),
        (without_gqa, "heads differ"),
        (not_aligned, "differs from the reference"),
    ],
)
def test_faults_of_a_device_are_told_in_one_line(attend: Callable[..., Any], said: str) -> None:
    api = api_of(varlen)
    fault = fault_of(VarlenPagedKernel(type(api)(attend, None, api.arguments), fills=False))
    assert fault is not None
    assert said in fault
    assert "\n" not in fault


@pytest.mark.parametrize(
    ("kernel", "layer", "dtype", "said"),
    [
        (VarlenPagedKernel(OLD, False), GROUPED, torch.bfloat16, "has no block tables"),
        (VarlenPagedKernel(api_of(varlen), True), GROUPED, torch.bfloat16, "has no varlen_attn_out"),
        (VarlenPagedKernel(NEW, False), GROUPED, torch.float32, "not in torch.float32"),
        (VarlenGatherKernel(OLD, splits=1), GROUPED, torch.bfloat16, "batch invariance"),
        (VarlenGatherKernel(NEW), LayerShape(4, 2, 20, 20, 1.0), torch.bfloat16, "heads of 20"),
        (VarlenGatherKernel(NEW), LayerShape(4, 2, 264, 264, 1.0), torch.bfloat16, "heads of 264"),
        (VarlenGatherKernel(NEW), LayerShape(4, 2, 16, 8, 1.0), torch.bfloat16, "keys have 16 numbers and values 8"),
        (VarlenGatherKernel(NEW), LayerShape(4, 2, 16, 16, 1.0, softcap=3.0), torch.bfloat16, "soft-capped"),
    ],
)
def test_refusals(kernel: AttentionKernel, layer: LayerShape, dtype: torch.dtype, said: str) -> None:
    assert said in str(kernel.refusal((GROUPED, layer), dtype))


class Named:
    """A kernel of which only the choice is tested."""

    default_block_size = 16
    is_static = True

    def __init__(self, name: str, multiple: int = 1, refuses: str | None = None) -> None:
        self.name = name
        self.pages = PageRule(multiple)
        self._refuses = refuses

    def refusal(self, layers: Sequence[LayerShape], dtype: torch.dtype) -> str | None:
        return self._refuses

    def start(self, step: KernelStep) -> Attend:
        raise AssertionError


def test_the_first_that_neither_refuses_nor_fails_is_chosen() -> None:
    kernels = [
        Named("refuses", refuses="it will not"),
        Named("wide", 256),
        Named("faulty"),
        Named("sound"),
        Named("last"),
    ]
    faults = {"faulty": "wrong by 1"}
    choice = choose_kernel(
        kernels, LAYERS, torch.bfloat16, CPU, 48, lambda kernel, geometry, pages: faults.get(kernel.name)
    )
    assert isinstance(choice, Choice)
    assert (choice.kernel.name, choice.pages) == ("sound", Pages(48, 48))
    assert choice.passed_over == (
        PassedOver("refuses", "it will not"),
        PassedOver("wide", "blocks of 48 tokens are no whole pages of 256"),
        PassedOver("faulty", "wrong by 1"),
    )


def test_when_none_fits_every_reason_is_told() -> None:
    assert choose_kernel(
        [Named("a", refuses="no"), Named("b")], LAYERS, torch.bfloat16, CPU, None, lambda *_: "broken"
    ) == (PassedOver("a", "no"), PassedOver("b", "broken"))


def test_on_a_device_paging_comes_before_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without touching the device, as Triton's kernel would; this torch has varlen attention with block tables."""
    monkeypatch.setattr("engine_service.worker.cuda.choice.has_triton", lambda: False)
    assert find_varlen() is not None
    names = [kernel.name for kernel in candidates(torch.device("cuda"), batch_invariant=True)]
    assert names == ["varlen paged, filled", "varlen paged", "varlen gather"]


@pytest.mark.parametrize(
    ("lengths", "most", "groups"),
    [
        ([3, 3, 3], 6, [(0, 2), (2, 3)]),
        ([9, 1, 1], 6, [(0, 1), (1, 3)]),
        ([1, 9, 1], 6, [(0, 1), (1, 2), (2, 3)]),
        ([6], 6, [(0, 1)]),
    ],
)
def test_groups_of_gathered_requests(lengths: list[int], most: int, groups: list[tuple[int, int]]) -> None:
    assert list(group_lengths(lengths, most)) == groups


def test_gathering_in_several_groups_equals_gathering_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_service.worker.cuda.varlen.GATHERED_TOKENS", 300)
    assert fault_of(VarlenGatherKernel(NEW)) is None
