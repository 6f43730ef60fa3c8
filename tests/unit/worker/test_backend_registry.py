"""Backends are chosen by name, or as the best for the device."""

import pytest

from engine_service.worker.backend_registry import BACKENDS, resolve_backend
from engine_service.worker.config import Device


@pytest.mark.parametrize("device", Device)
def test_auto_resolves_to_a_backend_of_the_device(device: Device) -> None:
    assert device in resolve_backend("auto", device).devices


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_runs_somewhere(name: str) -> None:
    assert any(device in BACKENDS[name]().devices for device in Device)


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'flash9' is not known; choose one of: auto, cpu, cuda, torch"):
        resolve_backend("flash9", Device.CPU)


def test_a_backend_of_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="'cpu' does not run on device cuda"):
        resolve_backend("cpu", Device.CUDA)
