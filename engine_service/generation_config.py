"""What a model's generation_config.json recommends for sampling.

Must not know: requests, torch.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

from engine_service.core.sampling import NEUTRAL_DEFAULTS, SamplingDefaults

_FILE = "generation_config.json"

# What may stand in the file and be used; the ranges are those of a request's own fields.
_IN_RANGE: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: value >= 0.0,
    "top_k": lambda value: value >= 0 and value.is_integer(),
    "top_p": lambda value: 0.0 < value <= 1.0,
    "min_p": lambda value: 0.0 <= value <= 1.0,
    "repetition_penalty": lambda value: 0.0 < value <= 2.0,
}


def read_sampling_defaults(folder: Path, warn: Callable[[str], object]) -> SamplingDefaults:
    """Neutral where the file says nothing; `do_sample: false` is greedy.

    `warn` hears of a value that no request could give either: the neutral one is used in its place.
    """
    given = _read(folder / _FILE, warn)
    values = _numbers(given, warn)
    if given.get("do_sample") is False:
        values["temperature"] = 0.0
    neutral = NEUTRAL_DEFAULTS
    return SamplingDefaults(
        temperature=values.get("temperature", neutral.temperature),
        top_k=int(values.get("top_k", neutral.top_k)),
        top_p=values.get("top_p", neutral.top_p),
        min_p=values.get("min_p", neutral.min_p),
        repetition_penalty=values.get("repetition_penalty", neutral.repetition_penalty),
    )


def _numbers(given: dict[str, object], warn: Callable[[str], object]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, is_in_range in _IN_RANGE.items():
        value = given.get(name)
        if value is None:
            continue
        number = _number(value)
        if number is not None and is_in_range(number):
            numbers[name] = number
        else:
            warn(f"{_FILE}: {name} {value!r:.40} is out of range and not used")
    return numbers


def _number(value: object) -> float | None:
    """None for what is no finite number, also an integer beyond all floats."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _read(path: Path, warn: Callable[[str], object]) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        warn(f"{_FILE} cannot be read: neutral defaults are used")
        return {}
    return given if isinstance(given, dict) else {}
