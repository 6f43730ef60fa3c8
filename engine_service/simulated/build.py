"""Builds the simulated worker from a model folder (its config.json alone: no weights) and a step model.

Must not know: torch, transformers, the scheduler.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_service.simulated.step_model import StepModel
from engine_service.simulated.worker import SimulatedWorker
from engine_service.worker.config import WorkerConfig, WorkerInfo
from engine_service.worker.pool_size import size_pool

_BLOCK_SIZE = 32
_KV_BYTES_PER_NUMBER = 2
_PREFILL_PER_DECODE = 4


@dataclass(frozen=True, slots=True)
class BuiltWorker:
    worker: SimulatedWorker
    info: WorkerInfo


def build_simulated_worker(config: WorkerConfig, step_model: Path) -> BuiltWorker:
    """ValueError, in plain words, for what cannot work."""
    model = StepModel.load(step_model)
    described = _read_config(config.model_folder)
    vocab_size, max_positions = _number(described, "vocab_size"), _number(described, "max_position_embeddings")
    eos = _eos_token_ids(config.model_folder, described)
    if vocab_size <= len(eos):
        raise ValueError(f"the model's vocabulary of {vocab_size} tokens has nothing but end-of-sequence ids")
    block_size = config.block_size or _BLOCK_SIZE
    block_bytes = block_size * _kv_bytes_per_token(described)
    size = size_pool(config, max_positions, block_size, block_bytes, free_bytes=0)
    info = WorkerInfo(
        vocab_size=vocab_size,
        max_model_len=size.max_model_len,
        eos_token_ids=eos,
        architecture=str((described.get("architectures") or ["unknown"])[0]),
        dtype="bfloat16",
        backend="simulated",
        block_size=block_size,
        num_blocks=size.num_blocks,
        kv_bytes_per_block=block_bytes,
        prefill_per_decode=_PREFILL_PER_DECODE,
    )
    worker = SimulatedWorker(
        model, vocab_size=vocab_size, eos_token_ids=frozenset(eos), clock=time.monotonic, sleep=time.sleep
    )
    return BuiltWorker(worker, info)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError("the model folder has no config.json that can be read") from error
    if not isinstance(described, dict):
        raise ValueError("the model's config.json is not an object")
    inner = described.get("text_config")
    return described | inner if isinstance(inner, dict) else described


def _number(described: dict[str, Any], name: str) -> int:
    value = described.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise ValueError(f"the model's config.json gives no usable {name}")
    return value


def _eos_token_ids(folder: Path, described: dict[str, Any]) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    found = generation.get("eos_token_id", described.get("eos_token_id"))
    if found is None:
        return ()
    return tuple(int(token) for token in found) if isinstance(found, list) else (int(found),)


def _kv_bytes_per_token(described: dict[str, Any]) -> int:
    """Key and value of every layer, in 16 bits."""
    layers, heads = _number(described, "num_hidden_layers"), _number(described, "num_attention_heads")
    kv_heads = int(described.get("num_key_value_heads") or heads)
    width = int(described.get("head_dim") or _number(described, "hidden_size") // heads)
    return 2 * layers * kv_heads * width * _KV_BYTES_PER_NUMBER
