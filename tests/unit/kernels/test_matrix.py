"""Packed products of every variant against torch, and that a row's bits do not depend on its neighbours."""

import ctypes

import pytest
import torch

from engine_service.worker.kernels.library import KernelLibrary, NumberType, ThreadTeam

_DTYPES = [torch.float32, torch.bfloat16]
_SHAPES = [(1, 1, 1), (2, 33, 5), (3, 31, 16), (5, 64, 63), (12, 32, 64), (13, 96, 130), (25, 50, 257), (70, 100, 48)]


class Matrix:
    """A packed weight."""

    def __init__(self, weight: torch.Tensor, team: ThreadTeam, *, four_bit: bool = False) -> None:
        self._library, self._team = team.library, team
        self._outputs, columns = weight.shape
        kind = (NumberType.of(weight.dtype), four_bit)
        self._handle = self._library.create(
            "matrix_create", *kind, weight.data_ptr(), self._outputs, columns, team.handle
        )

    @classmethod
    def of_codes(cls, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, team: ThreadTeam) -> "Matrix":
        made = cls.__new__(cls)
        made._library, made._team, made._outputs = team.library, team, len(codes)
        pointers = [part.data_ptr() for part in (codes, scales, zeros)]
        made._handle = team.library.create("matrix_of_codes", *pointers, *codes.shape, team.handle)
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


def _quantized(weight: torch.Tensor) -> torch.Tensor:
    """What four bits keep of a bf16 matrix: groups of 32, scale in half precision, nearest of 16 values."""
    groups = weight.float().view(len(weight), -1, 32)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((high - low) / 15).half().float()
    steps = ((groups - low) / scale.clamp(min=1e-30)).round().clamp(0, 15)
    return (low + scale * steps).view_as(weight)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 1, 32), (2, 33, 64), (5, 64, 96), (6, 31, 320), (23, 100, 160)]
)
def test_four_bit_product(team: ThreadTeam, rows: int, outputs: int, inputs: int) -> None:
    weight = _random(outputs, inputs).bfloat16()
    weight[0] = 0.25
    weight[-1] *= 1e-5
    act = _random(rows, inputs, seed=1).bfloat16().float()
    matrix = Matrix(weight, team, four_bit=True)
    kept = _quantized(weight).double()
    bound = 2e-5 * (act.double().abs() @ kept.abs().T) + 1e-30
    assert ((matrix(act).double() - act.double() @ kept.T).abs() <= bound).all()
    matrix.close()


def test_four_bits_lose_nothing_of_a_grid(team: ThreadTeam) -> None:
    """Weights that already lie on 16 steps per group come back exactly."""
    steps = torch.randint(0, 16, (64, 96), generator=torch.Generator().manual_seed(2)).float()
    steps.view(64, -1, 32)[..., 0], steps.view(64, -1, 32)[..., 1] = 0, 15
    weight = ((steps - 8) / 64).bfloat16()
    matrix = Matrix(weight, team, four_bit=True)
    act = torch.eye(96)
    assert torch.equal(matrix(act).T, weight.float())
    matrix.close()


def test_four_bit_rows_have_the_bits_of_a_row_alone(team: ThreadTeam) -> None:
    matrix = Matrix(_random(70, 160).bfloat16(), team, four_bit=True)
    act = _random(40, 160, seed=1)
    alone = torch.cat([matrix(act[i : i + 1]) for i in range(40)])
    for rows in range(1, 41):
        assert torch.equal(matrix(act[:rows]), alone[:rows]), rows
    matrix.close()


def _codes(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes with scales in half precision and zeros of 0..16, for each 32 inputs."""
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 17, (outputs, inputs // 32), generator=generator).float()
    scales = (torch.rand(outputs, inputs // 32, generator=generator) / 64).half().float()
    return codes, scales, zeros


def _meant(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    groups = codes.float().view(len(codes), -1, 32)
    return ((groups - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)).view(codes.shape)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (33, 64), (64, 96), (70, 320)])
def test_codes_are_kept_exactly(team: ThreadTeam, outputs: int, inputs: int) -> None:
    """A row of ones and zeros reads a weight: scale and zero lose nothing."""
    parts = _codes(outputs, inputs)
    matrix = Matrix.of_codes(*parts, team)
    assert torch.equal(matrix(torch.eye(inputs)).T, _meant(*parts))
    matrix.close()


@pytest.mark.parametrize("rows", [1, 5, 23])
def test_product_with_codes(team: ThreadTeam, rows: int) -> None:
    parts = _codes(100, 160)
    act = _random(rows, 160, seed=1).bfloat16().float()
    matrix = Matrix.of_codes(*parts, team)
    kept = _meant(*parts).double()
    largest = parts[1].repeat_interleave(32, 1).double() * 16
    bound = 2e-5 * (act.double().abs() @ largest.T)
    got = matrix(act)
    assert ((got.double() - act.double() @ kept.T).abs() <= bound).all()
    assert torch.equal(torch.cat([matrix(act[i : i + 1]) for i in range(rows)]), got)
    matrix.close()
