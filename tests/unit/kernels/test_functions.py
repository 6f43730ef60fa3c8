"""The vector functions of every variant against torch."""

import pytest
import torch

from engine_service.worker.kernels.library import KernelLibrary

_EXP2, _SILU, _BF16 = 0, 1, 2
_SPECIALS = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-30, -1e-30, 3e38, -3e38, 6e4, 0.5, 2.5, -2.5])


def _map(library: KernelLibrary, function: int, values: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(values)
    library.call("map", function, values.data_ptr(), values.numel(), out.data_ptr())
    return out


def _numbers(scale: float) -> torch.Tensor:
    return torch.randn(4099, generator=torch.Generator().manual_seed(1)) * scale


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_exp2_is_close_everywhere(library: KernelLibrary, scale: float) -> None:
    values = _numbers(scale).clamp(-125, 126)
    expected = torch.exp2(values.double())
    error = (_map(library, _EXP2, values).double() / expected - 1).abs()
    assert error.max() < 3e-7


def test_exp2_at_the_edges(library: KernelLibrary) -> None:
    values = torch.tensor([0.0, -0.0, -float("inf"), -127.0, -1e30, 1.0, -1.0, 10.0, float("nan")])
    got = _map(library, _EXP2, values)
    assert got[:-1].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 2.0, 0.5, 1024.0]
    assert got[-1].isnan()


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0, 1000.0])
def test_silu(library: KernelLibrary, scale: float) -> None:
    values = _numbers(scale)
    expected = torch.nn.functional.silu(values.double()).float()
    torch.testing.assert_close(_map(library, _SILU, values), expected, rtol=1e-5, atol=1e-30)


def test_silu_of_nan_is_nan(library: KernelLibrary) -> None:
    assert _map(library, _SILU, torch.full((17,), float("nan"))).isnan().all()


def test_bf16_rounds_to_nearest_even_as_torch(library: KernelLibrary) -> None:
    values = torch.cat([_numbers(1.0), _numbers(1e5), _SPECIALS, torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])])
    got = _map(library, _BF16, values)
    assert torch.equal(got, values.bfloat16().float())
    assert _map(library, _BF16, torch.tensor([float("nan")])).isnan().all()
