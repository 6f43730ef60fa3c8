"""What importing the client brings along."""

import subprocess
import sys

import pytest

import tokenwire_client
from tokenwire_client import exports, types
from tokenwire_client.errors import TokenwireError

LIBRARY = ["client", "sync", "types", "errors"]
HEAVY = {"torch", "transformers", "tokenizers", "jinja2", "numpy"}
COMMAND_ONLY = {"rich", "typer", "click"}
SERVICES = {"engine_service", "tokenizer_service", "service_runtime", "tokenwire.engine"}
# grpc itself loads these when they are installed, so they are also tried as absent.
OPTIONAL_OF_GRPC = {"google.rpc", "grpc_status", "grpc_health", "grpc_reflection", "grpc_tools"}
NEVER = HEAVY | SERVICES | OPTIONAL_OF_GRPC


def python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def loaded_by(statement: str) -> set[str]:
    done = python(f"{statement}\nimport sys\nprint(*sys.modules)")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def loaded_by_grpc() -> set[str]:
    return loaded_by("import grpc, grpc.aio")


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("tokenwire_client", NEVER | COMMAND_ONLY),
        *[(f"tokenwire_client.{name}", NEVER | COMMAND_ONLY) for name in LIBRARY],
        ("tokenwire_client.cli_app", NEVER),
    ],
)
def test_imports_stay_light(module: str, forbidden: set[str], loaded_by_grpc: set[str]) -> None:
    loaded = loaded_by(f"import {module}")
    assert module in loaded
    assert (loaded - loaded_by_grpc) & forbidden == set()


@pytest.mark.parametrize("name", [*LIBRARY, "cli_app"])
def test_the_client_works_where_only_grpc_and_protobuf_are_installed(name: str) -> None:
    absent = NEVER | (COMMAND_ONLY if name in LIBRARY else set())
    done = python(f"import sys\nfor m in {sorted(absent)}: sys.modules[m] = None\nimport tokenwire_client.{name}")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_package_offers_the_public_names() -> None:
    assert all(hasattr(tokenwire_client, name) for name in exports.__all__)
    wanted = {each.__name__ for each in [TokenwireError, *TokenwireError.__subclasses__()]}
    kinds = [each for each in vars(types).values() if isinstance(each, type)]
    wanted |= {each.__name__ for each in kinds if each.__module__ == types.__name__}
    assert wanted | {"AsyncClient", "Client", "AsyncStream", "Stream"} <= set(exports.__all__)


@pytest.mark.parametrize("missing", ["rich", "typer"])
def test_the_command_says_what_is_not_installed(missing: str) -> None:
    done = python(f"import sys\nsys.modules[{missing!r}] = None\nfrom tokenwire_client.cli import main\nmain()")
    assert done.returncode == 1
    assert done.stderr == f"tokenwire: the command needs {missing}: pip install 'tokenwire[client]'\n"
