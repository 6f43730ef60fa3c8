"""Packed weights of the cuda backend: what they mean, the memory they take, and what happens without a kernel."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from engine_service.worker.cuda import packed_choice
from engine_service.worker.cuda.linear import PlainLinear, SideBySide
from engine_service.worker.cuda.packed_choice import choose_products, find_fault
from engine_service.worker.cuda.packed_linear import PackedLinear, Scratch, TorchProducts
from engine_service.worker.cuda.packed_matrix import (
    PackedMatrix,
    pack_matrix,
    quantise,
    run_of,
    unpack_into,
    unpacked_codes,
)
from engine_service.worker.cuda.packed_source import PackedLinears, packing_refusal
from engine_service.worker.cuda.weight_source import WeightSource
from engine_service.worker.quantized.coded_matrix import CodedMatrix
from engine_service.worker.quantized.scheme import Layout, Scheme

CPU = torch.device("cpu")
BITS = st.sampled_from([4, 8])
SIZES = st.integers(1, 12).map(lambda count: 16 * count)


def random_codes(outputs: int, inputs: int, group_size: int, bits: int, seed: int = 0) -> CodedMatrix:
    generator = torch.Generator().manual_seed(seed)
    groups = -(-inputs // group_size)
    codes = torch.randint(0, 2**bits, (outputs, inputs), generator=generator).to(torch.uint8)
    scales = torch.rand(outputs, groups, generator=generator).half().float()
    return CodedMatrix(codes, scales, torch.randint(0, 2**bits, (outputs, groups)).float(), group_size)


def unpacked(matrix: PackedMatrix) -> torch.Tensor:
    out = torch.full((matrix.outputs, matrix.inputs), float("nan"))
    unpack_into(matrix, out)
    return out


@settings(max_examples=60, deadline=None)
@given(BITS, st.integers(1, 9), st.integers(1, 300), SIZES)
def test_unpacking_gives_the_weights_that_codes_mean(bits: int, outputs: int, inputs: int, group_size: int) -> None:
    coded = random_codes(outputs, inputs, group_size, bits)
    assert torch.equal(unpacked(pack_matrix(coded, bits)), coded.dequantised())


@settings(max_examples=60, deadline=None)
@given(BITS, st.integers(1, 200), SIZES)
def test_a_run_of_a_block_is_neighbours_of_one_group(bits: int, inputs: int, group_size: int) -> None:
    """What the kernel relies on: one scale and one zero for what it takes at once."""
    coded = random_codes(2, inputs, group_size, bits)
    matrix = pack_matrix(coded, bits)
    firsts = torch.arange(0, inputs, matrix.run)
    lasts = (firsts + matrix.run - 1).clamp(max=inputs - 1)
    assert torch.equal(firsts // matrix.group_size, lasts // matrix.group_size)
    codes = unpacked_codes(matrix.codes, bits, matrix.run)
    assert torch.equal(codes[:, :inputs], coded.codes)
    assert not codes[:, inputs:].any()
    assert codes.shape[1] % (matrix.run * 8 // bits) == 0


@settings(max_examples=60, deadline=None)
@given(BITS, st.integers(1, 5), st.integers(1, 200), st.sampled_from([32, 128]), st.floats(1e-4, 1e3))
def test_quantized_weights_are_half_a_step_off_at_most(
    bits: int, outputs: int, inputs: int, group_size: int, size: float
) -> None:
    """And what rounding the zero to half precision adds."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(inputs)) * size
    coded = quantise(weight, bits, group_size)
    step = coded.scales[:, coded.groups]
    assert ((coded.dequantised() - weight).abs() <= (0.5 + 2**bits * 2**-11) * step + 1e-6 * weight.abs()).all()
    least = (weight.abs().amax() * 2 / (2**bits - 1)) * 1.001 + 2**-24
    assert (step <= least).all()


@pytest.mark.parametrize("value", [0.0, 3.0, -0.25, 1e-9])
def test_groups_of_equal_weights_stay_finite(value: float) -> None:
    weight = torch.full((2, 64), value)
    assert (quantise(weight, 4, 32).dequantised() - weight).abs().max() <= 1e-3 * abs(value) + 1e-6


def test_a_matrix_takes_the_memory_of_its_bits() -> None:
    weight = torch.randn(64, 256)
    four, eight = (pack_matrix(quantise(weight, bits, 32), bits) for bits in (4, 8))
    groups = 64 * 8 * (2 + 2)  # scale and zero in half precision
    assert (four.nbytes, eight.nbytes) == (64 * 128 + groups, 64 * 256 + groups)


def test_scales_that_half_precision_cannot_hold_are_kept_whole() -> None:
    coded = random_codes(4, 64, 32, 4)
    coded.scales.fill_(1.0 + 2**-20)
    matrix = pack_matrix(coded, 4)
    assert matrix.scales.dtype is torch.float32
    coded.scales.fill_(2.0**-40)
    assert pack_matrix(coded, 4).scales.dtype is torch.bfloat16


