"""A copy of the tree for each page, the default model, and services that pages share which start none themselves.

Must not know: what the documents say.
"""

import asyncio
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import pytest

from engine_service.simulated.step_model import StepModel
from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder
from tests.documents.blocks import ROOT, Block
from tests.documents.place import Place, place_in
from tests.documents.substitutions import SHARING
from tests.fixtures.http_stack import http_stack

_LEFT_OUT = (".git", ".venv", ".run", "*.egg-info", ".*_cache", ".hypothesis")
# A page with one of these starts its services itself; the others find them running.
_STARTS = ("make up", "tokenwire-tokenizer --", "tokenwire-engine --")


class MakePlace(Protocol):
    """A place for blocks of one page, where load tests run `most_s` seconds and engines may be simulated."""

    def __call__(self, blocks: list[Block], most_s: int, simulated: bool = False) -> AbstractContextManager[Place]: ...


@pytest.fixture(scope="session")
def shared_ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[int, int]]:
    """Both services with the default model, as `make up` starts them, with an operators' port."""
    flags = ("--operator-port", "0")
    cache = ("--kv-cache-memory", "256MiB")
    logs = tmp_path_factory.mktemp("services")
    with http_stack(resolve_model_folder(DEFAULT_MODEL), logs, engine_flags=cache, tokenizer_flags=flags) as stack:
        told = {
            50051: (stack.engine, "grpc_port"),
            9091: (stack.engine, "metrics_port"),
            50050: (stack.tokenizer, "grpc_port"),
            9090: (stack.tokenizer, "metrics_port"),
            8000: (stack.tokenizer, "http_port"),
            50049: (stack.tokenizer, "operator_port"),
        }
        yield {port: asyncio.run(service.port(kind)) for port, (service, kind) in told.items()}


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, with the environment that runs the tests as its own."""
    folder = tmp_path_factory.mktemp("clone") / "tokenwire"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


@pytest.fixture
def make_place(request: pytest.FixtureRequest, tree: Path, tmp_path: Path) -> MakePlace:
    def make(blocks: list[Block], most_s: int, simulated: bool = False) -> AbstractContextManager[Place]:
        starts = any(word in block.code for block in blocks if block.page not in SHARING for word in _STARTS)
        ports = None if starts else request.getfixturevalue("shared_ports")
        variables = {}
        if simulated:
            variables["TOKENWIRE_ENGINE_SIMULATE"] = str(tmp_path / "step-model.json")
            StepModel(0.001, 0.0001, 0.00001, 0.0, 0.0).save(tmp_path / "step-model.json", {})
        return place_in(tree, tmp_path, resolve_model_folder(DEFAULT_MODEL), ports, most_s, variables)

    return make
