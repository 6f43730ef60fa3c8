"""What constraints were found to be, the least recently used ones forgotten.

Must not know: how a grammar is compiled.
"""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

from engine_service.core.sampling import StructuredOutput

Found = TypeVar("Found")


class GrammarCache(Generic[Found]):
    """Bounded by entries and by characters of their constraints. Any thread may use it."""

    def __init__(self, max_entries: int, max_characters: int) -> None:
        self._max_entries = max_entries
        self._max_characters = max_characters
        self._entries: OrderedDict[StructuredOutput, Found] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def characters(self) -> int:
        return self._characters

    def get(self, constraint: StructuredOutput) -> Found | None:
        with self._lock:
            found = self._entries.get(constraint)
            if found is not None:
                self._entries.move_to_end(constraint)
            return found

    def put(self, constraint: StructuredOutput, found: Found) -> None:
        """A constraint longer than all the room is not kept."""
        with self._lock:
            if self._entries.pop(constraint, None) is not None:
                self._characters -= len(constraint.text)
            self._entries[constraint] = found
            self._characters += len(constraint.text)
            while len(self._entries) > self._max_entries or self._characters > self._max_characters:
                oldest, _ = self._entries.popitem(last=False)
                self._characters -= len(oldest.text)
