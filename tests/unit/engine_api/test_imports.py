"""The front process never imports torch, and no package of the engine imports what it must not know."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("engine_service.__main__", ["torch", "transformers", "numpy"]),
        ("engine_service.loop.engine_loop", ["torch", "grpc", "numpy", "google.protobuf"]),
        ("engine_service.loop.engine_process", ["torch", "grpc", "numpy", "google.protobuf"]),
    ],
)
def test_imports(module: str, forbidden: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {forbidden!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
