"""Counts nested repetition in a regular expression or grammar, before anything expensive looks at it.

`((a{100}){100}){100}` is 23 characters that mean a million. Must not know: the library, requests.
"""

import re

# An escape, a character class (it may hold braces), a group's begin and end, a counted repeat.
_PIECES = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|(?P<open>\()|(?P<close>\))|(?P<repeat>\{\s*(?P<low>\d*)\s*(?:,\s*(?P<high>\d*))?\s*\})",
    re.DOTALL,
)
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"')
_MAX_DIGITS = 12


def nested_repeats(text: str) -> int:
    """The largest product of repeat counts of a regular expression, each inside the next; 1 without any.

    `{2,7}` counts 7, `{2,}` counts 2.
    """
    groups, last, end = [1], 1, 0  # per open group the largest product inside it; that of the piece just read
    for piece in _PIECES.finditer(text):
        if piece.start() != end:
            last = 1
        end = piece.end()
        if piece["open"]:
            groups.append(1)
        elif piece["close"]:
            last = groups.pop() if len(groups) > 1 else groups[0]
        elif piece["repeat"]:
            last *= _count(piece["high"] or piece["low"])
        else:
            last = 1
        if not piece["open"]:
            groups[-1] = max(groups[-1], last)
    return max(groups)


def nested_repeats_of_grammar(text: str) -> int:
    """The same for a grammar, whose rules may nest in each other: the product over its lines.

    Quoted strings cannot be told from quotes in regular expressions without parsing the grammar: the larger
    count of both readings counts.
    """
    product = 1
    for line in text.splitlines():
        product *= max(nested_repeats(line), nested_repeats(_QUOTED.sub("", line)))
    return product


def _count(digits: str) -> int:
    return max(1, int(digits[:_MAX_DIGITS])) if digits else 1
