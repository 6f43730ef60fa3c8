"""The files of the model's folder that a gateway needs: its configuration, and the tokenizer as a ZIP.

Must not know: gRPC, weights, what is running.
"""

import hashlib
import io
import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
)
MAX_BUNDLE_BYTES = 200 * 1024 * 1024
_LONG_AGO = (1980, 1, 1, 0, 0, 0)


class BundleTooLarge(Exception):
    """The tokenizer's files pass what a gateway accepts; the message has the numbers."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What config.json says; empty or None where it says nothing."""

    model_type: str = ""
    architectures: tuple[str, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """A ZIP of the tokenizer's files. The same files give the same bytes."""

    data: bytes = field(repr=False)
    sha256: str


def read_facts(folder: Path) -> ModelFacts:
    """Reads the model's configuration; a file that cannot be read says nothing."""
    try:
        content = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return ModelFacts()
    if not isinstance(content, dict):
        return ModelFacts()
    architectures = content.get("architectures")
    return ModelFacts(
        model_type=str(content.get("model_type") or ""),
        architectures=tuple(map(str, architectures)) if isinstance(architectures, list) else (),
        bos_token_id=_token_id(content.get("bos_token_id")),
        pad_token_id=_token_id(content.get("pad_token_id")),
    )


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of the folder, None when there is none that can be read."""
    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # the library raises nothing more special
        return None


def bundle_tokenizer(folder: Path) -> TokenizerBundle | None:
    """The tokenizer's files as a ZIP; None when the folder holds no tokenizer. Raises BundleTooLarge."""
    files = [path for name in TOKENIZER_FILES if (path := folder / name).is_file()]
    if not {"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"}.intersection(path.name for path in files):
        return None
    size = sum(path.stat().st_size for path in files)
    if size > MAX_BUNDLE_BYTES:
        raise BundleTooLarge(f"the tokenizer's files have {size:,} bytes; at most {MAX_BUNDLE_BYTES:,} are sent")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files:
            entry = zipfile.ZipInfo(path.name, _LONG_AGO)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())
    data = buffer.getvalue()
    return TokenizerBundle(data, hashlib.sha256(data).hexdigest())


def _token_id(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None
