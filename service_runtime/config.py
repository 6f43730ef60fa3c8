"""Settings of a service: flags, environment variables and a TOML file, read once, frozen, checked first.

The only reader of the environment and the command line. Must not know: what any setting means.
"""

import argparse
import os
import sys
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

SettingsT = TypeVar("SettingsT", bound="ServiceSettings")


class ServiceSettings(BaseModel):
    """Base of a service's settings: flat and frozen; each field has a default and a description.

    A field `kv_cache_memory` is the flag `--kv-cache-memory`, the variable `<PREFIX>KV_CACHE_MEMORY`
    and the TOML key `kv_cache_memory`. Flags win over variables, variables over the file.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def load_settings(
    settings_type: type[SettingsT],
    *,
    program: str,
    env_prefix: str,
    arguments: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> SettingsT:
    """Reads the settings of `program`. An unknown name or a bad value ends it with exit code 2."""
    parser = _build_parser(settings_type, program, env_prefix)
    flags = vars(parser.parse_args(arguments))
    environment = os.environ if environment is None else environment
    config_file = flags.pop("config", None) or environment.get(f"{env_prefix}CONFIG")
    values: dict[str, Any] = {}
    try:
        values |= _read_file(config_file) if config_file else {}
        values |= _read_environment(settings_type, environment, env_prefix)
        values |= {name: value for name, value in flags.items() if value is not None}
        return settings_type.model_validate(values)
    except ValidationError as error:
        parser.error("; ".join(_explain(detail) for detail in error.errors()))
    except ValueError as error:
        parser.error(str(error))


def _build_parser(settings_type: type[ServiceSettings], program: str, env_prefix: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
        epilog=f"Each option is also an environment variable ({env_prefix}NAME) and a key of the TOML file.",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with the same options as keys")
    for name, field in settings_type.model_fields.items():
        flag = "--" + name.replace("_", "-")
        if _is_bool(field):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=_help(field))
        elif typing.get_origin(field.annotation) is tuple:
            parser.add_argument(flag, action="append", metavar="VALUE", help=_help(field) + " (may be repeated)")
        else:
            parser.add_argument(flag, metavar=_metavar(field), help=_help(field))
    return parser


def _help(field: FieldInfo) -> str:
    default = "" if field.default is None else f" (default: {_show_default(field.default)})"
    return (field.description or "").replace("%", "%%") + default.replace("%", "%%")


def _show_default(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _metavar(field: FieldInfo) -> str:
    names = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
    kinds = [field.annotation, *typing.get_args(field.annotation)]
    return next((names[kind] for kind in kinds if kind in names), "VALUE")


def _is_bool(field: FieldInfo) -> bool:
    return field.annotation is bool


def _read_file(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"cannot read the configuration file: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"the configuration file is not valid TOML: {error}") from error


def _read_environment(
    settings_type: type[ServiceSettings], environment: Mapping[str, str], prefix: str
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(prefix) or variable == f"{prefix}CONFIG":
            continue
        name = variable.removeprefix(prefix).lower()
        field = settings_type.model_fields.get(name)
        if field is None:
            raise ValueError(f"unknown environment variable {variable}")
        is_list = typing.get_origin(field.annotation) is tuple
        values[name] = tuple(part for part in text.split(",") if part) if is_list else text
    return values


def _explain(detail: Any) -> str:
    name = "--" + ".".join(str(part) for part in detail["loc"]).replace("_", "-")
    return f"{name}: {detail['msg']} (got {detail['input']!r})" if detail["loc"] else str(detail["msg"])


def fail(program: str, message: str, code: int = 1) -> typing.NoReturn:
    """Ends the process with one line on stderr: a start that cannot succeed, said plainly."""
    print(f"{program}: {message}", file=sys.stderr)
    raise SystemExit(code)


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Where converted models and compiled kernels live: $TOKENWIRE_CACHE, else the user's cache folder."""
    environment = os.environ if environment is None else environment
    if explicit := environment.get("TOKENWIRE_CACHE"):
        return Path(explicit)
    base = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tokenwire"


def shipped_folder(environment: Mapping[str, str] | None = None) -> Path | None:
    """$TOKENWIRE_SHIPPED: read only, laid out as the cache folder, and looked in first. Images set it."""
    environment = os.environ if environment is None else environment
    shipped = environment.get("TOKENWIRE_SHIPPED")
    return Path(shipped) if shipped else None
