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


def _cuda() -> Backend:
    from engine_service.worker.cuda.backend import CudaBackend

    return CudaBackend()


# Made when chosen: importing what a backend needs takes seconds.
BACKENDS: Mapping[str, Callable[[], Backend]] = MappingProxyType({"torch": _torch, "cpu": _cpu, "cuda": _cuda})
# The one that can compute a share of a model.
_SPLITS = "torch"
_PREFERRED: Mapping[Device, str] = MappingProxyType({Device.CPU: "cpu", Device.CUDA: "cuda"})


def resolve_backend(name: str, device: Device, tensor_parallel_size: int = 1) -> Backend:
    """ "auto" is the best for the device. ValueError for one that is unknown or does not run there."""
    preferred = _PREFERRED[device] if tensor_parallel_size == 1 else _SPLITS
    resolved = preferred if name == AUTO else name
    if resolved != _SPLITS and resolved in BACKENDS and tensor_parallel_size > 1:
        raise ValueError(
            f"backend {resolved!r} computes a whole model: with tensor_parallel_size {tensor_parallel_size} "
            f"the backend must be {_SPLITS!r} or {AUTO!r}"
        )
    make = BACKENDS.get(resolved)
    if make is None:
        raise ValueError(f"backend {name!r} is not known; choose one of: {', '.join([AUTO, *sorted(BACKENDS)])}")
    backend = make()
    if device not in backend.devices:
        raise ValueError(f"backend {resolved!r} does not run on device {device.value}")
    return backend
