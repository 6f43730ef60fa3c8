"""Our reader of config.json gives what transformers gives, or nothing."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from engine_service.worker.kernels.decoder_shape import decoder_shape, rotary_tables
from engine_service.worker.plain_config import PlainConfig, read_plain_config
from tests.fixtures.checkpoints import write_hist

_SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# As hub files of the families say it; the first four in the words of older versions of transformers.
_FILES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 10000.0, "rope_scaling": None, "torch_dtype": "float16"},
    "mistral": {"model_type": "mistral", "rope_theta": 1000000.0, "sliding_window": 128, "torch_dtype": "bfloat16"},
    "qwen2": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "rope_theta": 1000000,
        "use_sliding_window": False,
        "sliding_window": 128,
        "max_window_layers": 2,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "qwen3": {
        "model_type": "qwen3",
        "head_dim": 32,
        "rope_theta": 1000000,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 3,
    },
    "qwen2 with windows": {
        "model_type": "qwen2",
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 1,
        "eos_token_id": [2, 7],
        "dtype": "float32",
    },
    "mistral without a window": {"model_type": "mistral", "rope_theta": 1e6, "sliding_window": None, "head_dim": 24},
    "llama without tokens": {"model_type": "llama", "rope_theta": 500000.0, "bos_token_id": None, "eos_token_id": None},
}


def _write(folder: Path, content: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def _assert_equal(plain: PlainConfig, theirs: Any) -> None:
    for field in fields(plain):
        expected = getattr(theirs, field.name, False if field.name == "mlp_bias" else None)
        if field.name == "head_dim" and expected is None:
            expected = theirs.hidden_size // theirs.num_attention_heads
        assert getattr(plain, field.name) == expected, field.name
    assert decoder_shape(plain) == decoder_shape(theirs)
    for ours, reference in zip(rotary_tables(plain, 40), rotary_tables(theirs, 40), strict=True):
        assert torch.equal(ours, reference)


@pytest.mark.parametrize("name", _FILES)
def test_a_plain_file_reads_as_transformers_reads_it(tmp_path: Path, name: str) -> None:
    folder = _write(tmp_path, _SIZES | _FILES[name])
    plain = read_plain_config(folder)
    assert plain is not None
    _assert_equal(plain, AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize("config_class", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_what_transformers_writes_is_read_alike(tmp_path: Path, config_class: Any) -> None:
    config_class(**_SIZES, dtype="bfloat16").save_pretrained(tmp_path)
    plain = read_plain_config(tmp_path)
    assert plain is not None
    _assert_equal(plain, AutoConfig.from_pretrained(tmp_path))


_ODD_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 600),
    st.floats(0.0, 1e6),
    st.sampled_from(["", "gelu", "bfloat16", "llama", "qwen3", "gemma2"]),
    st.lists(st.sampled_from(["full_attention", "sliding_attention", "chunked_attention"]), max_size=4),
    st.lists(st.integers(0, 9), max_size=3),
    st.dictionaries(
        st.sampled_from(["rope_type", "type", "rope_theta", "factor", "partial_rotary_factor"]),
        st.sampled_from(["default", "linear", "yarn", 0.5, 2.0, 10000.0]),
        max_size=3,
    ),
)
_NAMES = sorted(
    {
        *_SIZES,
        *(name for content in _FILES.values() for name in content),
        *("layer_types", "mlp_bias", "partial_rotary_factor"),
    }
)
_DROPPED = object()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    base=st.sampled_from(sorted(_FILES)),
    changes=st.dictionaries(st.sampled_from(_NAMES), _ODD_VALUES | st.just(_DROPPED), max_size=2),
)
def test_a_changed_file_reads_as_transformers_reads_it_or_not_at_all(
    tmp_path: Path, base: str, changes: dict[str, Any]
) -> None:
    changed = _SIZES | _FILES[base] | changes
    folder = _write(tmp_path, {name: value for name, value in changed.items() if value is not _DROPPED})
    plain = read_plain_config(folder)
    if plain is not None:
        _assert_equal(plain, AutoConfig.from_pretrained(folder))


def test_a_scaled_rope_and_other_families_are_left_to_transformers(tmp_path: Path) -> None:
    scaled = {"rope_type": "linear", "factor": 2.0}
    assert read_plain_config(_write(tmp_path, _SIZES | _FILES["llama"] | {"rope_scaling": scaled})) is None
    assert read_plain_config(_write(tmp_path, _SIZES | _FILES["llama"] | {"model_type": "gemma2"})) is None


_BUILD = """
import sys
from pathlib import Path
from engine_service.worker.config import WorkerConfig
from engine_service.worker.build import build_worker
print(build_worker(WorkerConfig(Path(sys.argv[1]), num_blocks=4)).info.backend)
print("transformers" in sys.modules)
"""


def test_a_fused_model_is_built_without_importing_transformers(tmp_path: Path) -> None:
    folder = write_hist(tmp_path, tokenizer=False)
    run = subprocess.run([sys.executable, "-c", _BUILD, str(folder)], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["cpu", "False"]
