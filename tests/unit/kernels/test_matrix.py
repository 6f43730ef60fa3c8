"""Packed products of every variant against torch, and that a row's bits do not depend on its neighbours."""

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_service.worker.config import WeightFormat
from engine_service.worker.kernels.cpu_model import codes_struct
from engine_service.worker.kernels.library import KernelLibrary, NumberType, ThreadTeam
from engine_service.worker.kernels.weight_formats import format_number

_DTYPES = [torch.float32, torch.bfloat16]
_SHAPES = [(1, 1, 1), (2, 33, 5), (3, 31, 16), (5, 64, 63), (12, 32, 64), (13, 96, 130), (25, 50, 257), (70, 100, 48)]


Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Matrix:
    """A packed weight."""

    def __init__(
        self, weight: torch.Tensor, team: ThreadTeam, weight_format: WeightFormat = WeightFormat.PLAIN
    ) -> None:
        self._library, self._team = team.library, team
        self._outputs, columns = weight.shape
        kind = (NumberType.of(weight.dtype), format_number(weight_format))
        self._handle = self._library.create(
            "matrix_create", *kind, weight.data_ptr(), self._outputs, columns, team.handle
        )

    @classmethod
    def of_codes(cls, parts: "Parts", team: ThreadTeam, weight_format: WeightFormat) -> "Matrix":
        made = cls.__new__(cls)
        made._library, made._team, made._outputs = team.library, team, len(parts[0])
        codes, number = codes_struct(*parts), format_number(weight_format)
        made._handle = team.library.create("matrix_of_codes", number, ctypes.byref(codes), team.handle)
        return made

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.contiguous()
        out = torch.full((len(rows), self._outputs), float("nan"))
        pointers = (rows.data_ptr(), len(rows), rows.shape[1], out.data_ptr(), self._team.handle)
        self._library.checked("matrix_multiply", ctypes.c_void_p(self._handle), *pointers)
        return out

    def close(self) -> None:
        self._library.call("matrix_destroy", self._handle)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), _SHAPES)
