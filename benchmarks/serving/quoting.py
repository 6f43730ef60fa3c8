"""Prompts for measuring speculation: answers that quote their prompt, and answers that have nothing to quote.

Must not know: how a request is served.
"""

import random
from dataclasses import dataclass

_WHO = (
    "The harbour office",
    "A retired teacher",
    "The committee",
    "Our northern branch",
    "The museum",
    "A young baker",
)
_WHAT = ("published", "repaired", "postponed", "welcomed", "described", "measured", "sold", "painted")
_WHICH = ("seven wooden boats", "the old timetable", "a collection of letters", "its yearly report", "the stone bridge")
_WHERE = ("near the river", "in the market hall", "on the island of Vell", "behind the station", "at the winter fair")
_WHY = (
    "because the budget had doubled",
    "after a long debate",
    "although few had asked for it",
    "before the first snow",
)
_WHEN = ("in March", "on a Tuesday", "late in the evening", "two years ago", "without any notice")
_THEMES = ("a lighthouse", "learning to cook", "a lost umbrella", "the sea at night", "an honest thief", "growing old")


@dataclass(frozen=True, slots=True)
class Question:
    """One user message and how its answer is sampled."""

    text: str
    temperature: float
    max_tokens: int


def quoting(seed: int, sentences: int = 10, max_tokens: int = 192) -> Question:
    """A summary that quotes: the answer repeats long parts of the prompt. Greedy."""
    dice = random.Random(seed)
    parts = [
        " ".join(dice.choice(words) for words in (_WHO, _WHAT, _WHICH, _WHERE, _WHY, _WHEN)) for _ in range(sentences)
    ]
    passage = ". ".join(parts) + "."
    text = f"Summarize the following report by quoting its sentences word for word.\n\nReport: {passage}"
    return Question(text, 0.0, max_tokens)


def inventing(seed: int, max_tokens: int = 192) -> Question:
    """A story, drawn: nothing of it stands in the prompt."""
    dice = random.Random(seed)
    themes = f"{dice.choice(_THEMES)} and {dice.choice(_THEMES)}"
    text = f"Write a story about {themes}. Begin with the letter {dice.choice('ABCDEFG')}."
    return Question(text, 1.0, max_tokens)
