"""The flag that names LoRA adapters.

Must not know: files, how adapters are used.
"""

from collections.abc import Sequence

from service_runtime.adapter_names import is_adapter_name


def named_adapters(lora: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Pairs (name, folder). ValueError for what is none, and for a name that comes twice."""
    found: dict[str, str] = {}
    for text in lora:
        name, equals, folder = text.partition("=")
        if not equals or not folder or not is_adapter_name(name):
            raise ValueError(f"--lora {text!r} is not NAME=FOLDER with a name of letters, digits, '.', '_' and '-'")
        if name in found:
            raise ValueError(f"--lora names {name!r} twice")
        found[name] = folder
    return tuple(found.items())
