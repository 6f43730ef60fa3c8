"""What LoadAdapter and UnloadAdapter may do: names only, of folders below the one that the operator has set.

Must not know: how the engine runs, what is in an adapter.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from engine_service.api.adapter_calls import AdapterCalls
from engine_service.api.engine_handle import Connection
from engine_service.core.outcome import Refusal, RefusalCode
from engine_service.loop.messages import AdapterState
from service_runtime import statuses
from service_runtime.adapter_names import NAME_RULE, is_adapter_name


@dataclass(frozen=True, slots=True)
class AdapterLoader:
    """`model_name` is what clients call the model itself: no adapter can have it."""

    calls: AdapterCalls
    folder: Path
    model_name: str

    async def load(self, connection: Connection, name: str) -> AdapterState | Refusal:
        refusal = self._check(name) or await self.calls.load(connection.commands, name, str(self.folder / name))
        if refusal is not None:
            return refusal
        found = next((adapter for adapter in connection.adapters if adapter.name == name), None)
        return found or Refusal(RefusalCode.UNKNOWN_ADAPTER, "the adapter was unloaded meanwhile", "name")

    async def unload(self, connection: Connection, name: str) -> Refusal | None:
        return await self.calls.unload(connection.commands, name)

    def _check(self, name: str) -> Refusal | None:
        if not is_adapter_name(name):
            return Refusal(RefusalCode.INVALID, NAME_RULE, "name")
        if name == self.model_name:
            return Refusal(RefusalCode.INVALID, f"{name!r} is the model itself", "name")
        # A link may lead elsewhere below it, but not out of it.
        if not (self.folder / name).resolve().is_relative_to(self.folder.resolve()):
            return Refusal(RefusalCode.INVALID, f"adapter {name!r} does not lie below --lora-dir", "name")
        return None


async def checked_loader(context: "grpc.aio.ServicerContext[Any, Any]", loader: AdapterLoader | None) -> AdapterLoader:
    """Ends the call with PERMISSION_DENIED unless it may change the adapters."""
    if loader is None:
        text = "adapters are not to be changed by a call; this service was started without --allow-lora-rpc"
        await statuses.abort(context, grpc.StatusCode.PERMISSION_DENIED, text)
    return loader
