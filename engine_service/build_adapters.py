"""Builds what keeps an engine's LoRA adapters, with those of the start in it. Part of `build_engine`.

Must not know: requests, gRPC.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine_service.engine_config import LoraConfig
from engine_service.loop.adapter_desk import AdapterDesk
from engine_service.loop.adapter_shelf import AdapterShelf
from engine_service.loop.mailbox import EngineMailbox
from engine_service.loop.worker_protocol import Worker as LoopWorker


def build_adapters(lora: LoraConfig, worker: LoopWorker, mailbox: EngineMailbox) -> AdapterDesk | None:
    """With the adapters of the start in it. Raises ValueError for one that cannot be served."""
    if not lora.max_resident:
        return None
    from engine_service.worker.threaded import ThreadedWorker
    from engine_service.worker.worker import Worker

    assert isinstance(worker, Worker | ThreadedWorker)
    reader = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    def read(folder: str) -> "Future[Any]":
        return reader.submit(worker.read_adapter, Path(folder))

    desk = AdapterDesk(AdapterShelf(worker, lora.max_resident), read, mailbox.wake)
    for name, folder in lora.named:
        try:
            desk.add(name, folder, worker.read_adapter(Path(folder)))
        except ValueError as error:
            raise ValueError(f"--lora {name}: {error}") from error
    return desk
