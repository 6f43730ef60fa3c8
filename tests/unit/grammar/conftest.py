"""A byte-level vocabulary of 512 ids, the last of them without a token behind in the wide one."""

from pathlib import Path

import pytest
from llguidance import LLTokenizer

from engine_service.grammar.vocabulary import load_vocabulary
from tests.fixtures.checkpoints import HIST_EOS, HIST_VOCAB, write_byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def vocabulary(tokenizer_folder: Path) -> LLTokenizer:
    return load_vocabulary(tokenizer_folder, HIST_VOCAB, (HIST_EOS,))
