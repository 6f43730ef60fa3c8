"""The tokenizers of these tests: the default model's and one made by code."""

from pathlib import Path
from typing import Any

import pytest

from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder
from tests.fixtures.tokenizers_made import SPECIAL_NAMES, msp_tokenizer
from tokenizer_service.text.tokenizer import TextTokenizer


@pytest.fixture(scope="session")
def default_folder() -> Path:
    return resolve_model_folder(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def default_tokenizer(default_folder: Path) -> TextTokenizer:
    return TextTokenizer.load(default_folder)


@pytest.fixture(scope="session")
def reference(default_folder: Path) -> Any:
    """transformers' own tokenizer of the default model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(default_folder))


@pytest.fixture(scope="session")
def msp() -> TextTokenizer:
    return TextTokenizer(msp_tokenizer(), SPECIAL_NAMES)
