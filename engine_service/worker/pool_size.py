"""How many blocks the KV pool gets, and how long a request may then be.

Must not know: torch, the model's structure, the layout of a block, requests.
"""

from dataclasses import dataclass

from engine_service.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class PoolSize:
    """`max_model_len` is the limit that holds after the pool was sized."""

    num_blocks: int
    max_model_len: int


def size_pool(config: WorkerConfig, model_max_len: int, block_size: int, block_bytes: int, free_bytes: int) -> PoolSize:
    """Blocks for the budget of the configuration; ValueError with the numbers when it cannot be.

    An explicit `num_blocks` is taken as it is: a request too long for the pool is then refused when it
    comes. Otherwise the pool must hold one request of an explicit `max_model_len`; if that was left open,
    it is lowered to what the pool holds.
    """
    wanted = _wanted_length(config, model_max_len)
    if config.num_blocks is not None:
        return PoolSize(config.num_blocks, wanted)
    budget, source = _budget(config, free_bytes)
    num_blocks = budget // block_bytes
    if num_blocks < 1:
        raise ValueError(f"{source} is less than one KV block of {block_size} tokens ({block_bytes:,} bytes)")
    needed = -(-wanted // block_size)
    if num_blocks >= needed:
        return PoolSize(num_blocks, wanted)
    if config.max_model_len is None:
        return PoolSize(num_blocks, num_blocks * block_size)
    raise ValueError(
        f"max_model_len {wanted:,} needs {needed:,} KV blocks ({needed * block_bytes:,} bytes), but {source} "
        f"holds {num_blocks:,} blocks ({num_blocks * block_size:,} tokens)"
    )


def _wanted_length(config: WorkerConfig, model_max_len: int) -> int:
    if config.max_model_len is None:
        return model_max_len
    if config.max_model_len > model_max_len:
        raise ValueError(f"max_model_len {config.max_model_len:,} exceeds the model's own {model_max_len:,}")
    return config.max_model_len


def _budget(config: WorkerConfig, free_bytes: int) -> tuple[int, str]:
    """Bytes for the pool, and where the number comes from in words."""
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory, f"kv_cache_memory of {config.kv_cache_memory:,} bytes"
    budget = int(free_bytes * config.kv_cache_fraction)
    words = f"kv_cache_fraction {config.kv_cache_fraction} of {free_bytes:,} free bytes ({budget:,} bytes)"
    return budget, words
