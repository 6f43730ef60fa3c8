"""API keys that belong to no tenant, kept as SHA-256.

Must not know: requests, where keys are configured.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


class BadKeys(Exception):
    """The keys cannot be used; the message is for the operator and holds no key."""


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """The SHA-256 digests of the keys that are accepted; none: everybody is."""

    digests: tuple[bytes, ...] = ()

    @classmethod
    def load(cls, plain: Iterable[str], file: str | None) -> "ApiKeys":
        """Plain keys, and a file of one hexadecimal SHA-256 a line (# begins a comment). Raises BadKeys."""
        digests = [_digest(key) for key in plain]
        if file is not None:
            digests += _read(file)
            if not digests:
                raise BadKeys("the file of API keys holds none")
        return cls(tuple(digests))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def _read(file: str) -> list[bytes]:
    try:
        lines = Path(file).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise BadKeys(f"the file of API keys cannot be read: {reason}") from error
    digests = []
    for number, line in enumerate(lines, start=1):
        content = line.split("#", 1)[0].strip()
        if content and not _DIGEST.fullmatch(content):
            raise BadKeys(f"line {number} of the file of API keys is no SHA-256 of 64 hexadecimal digits")
        if content:
            digests.append(bytes.fromhex(content))
    return digests
