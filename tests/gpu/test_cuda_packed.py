"""Triton's products of packed weights against the unpacked ones, on a device, or, with TRITON_INTERPRET=1 and triton
installed, on a CPU."""

import os

import pytest
import torch

from engine_service.worker.cuda.packed_choice import find_fault
from engine_service.worker.cuda.packed_matrix import pack_matrix, quantise, unpack_into

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") else "cuda")
# The interpreter multiplies the bits of bfloat16 as integers.
DTYPES = [torch.float16] if DEVICE.type == "cpu" else [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", [16, 32, 128, None])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_are_those_of_the_unpacked_matrix(bits: int, group_size: int | None, dtype: torch.dtype) -> None:
    from engine_service.worker.cuda.triton_packed import TritonProducts

    assert find_fault(TritonProducts(64), DEVICE, dtype, bits, group_size) is None


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("outputs", "inputs", "group_size"), [(64, 576, 128), (130, 1000, 64), (1, 16, 32), (70, 24, 32)]
)
def test_inputs_need_not_fill_groups_and_tiles(outputs: int, inputs: int, group_size: int, bits: int) -> None:
    """Whatever is in memory behind the inputs must not count."""
    from engine_service.worker.cuda.triton_packed import TritonProducts

    generator = torch.Generator(DEVICE).manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator, device=DEVICE)
    matrix = pack_matrix(quantise(weight, bits, group_size), bits)
    unpack_into(matrix, weight)
    products = TritonProducts(64)
    unpacked = weight.half().fill_(float("nan"))
    products.unpack(matrix, unpacked)
    assert torch.equal(unpacked, weight.half())
    memory = torch.full((4, inputs), float("nan"), device=DEVICE, dtype=torch.float16)
    inputs_ = memory[:3].normal_(generator=generator)
    got = products.multiply(inputs_, matrix, None).float()
    expected = inputs_.float() @ weight.T
    assert (got - expected).abs().max() <= 0.002 * expected.abs().max()


def test_zeros_far_from_the_codes_cost_no_precision() -> None:
    """All weights alike, and large: what codes and zeros add cancels."""
    from engine_service.worker.cuda.triton_packed import TritonProducts

    matrix = pack_matrix(quantise(torch.full((64, 256), 3.0, device=DEVICE), 8, 32), 8)
    inputs = torch.ones(2, 256, device=DEVICE, dtype=torch.float16)
    got = TritonProducts(8).multiply(inputs, matrix, None)
    assert (got.float() - 768.0).abs().max() <= 2.0
