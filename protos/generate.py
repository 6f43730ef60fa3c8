"""Generates the Python stubs beside their sources: `python protos/generate.py [OUT]`.

Knows the folder of the .proto files and grpcio-tools, nothing of the services.
"""

import sys
import sysconfig
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent


def generate(out: Path) -> None:
    """Writes `*_pb2.py`, `*_pb2_grpc.py` and typed `.pyi` files for every .proto under `out`."""
    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.proto"))
    scripts = Path(sysconfig.get_path("scripts"))
    arguments = [
        "protoc",
        # the plugins of this environment, whatever PATH says
        f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
        f"--proto_path={ROOT}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out=quiet:{out}",
        f"--mypy_grpc_out=quiet:{out}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
