"""The Triton kernel against the reference, on a device, or, with TRITON_INTERPRET=1 and triton installed, on a CPU."""

import os

import pytest
import torch

from engine_service.worker.attention import KvGeometry, LayerShape
from engine_service.worker.cuda.kernel import KernelStep
from engine_service.worker.cuda.pages import Pages
from engine_service.worker.cuda.self_test import find_fault
from engine_service.worker.cuda.varlen import VarlenGatherKernel, find_varlen

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") else "cuda")
SMALL = LayerShape(4, 2, 16, 16, 0.25)
SHAPES = {
    "small": SMALL,
    "window": LayerShape(6, 2, 24, 24, 0.3, sliding_window=37),
    "llama": LayerShape(32, 8, 128, 128, 128**-0.5),
    "no groups": LayerShape(3, 3, 64, 64, 0.125),
}


class Chunks:
    """Where there is no device, the gathering part is a stand-in."""

    @staticmethod
    def kernel() -> VarlenGatherKernel:
        if DEVICE.type == "cpu":
            from tests.fixtures.fake_varlen import api_of, varlen

            return VarlenGatherKernel(api_of(varlen))
        api = find_varlen()
        assert api is not None
        return VarlenGatherKernel(api)


@pytest.mark.parametrize("splits", [None, 1, 4, 32])
@pytest.mark.parametrize("size", [16, 48, 256])
@pytest.mark.parametrize("name", SHAPES)
def test_it_attends_as_the_reference(name: str, size: int, splits: int | None) -> None:
    from engine_service.worker.cuda.paged_decode import PagedDecodeKernel
    from engine_service.worker.cuda.triton_decode import attend_decodes

    # The interpreter multiplies the bits of bfloat16 as integers.
    dtype = torch.float16 if DEVICE.type == "cpu" else torch.bfloat16
    kernel = PagedDecodeKernel(attend_decodes, Chunks.kernel(), processors=64, splits=splits)
    assert find_fault(kernel, KvGeometry((SHAPES[name],), size, dtype, DEVICE), Pages(size, size)) is None


def test_padding_rows_of_one_token_are_attended_too() -> None:
    """As graphs pad: every row but the first reads one slot of one spare block."""
    from engine_service.worker.cuda.triton_decode import attend_decodes

    pool = torch.randn(4, 16, 2, 16, device=DEVICE, dtype=torch.float16)
    query = torch.randn(8, 4, 16, device=DEVICE, dtype=torch.float16)
    lens = torch.tensor([20] + [1] * 7, dtype=torch.int32, device=DEVICE)
    tables = torch.tensor([[0, 1]] + [[3, 9_999]] * 7, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(9, dtype=torch.int32, device=DEVICE)
    step = KernelStep(torch.zeros(8, device=DEVICE), starts, starts, lens, tables, 16, 1, 32, None, None)
    out = attend_decodes(query, pool, pool, step, SMALL, 4)
    assert torch.equal(out[1:], pool[3, 0].repeat_interleave(2, 0).expand(7, 4, 16))
