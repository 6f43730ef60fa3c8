"""The calls that are being served now, the oldest first.

Must not know: grpc, what a call does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizer_service.api.call import Call


class LiveCalls:
    """Bounded by what admission lets in. Lives on the event loop."""

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}

    @contextmanager
    def keep(self, call: "Call") -> Iterator[None]:
        """For the time of the block."""
        key = id(call)
        self._calls[key] = call
        try:
            yield
        finally:
            del self._calls[key]

    def oldest(self, count: int) -> "list[Call]":
        return list(islice(self._calls.values(), count))

    @property
    def tokens(self) -> int:
        """Delivered so far to all of them."""
        return sum(call.completion_tokens for call in self._calls.values())

    @property
    def prompt_tokens(self) -> int:
        return sum(call.prompt_tokens or 0 for call in self._calls.values())
