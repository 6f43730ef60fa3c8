"""Stacks that several files of this folder share, each made when the first of them asks for it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder
from tests.fixtures.checkpoints import load_reference, write_hist, write_succ
from tests.fixtures.http_stack import HIST_DEFAULTS, HttpStack, http_stack


@pytest.fixture(scope="session")
def succ_http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpStack]:
    """SUCC over HTTP."""
    folder = write_succ(tmp_path_factory.mktemp("succ"), resolve_model_folder(DEFAULT_MODEL))
    flags = ("--num-blocks", "1024", "--block-size", "16")
    with http_stack(folder, tmp_path_factory.mktemp("logs"), engine_flags=flags) as stack:
        yield stack


@pytest.fixture(scope="session")
def hist_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_hist(tmp_path_factory.mktemp("hist"))
    settings = {"eos_token_id": 0, "do_sample": True, **HIST_DEFAULTS}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def hist_http(hist_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpStack]:
    """HIST over HTTP in the pool SMALLPOOL: blocks of 16 tokens, 64 of them, steps of 64."""
    flags = ("--block-size", "16", "--num-blocks", "64", "--step-token-budget", "64", "--max-num-requests", "16")
    with http_stack(hist_folder, tmp_path_factory.mktemp("logs"), engine_flags=flags) as stack:
        yield stack


@pytest.fixture(scope="session")
def hist_logits(hist_folder: Path) -> Callable[[list[int]], list[float]]:
    """The logits after some tokens, by transformers."""
    model: Any = load_reference(hist_folder)

    def compute(tokens: list[int]) -> list[float]:
        with torch.no_grad():
            found: list[float] = model(torch.tensor([tokens])).logits[0, -1].tolist()
        return found

    return compute
