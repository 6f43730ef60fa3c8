"""What targets there are: read from a TOML file, placeholders filled in.

Must not know: how targets are started or measured.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

DEFAULT_FILE = Path(__file__).with_name("targets.toml")


class Kind(Enum):
    """`tokenwire`: both services. `tokenwire-engine`: the engine service alone. `http`: an OpenAI-compatible
    server. `driver`: an engine without a server, in a process that speaks the driver protocol."""

    TOKENWIRE = "tokenwire"
    TOKENWIRE_HTTP = "tokenwire-http"
    ENGINE = "tokenwire-engine"
    HTTP = "http"
    DRIVER = "driver"


class BadSpec(Exception):
    """A target that cannot be; the message names it and the field."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One target. `command` starts an http server or driver; empty for an http server that runs already at
    `url`. `engine_flags` and `tokenizer_flags` are for our own services. `body` is added to http requests."""

    name: str
    kind: Kind
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    ready_path: str = "/health"
    body: Mapping[str, Any] = field(default_factory=dict)
    engine_flags: tuple[str, ...] = ()
    tokenizer_flags: tuple[str, ...] = ()
    start_timeout_s: float = 600.0
    about: str = ""

    def __post_init__(self) -> None:
        if self.kind is Kind.DRIVER and not self.command:
            raise BadSpec(f"target {self.name}: a driver needs a command")
        if self.kind is Kind.HTTP and not (self.command or self.url):
            raise BadSpec(f"target {self.name}: an http server needs a command or a url")


def read_specs(file: Path, placeholders: Mapping[str, str], names: Sequence[str]) -> list[Spec]:
    """Those targets of a TOML file, which has a table for each. BadSpec for an unknown name, kind, field or
    placeholder.

    `{name}` in a text becomes the placeholder's value; `{port}` is left for the start.
    """
    tables = tomllib.loads(file.read_text())
    if missing := [name for name in names if name not in tables]:
        raise BadSpec(f"no target {', '.join(missing)} in {file.name}: it has {', '.join(tables)}")
    return [_spec(name, tables[name], dict(placeholders) | {"port": "{port}"}) for name in names]


def _spec(name: str, table: Mapping[str, Any], placeholders: Mapping[str, str]) -> Spec:
    known = {item.name for item in fields(Spec)} - {"name"}
    if unknown := set(table) - known:
        raise BadSpec(f"target {name}: unknown fields {', '.join(sorted(unknown))}")
    kinds = [kind.value for kind in Kind]
    if table.get("kind") not in kinds:
        raise BadSpec(f"target {name}: kind must be one of {', '.join(kinds)}")
    values = {key: _filled(name, value, placeholders) for key, value in table.items() if key != "kind"}
    return Spec(name, Kind(table["kind"]), **values)


def _filled(name: str, value: Any, placeholders: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        try:
            return value.format_map(placeholders)
        except (KeyError, ValueError, IndexError) as error:
            raise BadSpec(f"target {name}: {value!r} needs a placeholder that is not set: {error}") from None
    if isinstance(value, Mapping):
        return {key: _filled(name, item, placeholders) for key, item in value.items()}
    if isinstance(value, Sequence):
        return tuple(_filled(name, item, placeholders) for item in value)
    return value


def with_port(command: Sequence[str], port: int) -> list[str]:
    """The command with `{port}` replaced."""
    return [part.replace("{port}", str(port)) for part in command]


def with_engine_flags(spec: Spec, flags: tuple[str, ...]) -> Spec:
    """The target with more flags of the engine, where it is one of ours."""
    if spec.kind in (Kind.TOKENWIRE, Kind.TOKENWIRE_HTTP, Kind.ENGINE):
        return replace(spec, engine_flags=spec.engine_flags + flags)
    is_ours = any("inprocess_driver" in part for part in spec.command)
    return replace(spec, command=spec.command + flags) if is_ours else spec
