"""A chat template: a conversation in, the text of the prompt out, in a sandbox.

Must not know: tokens, tokenizers, requests. The template is the model's or a client's, the messages are a
client's: neither is trusted.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser

from tokenizer_service.text.errors import TextError
from tokenizer_service.text.loading import read_json
from tokenizer_service.text.template_data import Data
from tokenizer_service.text.template_sandbox import TemplateSandbox
from tokenizer_service.text.template_time import MAX_CPU_S, CpuBudget, TookTooLong

# Put after the final message to find its end; two noncharacters, which no text of people has, and a space that
# shows whether the template keeps the space at the end of a message.
_END_TAG = "\ufdde\ufddf "
_NOT_ASCII = re.compile("[^\x00-\x7f\ufdd0-\ufdef]")
_MAX_REASON_CHARS = 500


class ChatTemplate:
    """One compiled template; rendering is safe for many threads.

    Renders as transformers' `apply_chat_template` does: same settings, filters, globals and variables
    (`messages`, `tools`, `documents`, `add_generation_prompt`, the named special tokens).

    `knows_tools`: it shows tools to the model; `knows_calls`: it shows earlier calls of the assistant.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
        field: str | None = None,
    ) -> None:
        """`now`: the clock of `strftime_now`. Raises TextError on `field` (None: the model's own) for a bad
        `source`.
        """
        environment = _environment(now)
        try:
            self.knows_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except Exception as error:  # jinja's own, and whatever Python says of the code that it makes
            whose = "the model's" if field is None else "this"
            reason = f": {str(error)[:_MAX_REASON_CHARS]}" if field and isinstance(error, jinja2.TemplateError) else ""
            raise TextError(field, f"{whose} chat template cannot be compiled{reason}") from error
        self.knows_calls = "tool_calls" in source
        self.source = source
        self._whose = "the model's" if field is None else "the request's"
        self._is_clients = field is not None
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(
        cls,
        folder: Path,
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> "ChatTemplate":
        """Reads chat_template.jinja or the chat_template of tokenizer_config.json (its "default" if it has
        names).

        Raises TextError: on "messages" when the model has no template, on None when it has a bad one.
        """
        source = _find_source(folder, "default")
        if source is None:
            raise TextError("messages", "this model has no chat template; send a plain prompt instead")
        return cls(source, special_tokens, now=now)

    @classmethod
    def load_for_tools(
        cls,
        folder: Path,
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> "ChatTemplate | None":
        """The template for conversations with tools, where a model has one of its own ("tool_use")."""
        source = _find_source(folder, "tool_use")
        return None if source is None else cls(source, special_tokens, now=now)

    def render(
        self,
        messages: Sequence[Data],
        add_generation_prompt: bool,
        *,
        max_chars: int,
        tools: Sequence[Data] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt's text; with `continue_final_message` up to the end of the last message's content.

        `messages` and `tools` are as `template_data` makes them. Raises TextError: on "messages" when it grows
        over `max_chars`, or the template fails or refuses; on "continue_final_message" when the template does
        not show the last message.
        """
        if continue_final_message:
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _END_TAG}]
        variables: dict[str, Any] = {
            **self._special_tokens,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        rendered = self._generate(variables, max_chars)
        return _cut_at_tag(rendered, messages[-1]["content"]) if continue_final_message else rendered

    def _generate(self, variables: Data, max_chars: int) -> str:
        budget = CpuBudget()
        # The model's own is trusted not to loop for ever; it is looked at only between its parts.
        watch = budget.watching(self._template.root_render_func.__code__) if self._is_clients else nullcontext()
        try:
            with watch:
                return self._joined(self._template.generate(variables), budget, max_chars)
        except TextError:
            raise
        except TookTooLong as error:
            message = f"{self._whose} chat template computes for more than {MAX_CPU_S:g} s"
            raise TextError("messages", message) from error
        except _Refused as error:
            reason = str(error)[:_MAX_REASON_CHARS]
            raise TextError("messages", f"{self._whose} chat template refuses: {reason}") from error
        except Exception as error:  # whatever the template does wrong with these messages
            message = f"{self._whose} chat template cannot render these messages"
            raise TextError("messages", message) from error

    @staticmethod
    def _joined(parts: Iterator[str], budget: CpuBudget, max_chars: int) -> str:
        kept: list[str] = []
        size = 0
        for part in parts:
            budget.check()
            size += len(part)
            if size > max_chars:
                raise TextError("messages", f"the rendered prompt exceeds the limit of {max_chars:,} characters")
            kept.append(part)
        return "".join(kept)


def _cut_at_tag(rendered: str, tagged: str) -> str:
    """As transformers: space at the message's end is kept if the template keeps it, and else all of it goes."""
    mark = _END_TAG.strip()
    place = rendered.rfind(mark)
    if place < 0 or tagged.removesuffix(_END_TAG).strip() not in rendered:
        raise TextError("continue_final_message", "the chat template does not show the final message as it is")
    is_kept = rendered.startswith(_END_TAG, place)
    return rendered[:place] if is_kept else rendered[:place].rstrip()


class _Refused(jinja2.TemplateError):
    """The template called raise_exception: its text is meant for the client."""


class _Generation(Extension):
    """{% generation %}, which marks the assistant's text for training, changes nothing here."""

    tags = {"generation"}  # noqa: RUF012 (the type that jinja declares)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime]) -> TemplateSandbox:
    environment = TemplateSandbox([_Generation, loopcontrols])
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
    """JSON for the model to read: jinja's own filter would escape it for HTML.

    Noncharacters are never escaped: they are marks of who prepared the messages, taken out of the rendered text.
    """
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def _find_source(folder: Path, name: str) -> str | None:
    """The template of that name; one without a name is "default"."""
    file = folder / ("chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja")
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = read_json(folder / "tokenizer_config.json").get("chat_template")
    named = {entry["name"]: entry["template"] for entry in template} if isinstance(template, list) else {}
    found = named.get(name, template if name == "default" else None)
    return found if isinstance(found, str) else None
