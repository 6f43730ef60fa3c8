"""Keeps what was read from the model's folder, and reads off the event loop, once for each engine process.

Must not know: gRPC, what the files mean.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from engine_service.api.vllm_compat.model_files import (
    ModelFacts,
    TokenizerBundle,
    bundle_tokenizer,
    load_tokenizer,
    read_facts,
)
from engine_service.loop.messages import EngineInfo

_T = TypeVar("_T")


class ModelCache:
    """One reader at a time; the others wait for what it finds."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._epoch = ""
        self._found: dict[Callable[[Path], Any], Any] = {}

    async def facts(self, info: EngineInfo) -> ModelFacts:
        return await self._read(info, read_facts)

    async def tokenizer(self, info: EngineInfo) -> Tokenizer | None:
        return await self._read(info, load_tokenizer)

    async def bundle(self, info: EngineInfo) -> TokenizerBundle | None:
        """Raises BundleTooLarge."""
        return await self._read(info, bundle_tokenizer)

    async def _read(self, info: EngineInfo, read: Callable[[Path], _T]) -> _T:
        async with self._lock:
            if info.epoch != self._epoch:
                self._epoch, self._found = info.epoch, {}
            if read not in self._found:
                self._found[read] = await asyncio.to_thread(read, Path(info.model_folder))
            found: _T = self._found[read]
            return found
