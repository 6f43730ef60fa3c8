"""Checkpoints and stacks of the integration suite: one SUCC stack per module, made once."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder
from tests.fixtures.checkpoints import write_hist, write_succ
from tests.fixtures.stack import Stack, running_stack


@pytest.fixture(scope="session")
def succ_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_succ(tmp_path_factory.mktemp("succ"), resolve_model_folder(DEFAULT_MODEL))


@pytest.fixture(scope="session")
def hist_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hist(tmp_path_factory.mktemp("hist"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def succ_stack(succ_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    flags = ("--num-blocks", "1024", "--max-num-requests", "64")
    async with running_stack(succ_folder, tmp_path_factory.mktemp("logs"), engine_flags=flags) as stack:
        yield stack
