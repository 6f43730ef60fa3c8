"""What a LoRA adapter may be called, at either service: a name is also that of a folder, so it is never a path.

Must not know: adapters, services.
"""

import re

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
NAME_RULE = "a name has 1 to 128 letters, digits, '.', '_' and '-', and begins with a letter or digit"


def is_adapter_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None
