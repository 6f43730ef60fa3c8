"""Writes docs/configuration.md from the settings of both services: `python docs/generate_configuration.py`.

Must not know: what any setting means; descriptions and defaults come from the code.
"""

from pathlib import Path

from engine_service import config as engine
from service_runtime.config import ServiceSettings
from tokenizer_service import config as tokenizer

TARGET = Path(__file__).with_name("configuration.md")
HEADER = """# Configuration

Made from the code by `docs/generate_configuration.py`; a test fails when it is stale.

Every option is a flag, an environment variable and a key of the TOML file that `--config` (or the variable
`..._CONFIG`) names. Flags win over variables, variables over the file. Unknown names and values out of range end the
program with exit code 2 before anything loads. List options are given several times as a flag, and separated by commas
in a variable.
"""


def render() -> str:
    """The whole page."""
    parts = [
        HEADER,
        _table("Engine service", engine.PROGRAM, engine.ENV_PREFIX, engine.EngineSettings),
        _table("Tokenizer service", tokenizer.PROGRAM, tokenizer.ENV_PREFIX, tokenizer.TokenizerSettings),
    ]
    return "\n".join(parts)


def _table(title: str, program: str, prefix: str, settings: type[ServiceSettings]) -> str:
    rows = [f"## {title} (`{program}`)\n", "| flag | variable | default | meaning |", "|---|---|---|---|"]
    for name, field in settings.model_fields.items():
        default = "" if field.default is None else f"`{_show(field.default)}`"
        flag = "--" + name.replace("_", "-")
        rows.append(f"| `{flag}` | `{prefix}{name.upper()}` | {default} | {field.description} |")
    return "\n".join(rows) + "\n"


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


if __name__ == "__main__":
    TARGET.write_text(render())
