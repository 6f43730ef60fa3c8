"""Requests of a benchmark: prompts of exactly so many tokens, the same for every target, new ones for every seed.

Must not know: targets, time, what is measured.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

# Words to choose from: enough that prompts share no prefix, few enough to find in a moment.
_NUM_WORDS = 4000
_MIN_LETTERS = 3


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """`text` and `token_ids` are the same prompt; `max_tokens` are generated whatever the model says."""

    key: int
    text: str
    token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths in tokens. With a `spread` s each is drawn from [1 - s, 1 + s] times the value, else exact."""

    prompt_tokens: int = 100
    output_tokens: int = 64
    spread: float = 0.0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(f"lengths of {self.prompt_tokens} and {self.output_tokens} tokens: both must be positive")
        if not 0 <= self.spread < 1:
            raise ValueError(f"spread {self.spread} is outside [0, 1)")


class WordList:
    """Words that are one token each wherever they stand in a text, so that prompt lengths are exact."""

    def __init__(self, words: Sequence[tuple[str, int]]) -> None:
        if not words:
            raise ValueError("the tokenizer has no words that are one token")
        self._words = tuple(words)

    @staticmethod
    def of(tokenizer: Tokenizer) -> "WordList":
        """Picks lower-case words with a leading space, checked by encoding them."""
        pieces = {id_: tokenizer.decode([id_]) for id_ in sorted(tokenizer.get_vocab().values())}
        likely = [(text, id_) for id_, text in pieces.items() if _is_word(text)]
        chosen = random.Random(0).sample(likely, min(len(likely), _NUM_WORDS))
        encoded = tokenizer.encode_batch([text for text, _ in chosen], add_special_tokens=False)
        return WordList([pair for pair, coded in zip(chosen, encoded, strict=True) if coded.ids == [pair[1]]])

    @staticmethod
    def of_folder(folder: Path) -> "WordList":
        return WordList.of(Tokenizer.from_file(str(folder / "tokenizer.json")))

    def prompt(self, length: int, source: random.Random) -> tuple[str, tuple[int, ...]]:
        """A text of `length` words and its token ids."""
        words = source.choices(self._words, k=length)
        return "".join(text for text, _ in words), tuple(id_ for _, id_ in words)


def _is_word(text: str) -> bool:
    letters = text[1:]
    return text.startswith(" ") and len(letters) >= _MIN_LETTERS and letters.isascii() and letters.islower()


def make_workload(words: WordList, shape: Shape, count: int, seed: int) -> tuple[BenchRequest, ...]:
    """`count` requests, a function of the arguments only."""
    source = random.Random(seed)
    requests = []
    for key in range(count):
        text, token_ids = words.prompt(_drawn(shape.prompt_tokens, shape.spread, source), source)
        requests.append(BenchRequest(key, text, token_ids, _drawn(shape.output_tokens, shape.spread, source)))
    return tuple(requests)


def _drawn(length: int, spread: float, source: random.Random) -> int:
    return max(1, round(length * source.uniform(1 - spread, 1 + spread)))
