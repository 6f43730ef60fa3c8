"""Names of LoRA adapters, and the flag that gives them.

Must not know: files, how adapters are used.
"""

import re
from collections.abc import Sequence

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def named_adapters(lora: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Pairs (name, folder). ValueError for what is none, and for a name that comes twice."""
    found: dict[str, str] = {}
    for text in lora:
        name, equals, folder = text.partition("=")
        if not equals or not folder or ADAPTER_NAME.fullmatch(name) is None:
            raise ValueError(f"--lora {text!r} is not NAME=FOLDER with a name of letters, digits, '.', '_' and '-'")
        if name in found:
            raise ValueError(f"--lora names {name!r} twice")
        found[name] = folder
    return tuple(found.items())
