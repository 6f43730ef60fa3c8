"""Which sampling defaults a model's generation_config.json gives (B091)."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from engine_service.api.convert import default_sampling_message
from engine_service.core.sampling import NEUTRAL_DEFAULTS, SamplingDefaults
from engine_service.generation_config import read_sampling_defaults
from engine_service.worker.checkpoint import read_eos_token_ids


def read(folder: Path, content: Any) -> tuple[SamplingDefaults, list[str]]:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)
    warnings: list[str] = []
    return read_sampling_defaults(folder, warnings.append), warnings


def test_a_model_without_the_file_is_neutral(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path, pytest.fail) == NEUTRAL_DEFAULTS


def test_recommended_values_are_used(tmp_path: Path) -> None:
    content = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
        "eos_token_id": 2,
    }
    assert read(tmp_path, content) == (SamplingDefaults(0.6, 20, 0.95, 0.05, 1.05), [])


@pytest.mark.parametrize("content", [{}, {"do_sample": True}, {"temperature": None}, [1], {"top_k": 0}])
def test_silence_is_neutral(tmp_path: Path, content: Any) -> None:
    assert read(tmp_path, content) == (NEUTRAL_DEFAULTS, [])


def test_a_model_that_does_not_sample_is_greedy(tmp_path: Path) -> None:
    assert read(tmp_path, {"do_sample": False, "temperature": 0.9})[0] == SamplingDefaults(temperature=0.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("top_k", 1.5), ("top_k", -1), ("top_p", 0), ("min_p", 2), ("repetition_penalty", "x")],
)
def test_values_out_of_range_are_named_and_not_used(tmp_path: Path, name: str, value: Any) -> None:
    defaults, warnings = read(tmp_path, {name: value})
    assert defaults == NEUTRAL_DEFAULTS
    assert len(warnings) == 1
    assert name in warnings[0]
    assert repr(value) in warnings[0]


@pytest.mark.parametrize("digits", [40, 400])
def test_an_integer_beyond_all_numbers_is_named_shortly(tmp_path: Path, digits: int) -> None:
    defaults, warnings = read(tmp_path, {"repetition_penalty": 10**digits, "top_p": 0.5})
    assert defaults == SamplingDefaults(top_p=0.5)
    assert len(warnings) == 1
    assert "repetition_penalty 1000" in warnings[0]
    assert len(warnings[0]) < 120


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    defaults, warnings = read(tmp_path, "{")
    assert defaults == NEUTRAL_DEFAULTS
    assert len(warnings) == 1


def test_the_wire_shows_every_default() -> None:
    message = default_sampling_message(SamplingDefaults(temperature=0.0, top_k=20))
    assert message.HasField("temperature")
    assert (message.temperature, message.top_k, message.top_p, message.repetition_penalty) == (0.0, 20, 1.0, 1.0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "generation_config.json cannot be read"),
        ("[1]", "generation_config.json cannot be read"),
        (f'{{"top_k": 1{"0" * 5000}}}', "generation_config.json cannot be read"),
        (f'{{"eos_token_id": [0, 1{"0" * 400}]}}', "eos_token_id 1000"),
        ('{"eos_token_id": ["</s>"]}', "eos_token_id '</s>' is no token id"),
        ('{"eos_token_id": {}}', "eos_token_id {} is no token id"),
    ],
)
def test_a_generation_config_that_cannot_be_used(tmp_path: Path, content: str, words: str) -> None:
    """B145: in plain words, and short, whatever the file says."""
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        read_eos_token_ids(tmp_path, None)
    assert len(str(caught.value)) < 120