def test_product(team: ThreadTeam, dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> None:
    weight = _random(outputs, inputs).to(dtype)
    act = _random(rows, inputs, seed=1).to(dtype).float()
    matrix = Matrix(weight, team)
    expected = act.double() @ weight.double().T
    # Float sums of exact products: the bound grows with the sum of magnitudes.
    bound = 1e-6 * (act.double().abs() @ weight.double().abs().T) + 1e-30
    assert ((matrix(act).double() - expected).abs() <= bound).all()
    matrix.close()


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_every_number_of_rows_gives_the_bits_of_a_row_alone(team: ThreadTeam, dtype: torch.dtype) -> None:
    matrix = Matrix(_random(70, 150).to(dtype), team)
    act = _random(70, 150, seed=1)
    alone = torch.cat([matrix(act[i : i + 1]) for i in range(70)])
    for rows in range(1, 71):
        assert torch.equal(matrix(act[:rows]), alone[:rows]), rows
    matrix.close()


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_threads_do_not_change_bits(library: KernelLibrary, dtype: torch.dtype, rows: int) -> None:
    weight, act = _random(500, 64).to(dtype), _random(rows, 64, seed=1)
    results = []
    for threads in (1, 2, 5):
        with ThreadTeam(library, threads) as team:
            matrix = Matrix(weight, team)
            results.append(matrix(act))
            matrix.close()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


INT4, INT8 = WeightFormat.INT4, WeightFormat.INT8


def _rounded(weight: torch.Tensor, largest: int, factor: float) -> torch.Tensor:
    """What few bits keep of a bf16 matrix: groups of 32, `factor` times the scale in half precision, nearest of
    `largest` + 1 values between the least and the largest."""
    groups = weight.float().view(len(weight), -1, 32)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((high - low) / largest * factor).half().float() / factor
    steps = ((groups - low) / scale.clamp(min=1e-30)).round().clamp(0, largest)
    return (low + scale * steps).view_as(weight)


_KEPT = {INT4: (15, 1.0), INT8: (255, 256.0)}


@pytest.mark.parametrize("weight_format", _KEPT, ids=lambda kept: kept.value)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 1, 32), (2, 33, 64), (5, 64, 96), (6, 31, 320), (23, 100, 160), (35, 40, 64)]
)
def test_product_in_few_bits(
    team: ThreadTeam, weight_format: WeightFormat, rows: int, outputs: int, inputs: int
) -> None:
    weight = _random(outputs, inputs).bfloat16()
    weight[0] = 0.25
    weight[outputs // 2] = 0.0
    weight[-1] *= 1e-5
    act = _random(rows, inputs, seed=1).bfloat16().float()
    matrix = Matrix(weight, team, weight_format)
    kept = _rounded(weight, *_KEPT[weight_format]).double()
    bound = 2e-5 * (act.double().abs() @ kept.abs().T) + 1e-30
    assert ((matrix(act).double() - act.double() @ kept.T).abs() <= bound).all()
    matrix.close()


@pytest.mark.parametrize(("weight_format", "last", "most"), [(INT4, 15, 0.0), (INT8, 255, 0.0), (INT8, 15, 2**-11)])
def test_nothing_of_a_grid_is_lost(team: ThreadTeam, weight_format: WeightFormat, last: int, most: float) -> None:
    """Weights that lie on so many steps per group as the format has come back exactly; those on 16 steps come back from
    eight bits as exactly as half precision holds a seventeenth of a step."""
    steps = torch.randint(0, last + 1, (64, 96), generator=torch.Generator().manual_seed(2)).float()
    steps.view(64, -1, 32)[..., 0], steps.view(64, -1, 32)[..., 1] = 0, last
    weight = ((steps - (last + 1) / 2) / (4 * last + 4)).bfloat16()
    matrix = Matrix(weight, team, weight_format)
    assert (matrix(torch.eye(96)).T - weight.float()).abs().max() <= most / 4
    matrix.close()


def test_eight_bits_lose_a_fifteenth_of_four(team: ThreadTeam) -> None:
    """256 values where there were 16, also where weights are small."""
    weight = _random(64, 320).bfloat16() * torch.logspace(-4, 0, 64).unsqueeze(1)
    errors = []
    for weight_format in (INT4, INT8):
        matrix = Matrix(weight.bfloat16(), team, weight_format)
        got = matrix(torch.eye(320)).T
        errors.append(((got - weight.bfloat16()).norm(dim=1) / weight.norm(dim=1)).max())
        matrix.close()
    assert errors[1] < 0.006
    assert errors[1] * 15 < errors[0]


@pytest.mark.parametrize("weight_format", _KEPT, ids=lambda kept: kept.value)
def test_rows_have_the_bits_of_a_row_alone(team: ThreadTeam, weight_format: WeightFormat) -> None:
    matrix = Matrix(_random(70, 160).bfloat16(), team, weight_format)
    act = _random(40, 160, seed=1)
    alone = torch.cat([matrix(act[i : i + 1]) for i in range(40)])
    for rows in range(1, 41):
        assert torch.equal(matrix(act[:rows]), alone[:rows]), rows
    matrix.close()


@pytest.mark.parametrize("weight_format", _KEPT, ids=lambda kept: kept.value)
def test_threads_do_not_change_bits_of_few_bits(library: KernelLibrary, weight_format: WeightFormat) -> None:
    weight, act = _random(500, 64).bfloat16(), _random(40, 64, seed=1)
    results = []
    for threads in (1, 2, 5):
        with ThreadTeam(library, threads) as team:
            matrix = Matrix(weight, team, weight_format)
            results.append(matrix(act))
            matrix.close()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def _codes(outputs: int, inputs: int, bits: int = 4, group: int = 32, *, symmetric: bool = False) -> Parts:
    """Codes with scales in half precision and zeros of 0..16 (eight bits: 0..256), for each group of inputs."""
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 2**bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 2**bits + 1, (outputs, inputs // group), generator=generator).float()
    if symmetric:
        zeros[:] = 2 ** (bits - 1)
    scales = (torch.rand(outputs, inputs // group, generator=generator) / 64).half().float()
    return codes, scales, zeros


def _meant(parts: Parts) -> torch.Tensor:
    codes, scales, zeros = parts
    groups = codes.float().view(*scales.shape, -1)
    return ((groups - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)).view(codes.shape)


_SIZES = [(1, 32), (33, 64), (64, 96), (70, 320)]


@pytest.mark.parametrize(("outputs", "inputs"), _SIZES)
def test_codes_are_kept_exactly(team: ThreadTeam, outputs: int, inputs: int) -> None:
    """A row of ones and zeros reads a weight: scale and zero lose nothing."""
    parts = _codes(outputs, inputs)
    matrix = Matrix.of_codes(parts, team, INT4)
    assert torch.equal(matrix(torch.eye(inputs)).T, _meant(parts))
    matrix.close()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), _SIZES)
def test_codes_of_eight_bits_are_kept_exactly(team: ThreadTeam, outputs: int, inputs: int, symmetric: bool) -> None:
    for group in {32, inputs, inputs // 2 if inputs % 64 == 0 else inputs}:
        parts = _codes(outputs, inputs, 8, group, symmetric=symmetric)
        matrix = Matrix.of_codes(parts, team, INT8)
        assert torch.equal(matrix(torch.eye(inputs)).T, _meant(parts)), group
        matrix.close()


@pytest.mark.parametrize(
    ("weight_format", "bits", "group"), [(INT4, 4, 32), (INT8, 8, 32), (INT8, 8, 160), (INT8, 8, 320)]
)
@pytest.mark.parametrize("rows", [1, 5, 23])
def test_product_with_codes(team: ThreadTeam, rows: int, weight_format: WeightFormat, bits: int, group: int) -> None:
    parts = _codes(100, 320, bits, group)
    act = _random(rows, 320, seed=1).bfloat16().float()
    matrix = Matrix.of_codes(parts, team, weight_format)
    largest = parts[1].repeat_interleave(group, 1).double() * 2**bits
    bound = 2e-5 * (act.double().abs() @ largest.T)
    got = matrix(act)
    assert ((got.double() - act.double() @ _meant(parts).double().T).abs() <= bound).all()
    assert torch.equal(torch.cat([matrix(act[i : i + 1]) for i in range(rows)]), got)
    matrix.close()


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_codes_come_back(best_team: ThreadTeam, data: st.DataObject) -> None:
    """Packing: every code, scale and zero of any size and grouping is read where it was put."""
    group = 32 * data.draw(st.integers(1, 4), "pieces of a group")
    outputs, inputs = data.draw(st.integers(1, 70), "outputs"), group * data.draw(st.integers(1, 4), "groups")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    codes = torch.from_numpy(rng.integers(0, 256, (outputs, inputs), dtype=np.uint8))
    zeros = torch.from_numpy(rng.integers(0, 257, (outputs, inputs // group)).astype(np.float32))
    if data.draw(st.booleans(), "symmetric"):
        zeros = torch.full_like(zeros, 128.0)
    scales = torch.from_numpy(rng.uniform(0.0, 2.0, zeros.shape).astype(np.float16).astype(np.float32))
    matrix = Matrix.of_codes((codes, scales, zeros), best_team, INT8)
    assert torch.equal(matrix(torch.eye(inputs)).T, _meant((codes, scales, zeros)))
    matrix.close()


@pytest.mark.parametrize(
    ("weight_format", "parts"),
    [
        (INT4, _codes(4, 64, 4, 64)),
        (INT8, _codes(4, 48, 8, 16)),
        (WeightFormat.PLAIN, _codes(4, 64)),
    ],
)
def test_codes_that_a_format_cannot_hold_are_refused(
    best_team: ThreadTeam, weight_format: WeightFormat, parts: Parts
) -> None:
    with pytest.raises(ValueError, match="the format cannot hold such codes"):
        Matrix.of_codes(parts, best_team, weight_format)


def test_inputs_that_fill_no_group_are_refused(best_team: ThreadTeam) -> None:
    with pytest.raises(ValueError, match="the columns are no multiple of 32"):
        Matrix(_random(4, 40).bfloat16(), best_team, INT8)
