"""Token counts over all prompts and samples of one HTTP request.

Must not know: the shape of any one API.
"""

from typing import Any

from tokenizer_service.engines.messages import Usage
from tokenizer_service.sessions.events import Completed


class UsageTotals:
    """A prompt is counted once however many samples it has; completions are summed."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._completion_tokens = 0

    def add(self, place: int, end: Completed) -> None:
        """`place`: which prompt. What was cached of it is told by its first sample."""
        if end.index == 0 or place not in self._prompts:
            self._prompts[place] = (end.usage.prompt_tokens, end.usage.cached_tokens)
        self._completion_tokens += end.usage.completion_tokens

    @classmethod
    def of(cls, usage: Usage) -> "UsageTotals":
        """Totals that are known already."""
        totals = cls()
        totals._prompts[0] = (usage.prompt_tokens, usage.cached_tokens)
        totals._completion_tokens = usage.completion_tokens
        return totals

    @property
    def prompt_tokens(self) -> int:
        return sum(tokens for tokens, _ in self._prompts.values())

    @property
    def cached_tokens(self) -> int:
        return sum(cached for _, cached in self._prompts.values())

    @property
    def completion_tokens(self) -> int:
        return self._completion_tokens

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self._completion_tokens

    def as_object(self) -> dict[str, Any]:
        """As in chat and completions."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self.total_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
