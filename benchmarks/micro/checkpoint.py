"""The tensors of a safetensors checkpoint, read one at a time.

Must not know: models, kernels.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open


class LazyCheckpoint(Mapping[str, torch.Tensor]):
    """Name -> tensor of a local folder, one file or several with an index; nothing is kept."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            names: dict[str, str] = json.loads(index.read_text())["weight_map"]
            self._files = {name: folder / file for name, file in names.items()}
            return
        file = folder / "model.safetensors"
        with safe_open(file, "pt") as opened:
            self._files = dict.fromkeys(opened.keys(), file)

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self._files[name], "pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
