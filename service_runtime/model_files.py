"""Finds the folder of a model and tells which tokenizer it holds.

Must not know: torch, tokenizers, what is in the weights.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from service_runtime.config import cache_folder, shipped_folder

DEFAULT_MODEL = "smollm2-135m-instruct"

# The files that decide which text becomes which ids; the chat template is not among them.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
)
_WINDOWS_PER_FILE = 64
_WINDOW_BYTES = 4096
_MAX_HEADER_BYTES = 100 * 1024 * 1024
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]


class ModelNotFound(Exception):
    """There is no such model here; the message says what was tried."""


def default_model_folder() -> Path:
    """Where the embedded default model lies: shipped with the program, or once it has been prepared (maybe not yet)."""
    shipped = shipped_folder()
    if shipped is not None and (shipped / "models" / DEFAULT_MODEL / "config.json").is_file():
        return shipped / "models" / DEFAULT_MODEL
    return cache_folder() / "models" / DEFAULT_MODEL


def resolve_model_folder(reference: str) -> Path:
    """The folder of a model given as `smollm2-135m-instruct`, a local folder or a Hugging Face id.

    Raises ModelNotFound. A hub id is downloaded (safetensors and text files only) unless it is cached.
    """
    if reference == DEFAULT_MODEL:
        return _default_folder()
    folder = Path(reference).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelNotFound(f"the folder {reference} holds no config.json")
        return folder
    if reference.count("/") != 1 or reference.startswith((".", "/", "~")):
        raise ModelNotFound(f"{reference} is neither a folder nor a Hugging Face id")
    return _download(reference)


def _default_folder() -> Path:
    folder = default_model_folder()
    if not (folder / "config.json").is_file():
        raise ModelNotFound(
            f"the default model {DEFAULT_MODEL} is not prepared yet: run `python -m engine_service.embedded_model` once"
        )
    return folder


def _download(reference: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(reference, allow_patterns=_HUB_FILES))
    except (LocalEntryNotFoundError, RepositoryNotFoundError, HfHubHTTPError, ValueError) as error:
        raise ModelNotFound(f"the model {reference} is not cached and cannot be downloaded") from error


def tokenizer_fingerprint(folder: Path) -> str:
    """sha256 (hex) over the tokenizer's files, by name and content; "" when the folder has none."""
    digest = hashlib.sha256()
    found = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    for file in found:
        content = hashlib.sha256(file.read_bytes()).digest()
        digest.update(file.name.encode() + b"\0" + content)
    return digest.hexdigest() if found else ""


def weights_fingerprint(folder: Path) -> str:
    """sha256 (hex) that tells models apart without reading all of them: "" when the folder has no safetensors.

    Over config.json, and of each weight file its name, size, header (names, dtypes and shapes of its tensors) and 64
    spread windows of 4 KiB. Fine-tunes of one model differ in the windows, unless they share nearly all weights.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return ""
    digest = hashlib.sha256()
    config = folder / "config.json"
    if config.is_file():
        digest.update(hashlib.sha256(config.read_bytes()).digest())
    for path in files:
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            _digest_weights(file, path.stat().st_size, digest.update)
    return digest.hexdigest()


def _digest_weights(file: BinaryIO, size: int, update: Callable[[bytes], None]) -> None:
    """A safetensors file begins with the length of its header, 8 bytes, and the header."""
    update(size.to_bytes(8, "little"))
    length = int.from_bytes(file.read(8), "little")
    update(file.read(min(length, _MAX_HEADER_BYTES)))
    begin = min(8 + length, size)
    for window in range(_WINDOWS_PER_FILE):
        file.seek(begin + max(0, size - begin - _WINDOW_BYTES) * window // (_WINDOWS_PER_FILE - 1))
        update(file.read(_WINDOW_BYTES))
