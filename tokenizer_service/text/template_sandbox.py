"""The jinja environment of chat templates: nothing of Python is in reach, and no single operation makes a giant.

A template's text is small, but `'x' * 10**10` in it is not: operators and methods that blow up their operands are
bounded, and compiling computes nothing of the template. A template that doubles a text again and again is not stopped
here: templates are the operator's choice, and those of clients are off unless the operator allows them.
Must not know: conversations, tokens.
"""

import re
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SEQUENCE = 1_000_000
"""Items or characters that one operation may make."""

_MAX_NUMBER = 2**64
_MAX_EXPONENT = 64
_MAX_WIDTH = 1_000
# Methods and filters that pad to a width they are given; chat templates do without.
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_WIDTH = re.compile(r"%[^a-zA-Z%]*?(\*|\d{4,})")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Raises SecurityError, a template error, for what would be too large."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, extensions: list[type[Extension]]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False)
        for name in _PADDING & self.filters.keys():
            del self.filters[name]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_numbers(left, right)
        if operator == "*":
            _check_product(left, right)
        elif operator == "**" and isinstance(right, int) and abs(right) > _MAX_EXPONENT:
            raise SecurityError(f"an exponent beyond {_MAX_EXPONENT}")
        elif operator == "%" and isinstance(left, str) and _WIDTH.search(left):
            raise SecurityError(f"a width beyond {_MAX_WIDTH:,}")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _PADDING and super().is_safe_attribute(obj, attr, value)


def _check_numbers(*values: Any) -> None:
    if any(isinstance(value, int) and abs(value) > _MAX_NUMBER for value in values):
        raise SecurityError("a number of more than 64 bits")


def _check_product(left: Any, right: Any) -> None:
    for sequence, times in ((left, right), (right, left)):
        if hasattr(sequence, "__len__") and isinstance(times, int) and len(sequence) * times > MAX_SEQUENCE:
            raise SecurityError(f"a product of more than {MAX_SEQUENCE:,} items")
