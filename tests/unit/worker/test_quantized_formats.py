"""Every file format unpacked equals weights computed number by number, and bad tensors are named with their numbers."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.worker.quantized.formats import read_matrix
from engine_service.worker.quantized.scheme import Layout, Scheme
from tests.fixtures import quantized as write

_SIZES = st.integers(1, 5)


@st.composite
def _cases(draw: st.DrawFn) -> tuple[np.random.Generator, int, int, int]:
    """Generator, outputs (a multiple of 8), inputs and group size; the last group may be a part."""
    outputs, inputs = 8 * draw(_SIZES), 8 * draw(_SIZES)
    group_size = draw(st.sampled_from([inputs, 8, 16, 24]))
    return np.random.default_rng(draw(st.integers(0, 999))), outputs, inputs, min(group_size, inputs)


def _same(parts: write.Tensors, scheme: Scheme, codes: write.Codes) -> None:
    assert torch.equal(read_matrix(parts, scheme).dequantised(), codes.weight())


@settings(max_examples=25, deadline=None)
@given(_cases(), st.sampled_from([4, 8]), st.sampled_from([1, 2]), st.booleans())
def test_gptq(case: tuple[Any, ...], bits: int, version: int, shuffled: bool) -> None:
    rng, outputs, inputs, size = case
    codes = write.random_codes(rng, outputs, inputs, size, bits=bits, shuffled=shuffled)
    scheme = Scheme(Layout.GPTQ, bits, None if size == inputs else size, zero_offset=2 - version)
    _same(write.gptq(codes, bits, version), scheme, codes)


@settings(max_examples=25, deadline=None)
@given(_cases())
def test_awq(case: tuple[Any, ...]) -> None:
    rng, outputs, inputs, size = case
    codes = write.random_codes(rng, outputs, inputs, size)
    _same(write.awq(codes), Scheme(Layout.AWQ, 4, size), codes)


@settings(max_examples=25, deadline=None)
@given(_cases(), st.sampled_from([4, 8]), st.booleans(), st.booleans(), st.integers(0, 7))
def test_pack_quantized(case: tuple[Any, ...], bits: int, symmetric: bool, shuffled: bool, missing: int) -> None:
    """Also of sizes that do not fill whole words."""
    rng, outputs, inputs, size = case
    codes = write.random_codes(
        rng,
        outputs - missing,
        inputs - missing,
        min(size, inputs - missing),
        bits=bits,
        symmetric=symmetric,
        shuffled=shuffled,
    )
    parts = write.pack_quantized(codes, bits, symmetric=symmetric, indexed=shuffled)
    _same(parts, Scheme(Layout.PACKED, bits, min(size, inputs - missing), is_symmetric=symmetric), codes)


@settings(max_examples=25, deadline=None)
@given(_cases(), st.booleans())
def test_int_quantized(case: tuple[Any, ...], symmetric: bool) -> None:
    rng, outputs, inputs, size = case
    codes = write.random_codes(rng, outputs, inputs, size, bits=8, symmetric=symmetric)
    parts = write.int_quantized(codes, symmetric=symmetric)
    _same(parts, Scheme(Layout.INTEGERS, 8, size, is_symmetric=symmetric), codes)


def test_a_zero_of_sixteen_in_the_first_gptq_format() -> None:
    """Stored zeros are one less, so all sixteen are used."""
    codes = write.random_codes(np.random.default_rng(0), 8, 8, 8)
    codes = write.Codes(codes.codes, codes.scales, np.full((8, 1), 16), codes.group_of)
    _same(write.gptq(codes), Scheme(Layout.GPTQ, 4, 8, zero_offset=1), codes)


_GPTQ = Scheme(Layout.GPTQ, 4, 8, zero_offset=1)
_PACKED = Scheme(Layout.PACKED, 4, 8)


@pytest.mark.parametrize(
    ("scheme", "part", "tensor", "said"),
    [
        (_GPTQ, "qweight", torch.zeros(2, 8), "qweight has to be a matrix of int32, not 2 x 8 of float32"),
        (_GPTQ, "qweight", torch.zeros(0, 8, dtype=torch.int32), "matrix of int32, not 0 x 8 of int32"),
        (_GPTQ, "qweight", torch.zeros(2, 9, dtype=torch.int32), "qweight has 9 outputs"),
        (_GPTQ, "scales", torch.zeros(3, 8), "scales has to be 2 x 8, not 3 x 8 of float32"),
        (_GPTQ, "qzeros", torch.zeros(2, 2, dtype=torch.int32), "qzeros has to be 2 x 1, not 2 x 2 of int32"),
        (_GPTQ, "g_idx", torch.full((16,), 2), "g_idx names groups 2 to 2, but there are 2"),
        (_GPTQ, "g_idx", torch.zeros(4), "g_idx has to be 16, not 4 of float32"),
        (_GPTQ, "qzeros", None, "qzeros is missing"),
        (
            _PACKED,
            "weight_shape",
            torch.tensor([8, 16, 1]),
            r"weight_shape has to be two positive numbers, not \[8, 16, 1\]",
        ),
        (_PACKED, "weight_shape", torch.tensor([8, 30]), "weight_packed has to be 8 x 4, not 8 x 2 of int32"),
        (_PACKED, "weight_zero_point", None, "weight_zero_point is missing"),
        (Scheme(Layout.INTEGERS, 8, 8), "weight", torch.zeros(8, 16), "matrix of int8, not 8 x 16 of float32"),
        (Scheme(Layout.AWQ, 4, 5), "group", torch.zeros(1), "scales has to be 4 x 8, not 2 x 8 of float16"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(scheme: Scheme, part: str, tensor: torch.Tensor | None, said: str) -> None:
    codes = write.random_codes(np.random.default_rng(0), 8, 16, 8, bits=scheme.bits)
    pack = {Layout.GPTQ: write.gptq, Layout.AWQ: write.awq, Layout.PACKED: write.pack_quantized}
    parts = pack.get(scheme.layout, write.int_quantized)(codes)
    parts.pop(part, None)
    if tensor is not None:
        parts[part] = tensor
    with pytest.raises(ValueError, match=said):
        read_matrix(parts, scheme)
