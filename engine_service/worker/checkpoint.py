"""A checkpoint folder: its configuration, its end-of-sequence ids and its tensors, read one at a time.

Must not know: what the model computes, the device, requests.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

_INDEX = "model.safetensors.index.json"
_NAMED_KEYS = 5
_LARGEST_ID = 2**31 - 1


class UnsupportedModelError(ValueError):
    """The checkpoint cannot be served; the message says why."""


class Checkpoint(Mapping[str, torch.Tensor]):
    """Name -> tensor of a folder's safetensors files. Keeps no tensor; remembers which ones were read."""

    def __init__(self, folder: Path) -> None:
        """ValueError, in plain words, for files that cannot be read."""
        try:
            self._files = {file.name: safe_open(file, "pt") for file in _weight_files(folder)}
            self._file_of = {name: file for file, opened in self._files.items() for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(f"the model's weights cannot be read: {error}") from error
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[self._file_of[name]].get_tensor(name)
        self._read.add(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    @property
    def never_read(self) -> list[str]:
        """Tensors of the checkpoint that nobody asked for, sorted."""
        return sorted(self._file_of.keys() - self._read)


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _INDEX).is_file():
        named: dict[str, str] = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        return [folder / Path(name).name for name in sorted(set(named.values()))]
    return sorted(folder.glob("*.safetensors"))


def check_files(folder: Path) -> None:
    """ValueError for a folder without a configuration or without safetensors weights."""
    if not (folder / "config.json").is_file():
        raise ValueError("the model folder has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise ValueError("the model folder has no .safetensors file; other weight formats are not loaded")


def read_config(folder: Path) -> Any:
    """The transformers configuration of a folder that has one and safetensors weights. ValueError otherwise."""
    from transformers import AutoConfig  # takes seconds, which most models' start need not pay

    check_files(folder)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModelError(f"the model's config.json is not understood: {error}") from error


def read_eos_token_ids(folder: Path, text_config: Any) -> tuple[int, ...]:
    """The ids that end a text: of generation_config.json if it names any, else of the configuration.

    Raises ValueError for a file that is no JSON object, and for what is no token id.
    """
    found = _read_generation_config(folder / "generation_config.json").get("eos_token_id")
    if found is None:
        found = getattr(text_config, "eos_token_id", None)
    if found is None:
        return ()
    ids = found if isinstance(found, list) else [found]
    for token in ids:
        if type(token) is not int or abs(token) > _LARGEST_ID:
            raise ValueError(f"the model's eos_token_id {token!r:.40} is no token id")
    return tuple(ids)


def _read_generation_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # also an integer of more digits than Python reads
        found = None
    if not isinstance(found, dict):
        raise ValueError("the model's generation_config.json cannot be read: it has to be a JSON object")
    return found


def max_positions(text_config: Any) -> int:
    """The longest context the model was made for, tokens."""
    positions = getattr(text_config, "max_position_embeddings", None)
    if positions is None:
        raise UnsupportedModelError("the model's config.json does not give max_position_embeddings")
    return int(positions)


def refuse_keys(kind: str, names: list[str]) -> None:
    """ValueError that counts and names some of the tensors that are `kind` (missing, unexpected, mismatched)."""
    if names:
        shown = ", ".join(names[:_NAMED_KEYS]) + (", ..." if len(names) > _NAMED_KEYS else "")
        raise ValueError(f"the checkpoint has {len(names)} {kind} keys: {shown}")
