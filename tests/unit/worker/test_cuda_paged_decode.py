"""The two parts of a kernel: which requests each gets, and that together they attend as the reference does."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.worker.attention import KvGeometry, LayerShape
from engine_service.worker.cuda.dense import DenseKernel
from engine_service.worker.cuda.kernel import KernelStep
from engine_service.worker.cuda.paged_decode import PagedDecodeKernel, num_splits
from engine_service.worker.cuda.pages import Pages
from engine_service.worker.cuda.self_test import find_fault
from engine_service.worker.cuda.varlen import VarlenGatherKernel
from tests.fixtures.fake_varlen import api_of, varlen

CPU = torch.device("cpu")
SHAPE = LayerShape(4, 2, 16, 16, 0.25, sliding_window=30)


class Decodes:
    """The reference, told as the Triton kernel is; notes how many requests it got and in how many runs."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        step: KernelStep,
        shape: LayerShape,
        splits: int,
    ) -> torch.Tensor:
        count = len(query)
        self.calls.append((count, splits))
        starts = torch.arange(count + 1, dtype=torch.int32)
        alone = KernelStep(
            torch.zeros(count),
            starts,
            starts,
            step.seq_lens[:count],
            step.tables[:count],
            step.page_size,
            1,
            0,
            None,
            None,
        )
        return DenseKernel().start(alone)(query, keys, values, shape)


def kernel_of(decodes: Decodes, splits: int | None = None) -> PagedDecodeKernel:
    return PagedDecodeKernel(decodes, VarlenGatherKernel(api_of(varlen)), processors=16, splits=splits)


@pytest.mark.parametrize("size", [16, 48])
def test_decodes_and_chunks_are_attended_apart(size: int) -> None:
    decodes = Decodes()
    geometry = KvGeometry((SHAPE,), size, torch.bfloat16, CPU)
    assert find_fault(kernel_of(decodes), geometry, Pages(size, size)) is None
    assert decodes.calls == [(4, 4), (2, 8)], "four alone, then two before the chunks"


def test_a_fixed_number_of_runs() -> None:
    decodes = Decodes()
    geometry = KvGeometry((SHAPE,), 16, torch.bfloat16, CPU)
    assert find_fault(kernel_of(decodes, splits=1), geometry, Pages(16, 16)) is None
    assert {splits for _, splits in decodes.calls} == {1}


def test_refusals_are_those_of_the_other_part() -> None:
    assert "soft-capped" in str(
        kernel_of(Decodes()).refusal((LayerShape(4, 2, 16, 16, 1.0, softcap=2.0),), torch.bfloat16)
    )


@settings(deadline=None)
@given(programs=st.integers(1, 5000), processors=st.integers(1, 200))
def test_runs_fill_the_device_without_more_than_it_needs(programs: int, processors: int) -> None:
    splits = num_splits(programs, processors)
    assert splits in (1, 2, 4, 8, 16, 32)
    assert splits == 1 or programs * splits <= 2 * processors
    assert splits == 32 or programs * splits * 2 > 2 * processors
