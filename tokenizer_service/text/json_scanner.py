"""Where a JSON object ends in text that comes piece by piece, or where it stops being JSON.

Must not know: tools, tokens. Nothing is kept of the text, so that the cost is linear in it.
"""

import re
from enum import Enum, auto

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR_PART = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_SPACE = " \t\n\r"
_CLOSERS = {"{": "}", "[": "]"}


class _Expects(Enum):
    VALUE = auto()
    VALUE_OR_CLOSE = auto()  # just after "["
    KEY = auto()
    KEY_OR_CLOSE = auto()  # just after "{"
    COLON = auto()
    COMMA_OR_CLOSE = auto()
    IN_STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    IN_SCALAR = auto()


class JsonScanner:
    """Follows one object, from its "{" on; strict JSON.

    `is_done` after its "}"; `is_bad` once a character came that no JSON has there.
    """

    def __init__(self, *, is_inside: bool = False) -> None:
        """`is_inside`: the object has been read up to the end of one of its values."""
        self.is_done = False
        self.is_bad = False
        self._open = ["{"] if is_inside else []
        self._expects = _Expects.COMMA_OR_CLOSE if is_inside else _Expects.VALUE
        self._is_key = False
        self._hex_left = 0
        self._scalar = ""

    def scan(self, text: str, start: int = 0) -> int:
        """Reads on in `text`; returns up to where: its end, the object's, or the character that is wrong."""
        place = start
        while place < len(text) and not (self.is_done or self.is_bad):
            match self._expects:
                case _Expects.IN_STRING:
                    place = self._string(text, place)
                case _Expects.IN_SCALAR:
                    place = self._scalar_part(text, place)
                case _Expects.ESCAPE | _Expects.HEX:
                    place += self._escaped(text[place])
                case _:
                    place += text[place] in _SPACE or self._mark(text[place])
        return place

    def _string(self, text: str, place: int) -> int:
        plain = _PLAIN.match(text, place)
        assert plain is not None
        end = plain.end()
        if end == len(text):
            return end
        if text[end] == '"':
            self._expects = _Expects.COLON if self._is_key else _Expects.COMMA_OR_CLOSE
        elif text[end] == "\\":
            self._expects = _Expects.ESCAPE
        else:
            self.is_bad = True
            return end
        return end + 1

    def _escaped(self, character: str) -> bool:
        """One character after a backslash, or of four digits; whether it is taken."""
        if self._expects is _Expects.HEX:
            self.is_bad = character not in "0123456789abcdefABCDEF"
            self._hex_left -= 1
            if self._hex_left == 0:
                self._expects = _Expects.IN_STRING
        elif character == "u":
            self._expects, self._hex_left = _Expects.HEX, 4
        else:
            self.is_bad = character not in '"\\/bfnrt'
            self._expects = _Expects.IN_STRING
        return not self.is_bad

    def _scalar_part(self, text: str, place: int) -> int:
        part = _SCALAR_PART.match(text, place)
        assert part is not None
        self._scalar += part[0]
        if part.end() < len(text):
            self.is_bad = _SCALAR.fullmatch(self._scalar) is None
            self._expects = _Expects.COMMA_OR_CLOSE
        return part.end()

    def _mark(self, character: str) -> bool:
        """One character outside strings and scalars; whether it is taken."""
        expects = self._expects
        if character in "}]":
            self._close(character)
        elif expects is _Expects.COLON:
            self.is_bad = character != ":"
            self._expects = _Expects.VALUE
        elif expects is _Expects.COMMA_OR_CLOSE:
            self.is_bad = character != ","
            self._expects = _Expects.KEY if self._open[-1] == "{" else _Expects.VALUE
        elif expects in (_Expects.KEY, _Expects.KEY_OR_CLOSE):
            self.is_bad = character != '"'
            self._is_key, self._expects = True, _Expects.IN_STRING
        else:
            return self._begin_value(character)
        return not self.is_bad

    def _close(self, character: str) -> None:
        can_close = self._expects in (_Expects.COMMA_OR_CLOSE, _Expects.KEY_OR_CLOSE, _Expects.VALUE_OR_CLOSE)
        if not can_close or _CLOSERS[self._open[-1]] != character:
            self.is_bad = True
            return
        self._open.pop()
        self._expects = _Expects.COMMA_OR_CLOSE
        self.is_done = not self._open

    def _begin_value(self, character: str) -> bool:
        """Whether the character is taken: the first one of a scalar is left to it."""
        if not self._open and character != "{":
            self.is_bad = True
        elif character in "{[":
            self._open.append(character)
            self._expects = _Expects.KEY_OR_CLOSE if character == "{" else _Expects.VALUE_OR_CLOSE
        elif character == '"':
            self._is_key, self._expects = False, _Expects.IN_STRING
        elif character in "-0123456789tfn":
            self._scalar, self._expects = "", _Expects.IN_SCALAR
            return False
        else:
            self.is_bad = True
        return not self.is_bad
