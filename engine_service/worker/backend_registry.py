"""The backends by name; the one place that knows them all.

Must not know: the model, plans.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from engine_service.worker.backend import Backend
from engine_service.worker.config import Device

AUTO = "auto"


def _torch() -> Backend:
    from engine_service.worker.torch_backend import TorchBackend

    return TorchBackend()


def _cpu() -> Backend:
    from engine_service.worker.cpu_backend import CpuBackend

    return CpuBackend()


# Made when chosen: importing what a backend needs takes seconds.
BACKENDS: Mapping[str, Callable[[], Backend]] = MappingProxyType({"torch": _torch, "cpu": _cpu})
_PREFERRED: Mapping[Device, str] = MappingProxyType({Device.CPU: "cpu", Device.CUDA: "torch"})


def resolve_backend(name: str, device: Device) -> Backend:
    """ "auto" is the best for the device. ValueError for one that is unknown or does not run there."""
    resolved = _PREFERRED[device] if name == AUTO else name
    make = BACKENDS.get(resolved)
    if make is None:
        raise ValueError(f"backend {name!r} is not known; choose one of: {', '.join([AUTO, *sorted(BACKENDS)])}")
    backend = make()
    if device not in backend.devices:
        raise ValueError(f"backend {resolved!r} does not run on device {device.value}")
    return backend
