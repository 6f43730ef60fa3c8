"""What multiplies packed weights on this device: the Triton kernel where it does what unpacking does, else unpacking.

Asked before anything is served, on random numbers. Must not know: a kernel's insides, layers, checkpoints.
"""

import logging

import torch
from torch.nn import functional

from engine_service.worker.cuda.packed_linear import PackedProducts, TorchProducts
from engine_service.worker.cuda.packed_matrix import PackedMatrix, pack_matrix, unpack_into
from engine_service.worker.cuda.paged_decode import has_triton
from engine_service.worker.quantized.coded_matrix import CodedMatrix

_LOG = logging.getLogger(__name__)
_TOLERANCES = {torch.bfloat16: 0.01, torch.float16: 0.002}
_OUTPUTS = 100  # no multiple of a kernel's tile
_GROUPS = 5


def choose_products(device: torch.device, dtype: torch.dtype, bits: int, group_size: int | None) -> PackedProducts:
    """For matrices with that many bits and inputs of a group (None: all inputs)."""
    reason = _refusal(device, dtype)
    if reason is None:
        from engine_service.worker.cuda.triton_packed import TritonProducts

        kernel = TritonProducts(torch.cuda.get_device_properties(device).multi_processor_count)
        reason = find_fault(kernel, device, dtype, bits, group_size)
        if reason is None:
            return kernel
    _LOG.warning("packed weights are unpacked before each product, which is slow: %s", reason)
    return TorchProducts()


def _refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"the kernel needs a CUDA device, not {device.type}"
    if dtype not in _TOLERANCES:
        return f"the kernel has no products in {str(dtype).removeprefix('torch.')}"
    return None if has_triton() else "triton is not installed"


def find_fault(
    products: PackedProducts, device: torch.device, dtype: torch.dtype, bits: int, group_size: int | None
) -> str | None:
    """None for products that are those of the unpacked matrix, else what is wrong with them, in one line."""
    try:
        # Few inputs: one share of them; many: several that are summed afterwards.
        for inputs in ((group_size or 96) * _GROUPS, 2048):
            matrix = _random_matrix(device, bits, inputs, group_size)
            fault = _fault_of(products, matrix, dtype)
            if fault is not None:
                return fault
    except Exception as error:  # a kernel's compiler may raise anything, and unpacking always works
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def _fault_of(products: PackedProducts, matrix: PackedMatrix, dtype: torch.dtype) -> str | None:
    weight = torch.empty(matrix.outputs, matrix.inputs, dtype=torch.float32, device=matrix.codes.device)
    unpack_into(matrix, weight)
    unpacked = weight.to(dtype).fill_(float("nan"))
    products.unpack(matrix, unpacked)
    error = _relative_error(unpacked, weight)
    if not error <= _TOLERANCES.get(dtype, 0.01):  # NaN never passes
        return f"its unpacked weights differ from the reference by {error:.3g}"
    generator = torch.Generator(weight.device).manual_seed(2)
    for rows in {1, min(5, products.most_rows), min(17, products.most_rows), products.most_rows}:
        inputs = torch.randn(rows, matrix.inputs, generator=generator, device=weight.device).to(dtype)
        bias = inputs.new_ones(matrix.outputs)
        got = products.multiply(inputs, matrix, bias)
        error = _relative_error(got, functional.linear(inputs.float(), weight, bias.float()))
        if not error <= _TOLERANCES.get(dtype, 0.01):
            return f"its product of {rows} rows differs from the reference by {error:.3g}"
    return None


def _relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest number."""
    return float((got.float() - expected).abs().max() / expected.abs().max())


def _random_matrix(device: torch.device, bits: int, inputs: int, group_size: int | None) -> PackedMatrix:
    generator = torch.Generator(device).manual_seed(1)
    size = group_size or inputs
    groups = -(-inputs // size)

    def draw(least: int, above: int, *shape: int) -> torch.Tensor:
        return torch.randint(least, above, shape, generator=generator, device=device)

    codes = draw(0, 2**bits, _OUTPUTS, inputs).to(torch.uint8)
    scales = draw(50, 100, _OUTPUTS, groups).float() / 1024
    return pack_matrix(CodedMatrix(codes, scales, draw(0, 2**bits, _OUTPUTS, groups).float(), size), bits)
