"""Takes tool calls out of a completion's text as it comes.

What is read does not depend on how the text is split. Only text that may become a call is held back: white
space, a beginning of the opener, and a call up to its arguments; from there the arguments go out as raw JSON
as they come. What turns out to be no call is ordinary text: JSON that is not strict, no name or an unknown
one, arguments that are no object. If that shows only within the arguments, what was sent of them stays, and
text goes on from the wrong character. White space around calls is not shown. Where only some calls are allowed,
the last of them is the end: nothing after it is shown.

Must not know: tokens, requests, templates.
"""

import json
import re
from collections.abc import Callable, Set
from typing import Any

from tokenizer_service.text.json_scanner import JsonScanner
from tokenizer_service.text.messages import ToolCallDelta
from tokenizer_service.text.tool_formats import ToolSyntax

# The usual beginning of a call, up to the "{" of its arguments.
_SPACE = r"[ \t\n\r]{0,16}"
_HEAD = re.compile(
    rf'\{{{_SPACE}"name"{_SPACE}:{_SPACE}"([a-zA-Z0-9_-]{{1,64}})"{_SPACE},'
    rf'{_SPACE}"(?:arguments|parameters)"{_SPACE}:{_SPACE}(?=\{{)'
)


class StreamingToolParser:
    """Of one sample. `names` are the tools that may be called, `most_calls` how often (None: as often as it likes)."""

    def __init__(
        self, syntax: ToolSyntax, names: Set[str], new_id: Callable[[], str], most_calls: int | None = None
    ) -> None:
        self.most_calls = most_calls
        self._syntax = syntax
        self._names = names
        self._new_id = new_id
        self._text = ""  # not read yet
        self._raw = ""  # read, and shown after all if no call comes of it
        self._scanner = JsonScanner()
        self._scanned = 0
        self._num_calls = 0
        self._shown: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._state: Callable[[], bool] = self._at_start if syntax.is_whole_text else self._in_text

    @property
    def is_over(self) -> bool:
        """The last call that is allowed is complete."""
        return self._state == self._over

    def feed(self, text: str) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """New text in; what is to be shown, and new parts of calls."""
        self._text += text
        while self._state():
            pass
        return self._taken()

    def finish(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """What is still held back, at the end of the text. Called once."""
        rest = self._raw + self._text
        is_tail = self._state == self._in_tail
        if not is_tail and not (self._num_calls and rest.isspace()):
            self._shown.append(rest)
        self._raw = self._text = ""
        return self._taken()

    def _taken(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        text, calls = "".join(self._shown), tuple(self._calls)
        self._shown.clear()
        self._calls.clear()
        return text, calls

    # Each state reads what it can of the text, and says whether the next one has something to do.

    def _in_text(self) -> bool:
        opener = self._syntax.opener
        found = self._text.find(opener)
        is_found = found >= 0
        held = found if is_found else len(self._text) - _overlap(self._text, opener)
        held = len(self._text[:held].rstrip())
        self._shown.append(self._text[:held])
        self._text = self._text[held:]
        if is_found:
            self._consume(found - held + len(opener))
            self._state = self._before_list
        return is_found

    def _only_text(self) -> bool:
        self._shown.append(self._text)
        self._text = ""
        return False

    def _at_start(self) -> bool:
        rest, opener = self._text.lstrip(), self._syntax.opener
        if not rest or (opener.startswith(rest) and rest != opener):
            return False
        if opener and rest.startswith(opener):
            self._consume(len(self._text) - len(rest) + len(opener))
        self._state = self._before_list
        return True

    def _before_list(self) -> bool:
        if not self._syntax.list_open:
            self._state = self._before_object
            return True
        return self._expect(self._syntax.list_open, self._before_object)

    def _before_object(self) -> bool:
        rest = self._text.lstrip()
        if not rest:
            return False
        if rest[0] != "{":
            return self._fail(0)
        self._consume(len(self._text) - len(rest))
        self._scanner, self._scanned, self._state = JsonScanner(), 0, self._in_head
        return True

    def _in_head(self) -> bool:
        head = _HEAD.match(self._text)
        if head is not None:
            return self._begin(head[1], head.end()) if head[1] in self._names else self._fail(head.end())
        self._scanned = self._scanner.scan(self._text, self._scanned)
        if self._scanner.is_done:
            return self._whole(self._text[: self._scanned])
        return self._fail(self._scanned) if self._scanner.is_bad else False

    def _begin(self, name: str, end: int) -> bool:
        self._new_call(name)
        self._text, self._raw = self._text[end:], ""
        self._scanner, self._state = JsonScanner(), self._in_arguments
        return True

    def _whole(self, text: str) -> bool:
        """A call that is not written as usual, such as with its arguments first."""
        call = _read_call(text)
        if call is None or call[0] not in self._names:
            return self._fail(len(text))
        self._new_call(call[0])
        self._say(call[1])
        self._text = self._text[len(text) :]
        return self._end_call()

    def _end_call(self) -> bool:
        self._raw, self._state = "", self._over if self._is_last else self._after_object
        return True

    def _over(self) -> bool:
        self._text = ""
        return False

    def _in_arguments(self) -> bool:
        if not self._text:
            return False
        end = self._scanner.scan(self._text)
        self._say(self._text[:end])
        self._text = self._text[end:]
        if self._scanner.is_bad:
            return self._fail(0)
        if self._scanner.is_done:
            self._scanner, self._state = JsonScanner(is_inside=True), self._in_tail
        return bool(self._text)

    def _in_tail(self) -> bool:
        """What else the call's object has after its arguments."""
        if not self._text:
            return False
        self._consume(self._scanner.scan(self._text))
        if self._scanner.is_bad:
            return self._fail(0)
        return self._end_call() if self._scanner.is_done else True

    def _after_object(self) -> bool:
        separator, closer = self._syntax.separator, self._syntax.closer
        rest = self._text.lstrip()
        if not rest or any(mark.startswith(rest) and mark != rest for mark in (separator, closer)):
            return False
        if separator and rest.startswith(separator):
            return self._expect(separator, self._before_object)
        if closer and rest.startswith(closer):
            self._expect(closer, self._text_state())
            self._raw = ""
        else:
            self._state = self._text_state()
        return True

    def _text_state(self) -> Callable[[], bool]:
        return self._only_text if self._syntax.is_whole_text or self._is_last else self._in_text

    def _expect(self, mark: str, then: Callable[[], bool]) -> bool:
        rest = self._text.lstrip()
        if not rest or (mark.startswith(rest) and mark != rest):
            return False
        if not rest.startswith(mark):
            return self._fail(0)
        self._consume(len(self._text) - len(rest) + len(mark))
        self._state = then
        return True

    def _consume(self, count: int) -> None:
        self._raw += self._text[:count]
        self._text = self._text[count:]

    def _fail(self, end: int) -> bool:
        """No call: what was held back and `end` characters are text. They are not read again: linear cost."""
        self._consume(end)
        self._shown.append(self._raw)
        self._raw, self._state = "", self._text_state()
        return True

    @property
    def _is_last(self) -> bool:
        """No call may begin any more."""
        return self.most_calls is not None and self._num_calls >= self.most_calls

    def _new_call(self, name: str) -> None:
        self._calls.append(ToolCallDelta(self._num_calls, self._new_id(), name, ""))
        self._num_calls += 1

    def _say(self, arguments: str) -> None:
        if arguments:
            self._calls.append(ToolCallDelta(self._num_calls - 1, None, None, arguments))


def _overlap(text: str, opener: str) -> int:
    """How many characters at the end of `text` may be the beginning of `opener`."""
    for size in range(min(len(text), len(opener) - 1), 0, -1):
        if text.endswith(opener[:size]):
            return size
    return 0


def _read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments (JSON) of an object that is a call."""
    try:
        value: Any = json.loads(text)
    except (RecursionError, ValueError):  # deeper, or with longer numbers, than the library reads
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)
