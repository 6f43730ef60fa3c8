"""Numbers of bytes as an operator writes them.

Must not know: which setting they are for.
"""

import re
from typing import Annotated

from pydantic import BeforeValidator

_UNITS = {"": 1, "B": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "KIB": 1024, "MIB": 1024**2, "GIB": 1024**3}
_UNITS |= {"KB": 1000, "MB": 1000**2, "GB": 1000**3}


def parse_bytes(value: object) -> object:
    """ "512MiB", "1.5 GB" or a plain number of bytes, as an integer. Raises ValueError."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError("give bytes as a number with an optional unit: 1073741824, 512MiB, 1GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