@pytest.mark.parametrize(("size", "run"), [(128, 64), (96, 32), (16, 16), (48, 16), (24, None), (8, None)])
def test_which_groups_can_be_kept(size: int, run: int | None) -> None:
    assert run_of(size) == run
    reason = packing_refusal(Scheme(Layout.GPTQ, 4, size), 4)
    assert reason == (None if run else f"the checkpoint's group_size {size} is no multiple of 16")


def test_bits_that_are_not_those_of_the_checkpoint_are_refused() -> None:
    reason = packing_refusal(Scheme(Layout.GPTQ, 8, 64), 4)
    assert reason == "the checkpoint's weights have 8 bits (gptq, 8 bits, groups of 64)"
    assert packing_refusal(Scheme(Layout.GPTQ, 8, None), 8) is None


class Counting(TorchProducts):
    """A kernel for up to three rows, in torch."""

    name = "counting"
    most_rows = 3

    def __init__(self, error: float = 0.0, fails: str | None = None) -> None:
        self.products = 0
        self._error = error
        self._fails = fails

    def multiply(self, inputs: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
        self.products += 1
        if self._fails is not None:
            raise RuntimeError(self._fails)
        weight = unpacked(matrix) * (1 + self._error)
        return functional.linear(inputs.float(), weight, None if bias is None else bias.float()).to(inputs.dtype)


def test_few_rows_go_to_the_kernel_and_many_through_the_unpacked_matrix() -> None:
    """One place for all matrices; the order of inputs and the bias count both ways."""
    weights = {name: torch.randn(rows, 40) for name, rows in {"a": 24, "b": 8, "c": 16}.items()}
    products, scratch = Counting(), Scratch(torch.float32, CPU)
    make = PackedLinears(4, products, scratch)
    source = WeightSource(weights, torch.float32, CPU)
    bias = torch.randn(32)
    joined, single = make(source, {"a": 24, "b": 8}, 40, bias), make(source, {"c": 16}, 40, None)
    assert isinstance(joined, PackedLinear)
    assert scratch.nbytes == 32 * 40 * 4
    whole = torch.cat([quantise(weights[name], 4, 32).dequantised() for name in ("a", "b")])
    alone = quantise(weights["c"], 4, 32).dequantised()
    order = torch.randperm(40)
    turned = PackedLinear(joined.matrix, order, bias, products, scratch)
    for rows in (1, 3, 4, 50):
        inputs = torch.randn(rows, 40)
        torch.testing.assert_close(joined(inputs), functional.linear(inputs, whole, bias))
        torch.testing.assert_close(single(inputs), functional.linear(inputs, alone))
        torch.testing.assert_close(turned(inputs), functional.linear(inputs[:, order], whole, bias))
    assert products.products == 6
    assert scratch.nbytes == 32 * 40 * 4


def test_outputs_side_by_side() -> None:
    parts = [PlainLinear(torch.randn(rows, 8), torch.randn(rows)) for rows in (3, 5)]
    both = SideBySide(parts)
    inputs = torch.randn(2, 8)
    assert torch.equal(both(inputs), torch.cat([part(inputs) for part in parts], dim=1))
    assert both.nbytes == 8 * 8 * 4


def test_a_matrix_of_another_shape_is_refused() -> None:
    source = WeightSource({"a": torch.zeros(3, 40)}, torch.float32, CPU)
    with pytest.raises(ValueError, match="weights a are 3 x 40, not 4 x 40"):
        PackedLinears(4, TorchProducts(), Scratch(torch.float32, CPU))(source, {"a": 4}, 40, None)


@pytest.mark.parametrize("group_size", [32, None])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_sound_kernel_passes_its_test(bits: int, group_size: int | None) -> None:
    assert find_fault(Counting(), CPU, torch.bfloat16, bits, group_size) is None


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (Counting(error=0.1), "its product of 1 rows differs from the reference by 0."),
        (Counting(error=float("nan")), "differs from the reference by nan"),
        (Counting(fails="no such instruction\nline 2"), "RuntimeError: no such instruction"),
    ],
)
def test_a_faulty_kernel_is_found(kernel: Counting, said: str) -> None:
    fault = find_fault(kernel, CPU, torch.bfloat16, 4, 64)
    assert fault is not None
    assert said in fault
    assert "line 2" not in fault


def test_without_a_kernel_every_product_unpacks_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed_choice, "has_triton", lambda: False)
    cases = {
        (CPU, torch.bfloat16): "the kernel needs a CUDA device, not cpu",
        (torch.device("cuda"), torch.float32): "the kernel has no products in float32",
        (torch.device("cuda"), torch.float16): "triton is not installed",
    }
    for (device, dtype), said in cases.items():
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert choose_products(device, dtype, 4, 32).most_rows == 0
        assert f"packed weights are unpacked before each product, which is slow: {said}" in caplog.text
