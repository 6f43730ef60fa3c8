"""The page at /: one file, and the headers that let the browser run it and nothing else.

Must not know: what the page does.
"""

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_FILE = Path(__file__).with_name("page.html")


@dataclass(frozen=True, slots=True)
class Page:
    html: bytes
    headers: Mapping[str, str]

    @classmethod
    def load(cls) -> "Page":
        """The policy names the page's own script and style by their hashes: injected ones do not run."""
        text = _FILE.read_text(encoding="utf-8")
        policy = "; ".join(
            (
                "default-src 'none'",
                f"script-src {_hash(text, 'script')}",
                f"style-src {_hash(text, 'style')}",
                "connect-src 'self'",
                "img-src data:",
                "base-uri 'none'",
                "form-action 'none'",
                "frame-ancestors 'none'",
            )
        )
        headers = {
            "content-type": "text/html; charset=utf-8",
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }
        return cls(text.encode(), headers)


def _hash(text: str, tag: str) -> str:
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
