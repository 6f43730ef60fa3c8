"""A quantized checkpoint that reads like one of plain weights, one matrix at a time.

Must not know: models, devices, what weights are packed into.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from engine_service.worker.checkpoint import Checkpoint
from engine_service.worker.quantized.coded_matrix import CodedMatrix
from engine_service.worker.quantized.formats import PARTS, read_matrix
from engine_service.worker.quantized.scheme import Scheme, read_scheme

_WEIGHT = ".weight"


class QuantizedCheckpoint(Mapping[str, torch.Tensor]):
    """Name -> tensor, matrices dequantised in float32 and then rounded to `dtype`; or `coded`, as they are."""

    def __init__(self, files: Checkpoint, scheme: Scheme, dtype: torch.dtype) -> None:
        self.scheme = scheme
        self._files = files
        self._dtype = dtype
        first = PARTS[scheme.layout][0]
        self._layers = {name.removesuffix(f".{first}") for name in files if name.endswith(f".{first}")}
        self._names = {name: None for name in files if not self._is_part(name)}
        self._names.update(dict.fromkeys(f"{layer}{_WEIGHT}" for layer in sorted(self._layers)))

    def in_dtype(self, dtype: torch.dtype) -> "QuantizedCheckpoint":
        """The same files, read as `dtype`."""
        return QuantizedCheckpoint(self._files, self.scheme, dtype)

    def _is_part(self, name: str) -> bool:
        layer, _, part = name.rpartition(".")
        return layer in self._layers and part in PARTS[self.scheme.layout]

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        coded = self.coded(name)
        return self._files[name] if coded is None else coded.dequantised().to(self._dtype)

    def coded(self, name: str) -> CodedMatrix | None:
        """The codes of the matrix `name`; None for a tensor that is not quantized. ValueError for bad parts."""
        layer = name.removesuffix(_WEIGHT)
        if not name.endswith(_WEIGHT) or layer not in self._layers:
            return None
        found = {part: f"{layer}.{part}" for part in PARTS[self.scheme.layout]}
        parts = {part: self._files[place] for part, place in found.items() if place in self._files}
        try:
            return read_matrix(parts, self.scheme)
        except ValueError as error:
            raise ValueError(f"the quantized weights of {layer} do not fit: {error}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def num_layers(self) -> int:
        """Quantized matrices."""
        return len(self._layers)

    @property
    def never_read(self) -> list[str]:
        """Tensors of the files that nobody asked for, sorted."""
        return self._files.never_read


def open_checkpoint(folder: Path, dtype: torch.dtype) -> Checkpoint | QuantizedCheckpoint:
    """The folder's weights; quantized ones dequantised to `dtype`. ValueError for what cannot be read."""
    scheme = read_scheme(folder)
    files = Checkpoint(folder)
    if scheme is None:
        return files
    checkpoint = QuantizedCheckpoint(files, scheme, dtype)
    if not checkpoint.num_layers:
        first = PARTS[scheme.layout][0]
        raise ValueError(f"config.json says that weights are quantized ({scheme.summary}), but no {first} is there")
    return checkpoint
