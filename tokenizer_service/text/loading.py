"""Reads a model folder's tokenizer files into a `tokenizers.Tokenizer` and the names of its special tokens.

Must not know: requests, chat. Imports transformers (seconds) only for folders without a tokenizer.json.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tokenizer_service.text.errors import TextError

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_library_tokenizer(folder: Path) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of a model folder, and its named special tokens ("eos_token" -> "</s>").

    Raises TextError with field None when the folder holds no tokenizer that can be read.
    """
    if not (folder / "tokenizer.json").is_file():
        return _load_with_transformers(folder)
    config = read_json(folder / "tokenizer_config.json")
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing more precise
        raise TextError(None, "the model's tokenizer.json cannot be read") from error
    names = _named_tokens(read_json(folder / "special_tokens_map.json")) | _named_tokens(config)
    _complete_added_tokens(tokenizer, config, names)
    return _without_padding(tokenizer), names


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of the model; empty when there is no such file. Raises TextError (field
    None).
    """
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise TextError(None, f"the model's {file.name} is not valid JSON") from error
    if not isinstance(content, dict):
        raise TextError(None, f"the model's {file.name} does not hold a JSON object")
    return content


def _load_with_transformers(folder: Path) -> tuple[Tokenizer, dict[str, str]]:
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises many kinds for a folder that it cannot read
        raise TextError(None, "the model folder holds no tokenizer that can be read") from error
    tokenizer = getattr(slow, "backend_tokenizer", None)
    if not isinstance(tokenizer, Tokenizer):
        raise TextError(None, "the model's tokenizer exists only as Python code; a tokenizer.json is needed")
    return _without_padding(tokenizer), dict(slow.special_tokens_map)


def _without_padding(tokenizer: Tokenizer) -> Tokenizer:
    """Some files carry the truncation or padding of a training run; here it would lose text."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {name: _content(config.get(name)) for name in _NAMES}
    return {name: content for name, content in named.items() if content}


def _content(value: Any) -> str | None:
    """A token in these files is a string, or an object whose "content" is one."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _complete_added_tokens(tokenizer: Tokenizer, config: dict[str, Any], names: dict[str, str]) -> None:
    """Adds what only tokenizer_config.json declares: added tokens, and which ones are special."""
    declared = config.get("added_tokens_decoder", {})
    for _, entry in sorted(declared.items(), key=lambda item: int(item[0])):
        if tokenizer.token_to_id(entry["content"]) is None:
            tokenizer.add_tokens([AddedToken(**{key: entry[key] for key in _FLAGS if key in entry})])
    special = {entry["content"] for entry in declared.values() if entry.get("special")} | set(names.values())
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    missing = [token for token in sorted(special - known) if tokenizer.token_to_id(token) is not None]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in missing])


_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
