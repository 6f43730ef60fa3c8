"""LoRA adapters of random numbers for any model: to measure with, or to try what operators do without one trained.

`python -m benchmarks.serving.random_adapters FOLDER NAME... [--model MODEL] [--rank 16]` writes a folder for each name.
They change every projection of every layer. Must not know: services, requests.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder

_PROJECTION = re.compile(r"model\.layers\.\d+\..*\.(\w+_proj)\.weight")
# Enough to change what is said, too little to drown the model's own words.
_SIZE = 0.02


def write_adapter(folder: Path, model: Path, rank: int, seed: int) -> None:
    """In PEFT's format: A is (rank, in), B is (out, rank) of each projection."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    targets: set[str] = set()
    for module, name, rows, columns in _projections(model):
        targets.add(name)
        for part, shape in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
            numbers = torch.randn(shape, generator=generator) * _SIZE
            tensors[f"base_model.model.{module}.{part}.weight"] = numbers
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": sorted(targets)}, indent=1))


def _projections(model: Path) -> Iterator[tuple[str, str, int, int]]:
    """Module, the last part of its name, outputs and inputs."""
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for key in sorted(tensors.keys()):
                found = _PROJECTION.fullmatch(key)
                if found is not None:
                    rows, columns = tensors.get_slice(key).get_shape()
                    yield key.removesuffix(".weight"), found[1], rows, columns


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args(arguments)
    model = resolve_model_folder(options.model)
    for seed, name in enumerate(options.names, 1):
        write_adapter(options.folder / name, model, options.rank, seed)


if __name__ == "__main__":
    main(sys.argv[1:])
