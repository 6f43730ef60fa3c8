"""The attention backends by name; the one place that knows them all.

Must not know: the model, plans.
"""

from collections.abc import Mapping
from types import MappingProxyType

from engine_service.worker.attention import AttentionKind
from engine_service.worker.config import Device
from engine_service.worker.torch_attention import TorchAttentionKind

AUTO = "auto"

ATTENTION_KINDS: Mapping[str, AttentionKind] = MappingProxyType({"torch": TorchAttentionKind()})
_PREFERRED: Mapping[Device, str] = MappingProxyType({Device.CPU: "torch", Device.CUDA: "torch"})


def resolve_attention(name: str, device: Device) -> tuple[str, AttentionKind]:
    """The backend's name and kind; "auto" is the best for the device. ValueError for one that cannot be."""
    resolved = _PREFERRED[device] if name == AUTO else name
    kind = ATTENTION_KINDS.get(resolved)
    if kind is None:
        known = ", ".join([AUTO, *sorted(ATTENTION_KINDS)])
        raise ValueError(f"attention_backend {name!r} is not known; choose one of: {known}")
    if device not in kind.devices:
        raise ValueError(f"attention_backend {resolved!r} does not run on device {device.value}")
    return resolved, kind
