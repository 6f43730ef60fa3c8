"""How the KV pool is sized, as a table of budgets and outcomes (B145)."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from engine_service.worker.config import Device, WorkerConfig
from engine_service.worker.memory import free_memory
from engine_service.worker.pool_size import PoolSize, size_pool

BLOCK_SIZE, BLOCK_BYTES, MODEL_LEN, FREE = 16, 1000, 160, 40_000


def sized(**settings: Any) -> PoolSize:
    config = WorkerConfig(model_folder=Path("unused"), **settings)
    return size_pool(config, MODEL_LEN, BLOCK_SIZE, BLOCK_BYTES, FREE)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kv_cache_memory": 12_999}, PoolSize(12, 160)),
        ({"kv_cache_memory": 10_000}, PoolSize(10, 160)),
        ({"kv_cache_memory": 9_999}, PoolSize(9, 144)),
        ({"kv_cache_memory": 1_000}, PoolSize(1, 16)),
        ({"kv_cache_memory": 9_999, "max_model_len": 144}, PoolSize(9, 144)),
        ({"kv_cache_fraction": 0.5}, PoolSize(20, 160)),
        ({"kv_cache_fraction": 0.1}, PoolSize(4, 64)),
        ({"num_blocks": 4}, PoolSize(4, 160)),
        ({"num_blocks": 4, "max_model_len": 150}, PoolSize(4, 150)),
        ({"num_blocks": 3, "kv_cache_memory": 0}, PoolSize(3, 160)),
    ],
    ids=str,
)
def test_sizes(settings: dict[str, Any], expected: PoolSize) -> None:
    assert sized(**settings) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_memory": 0}, r"0 bytes is less than one KV block of 16 tokens \(1,000 bytes\)"),
        ({"kv_cache_memory": 999}, r"999 bytes is less than one KV block"),
        ({"kv_cache_fraction": 0.01}, r"0\.01 of 40,000 free bytes \(400 bytes\) is less than one"),
        (
            {"kv_cache_memory": 9_999, "max_model_len": 145},
            r"145 needs 10 KV blocks \(10,000 bytes\), but .* 9,999 bytes holds 9 blocks \(144 tokens\)",
        ),
        ({"max_model_len": 161}, r"max_model_len 161 exceeds the model's own 160"),
    ],
    ids=str,
)
def test_refusals_carry_the_numbers(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sized(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must be at least 1, not 0"),
        ({"block_size": -1}, "block_size must be at least 1, not -1"),
        ({"kv_cache_fraction": 0.0}, r"kv_cache_fraction must be in \(0, 1\], not 0.0"),
        ({"kv_cache_fraction": 1.5}, "not 1.5"),
        ({"kv_cache_memory": -5}, "is -5"),
        ({"threads": -1}, "is -1"),
    ],
    ids=str,
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sized(**settings)


@pytest.mark.parametrize(
    ("limit", "expected"), [("3000", 2000), ("500", 0), ("max", None), (str(2**60), None), (None, None)]
)
def test_free_host_memory_minds_the_control_group(tmp_path: Path, limit: str | None, expected: int | None) -> None:
    """None: what the host has, which moves while we look."""
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text("1000\n")
    got = free_memory(Device.CPU, tmp_path)
    if expected is None:
        assert 0.5 < got / psutil.virtual_memory().available < 2.0
    else:
        assert got == expected
