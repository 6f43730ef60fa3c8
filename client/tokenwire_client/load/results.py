"""Reports as data: what a run, its rounds and a sweep have found, and their JSON form.

Must not know: how figures are made, how they look. Times are seconds, NaN (null in JSON) where there is nothing to say.
"""

import json
import math
import types
import typing
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokenwire_client.load.histogram import Latency
from tokenwire_client.load.timeline import Series

FORMAT = "tokenwire-load/1"
_MAX_BYTES = 256 * 2**20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Counts:
    """intended = sent + not_sent; sent = ok + cancelled + abandoned + the sum of errors. `good` are the ok ones within
    every target."""

    intended: int
    sent: int
    not_sent: int
    ok: int
    cancelled: int
    abandoned: int
    good: int
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        return sum(self.errors.values())

    @property
    def all_left(self) -> bool:
        """Whether every request was left on purpose, so that none could end."""
        return self.cancelled == self.intended

    @property
    def good_share(self) -> float:
        """Of all that should have been answered: what was neither sent nor answered is not good."""
        wanted = self.intended - self.cancelled
        return self.good / wanted if wanted else math.nan


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second of the window. `offered`: requests intended in it; `ok`, `good` and `prompt_tokens`: of requests that
    ended in it (some began before; some of its own end later); `tokens`: generated, as they arrived."""

    offered: float
    ok: float
    good: float
    tokens: float
    prompt_tokens: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of the measured requests that ended well. `asked_prompt`: what the workload meant the prompts to have."""

    asked_prompt: int
    prompt: int
    cached: int
    completion: int
    messages: int
    without_usage: int


@dataclass(frozen=True, slots=True)
class TenantResult:
    """One tenant's part."""

    name: str
    counts: Counts
    ttft: Latency
    e2e: Latency


@dataclass(frozen=True, slots=True)
class Round:
    """One measurement. Latencies count from intended starts; `lag` is how late the generator itself sent. `dots`:
    (second of the intended start, TTFT) of a fair sample. `warmup`: requests before the window, in no other figure."""

    seed: int
    window_s: float
    warmup: int
    counts: Counts
    rates: Rates
    tokens: Tokens
    ttft: Latency
    itl: Latency
    tpot: Latency
    e2e: Latency
    lag: Latency
    tenants: tuple[TenantResult, ...]
    series: Series
    dots: tuple[tuple[float, float], ...]
    error_examples: dict[str, str]
    notes: tuple[str, ...]
    rate: float = math.nan
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Knee:
    """`rate`: the highest offered rate that was sustained (NaN: none was); `rule` says what that means;
    `first_failed`: the lowest rate above it that was not."""

    rate: float
    first_failed: float
    rule: str


@dataclass(frozen=True, slots=True)
class Report:
    """All of a run or a sweep. `rounds` of a sweep are its rates in ascending order; `knee` is None for a run.

    `targets`: seconds by name (ttft, tpot, e2e).
    """

    kind: str
    created: str
    settings: dict[str, str]
    machine: dict[str, str]
    rounds: tuple[Round, ...]
    knee: Knee | None = None
    targets: dict[str, float] = field(default_factory=dict)


def write_json(report: Report, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"format": FORMAT, **_plain(report)}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
    )


def read_json(path: Path) -> Report:
    """ValueError with the file's name for anything that is not a report."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"{path} is larger than {_MAX_BYTES} bytes")
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"{path} is no report of `tokenwire load` (format {FORMAT})")
    try:
        report: Report = _parsed(Report, data)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is a damaged report: {error}") from None
    if not report.rounds:
        raise ValueError(f"{path} holds no measurement")
    return report


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parsed(kind: Any, value: Any) -> Any:
    """`value` as the type that an annotation names; TypeError if it is another."""
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        assert isinstance(kind, type)
        given = {item.name: _parsed(hints[item.name], value[item.name]) for item in fields(kind) if item.name in value}
        return kind(**given)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _parsed(parts[0], value)
    if origin is tuple and len(parts) == 2 and parts[1] is Ellipsis:
        return tuple(_parsed(parts[0], item) for item in value)
    if origin is tuple:
        return tuple(_parsed(part, item) for part, item in zip(parts, value, strict=True))
    if origin is dict:
        return {str(key): _parsed(parts[1], item) for key, item in value.items()}
    if kind is float and value is None:
        return math.nan
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind):
        raise TypeError(f"{kind.__name__} expected, got {str(value)[:40]!r}")
    return value
