"""The bytes behind token ids: the one place of the engine that knows any text.

It reads the model folder's tokenizer.json for the vocabulary's bytes and for nothing else: no prompt and no
completion is ever encoded or decoded here. Must not know: requests, grammars.
"""

import json
from pathlib import Path

from llguidance import LLTokenizer


class NoVocabulary(Exception):
    """The model folder has no tokenizer that the grammar library can use; the message says why."""


def load_vocabulary(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """The vocabulary of at least `vocab_size` ids (ids without a token never match anything).

    Special tokens match no text. Holds the interpreter, and with it all steps, for some tenths of a second: to be
    called as soon as the engine is ready, when nothing waits longer than if ready had come later. Raises NoVocabulary.
    """
    try:
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    except OSError:
        raise NoVocabulary("the model has no tokenizer.json") from None
    if not eos_token_ids:
        raise NoVocabulary("the model has no end-of-text token")
    try:
        size = max(vocab_size, _count(text))
        return LLTokenizer(text, n_vocab=size, eos_token=list(eos_token_ids))
    except (ValueError, KeyError, TypeError) as error:
        raise NoVocabulary(f"the model's tokenizer.json cannot be used for grammars: {error}") from None


def _count(text: str) -> int:
    """Ids are dense but for holes that added tokens leave: one more than the largest."""
    content = json.loads(text)
    vocabulary = content["model"]["vocab"]
    largest = len(vocabulary) - 1 if isinstance(vocabulary, list) else max(vocabulary.values(), default=-1)
    return 1 + int(max([largest, *(token["id"] for token in content.get("added_tokens", ()))]))
