"""A model's chat template: messages in, the text of the prompt out, in a sandbox.

Must not know: tokens, tokenizers, requests. The template is the model's, the messages are a client's: neither
is trusted.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenizer_service.text.errors import TextError
from tokenizer_service.text.loading import read_json
from tokenizer_service.text.messages import Message

_MAX_REASON_CHARS = 500


class ChatTemplate:
    """One compiled template; rendering is safe for many threads.

    Renders as transformers' `apply_chat_template` does: same settings, filters, globals and variables
    (`messages`, `tools`, `documents`, `add_generation_prompt`, the named special tokens).
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`now`: the clock of `strftime_now`. Raises TextError (field None) for a bad `source`."""
        environment = _environment(now)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TextError(None, "the model's chat template cannot be compiled") from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(
        cls, folder: Path, special_tokens: Mapping[str, str], *, now: Callable[[], datetime] = datetime.now
    ) -> "ChatTemplate":
        """Reads chat_template.jinja or the chat_template of tokenizer_config.json (its "default" if it has
        names).

        Raises TextError: on "messages" when the model has no template, on None when it has a bad one.
        """
        source = _find_source(folder)
        if source is None:
            raise TextError("messages", "this model has no chat template; send a plain prompt instead")
        return cls(source, special_tokens, now=now)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool, *, max_chars: int) -> str:
        """The prompt's text. Raises TextError("messages", ...) when it grows over `max_chars`, or the
        template fails or refuses.
        """
        variables: dict[str, Any] = {
            **self._special_tokens,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(variables):
                size += len(part)
                if size > max_chars:
                    message = f"the rendered prompt exceeds the limit of {max_chars:,} characters"
                    raise TextError("messages", message)
                parts.append(part)
        except TextError:
            raise
        except _Refused as error:
            reason = str(error)[:_MAX_REASON_CHARS]
            raise TextError("messages", f"the model's chat template refuses: {reason}") from error
        except Exception as error:  # whatever the model's template does wrong with these messages
            raise TextError("messages", "the model's chat template cannot render these messages") from error
        return "".join(parts)


class _Refused(jinja2.TemplateError):
    """The template called raise_exception: its text is meant for the client."""


class _Generation(Extension):
    """{% generation %}, which marks the assistant's text for training, changes nothing here."""

    tags = {"generation"}  # noqa: RUF012 (the type that jinja declares)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
    return environment


def _refuse(message: str) -> None:
    raise _Refused(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for the model to read: jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _find_source(folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
