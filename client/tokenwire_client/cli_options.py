"""The flags of the `tokenwire` command, each with its unit and default.

Must not know: clients, output.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenwire_client.channels import DEFAULT_TARGET
from tokenwire_client.structured import Choice, Grammar, JsonObject, JsonSchema, Regex, StructuredOutput
from tokenwire_client.tls import Tls
from tokenwire_client.types import Sampling

TARGET_VARIABLE = "TOKENWIRE_TARGET"
_SAMPLING = "Sampling"
_TLS = "Encryption"
_STRUCTURE = "Structured output (one of them)"

Target = Annotated[
    str,
    typer.Option(
        "--target",
        envvar=TARGET_VARIABLE,
        help="The tokenizer service: host:port, or any gRPC name; several that serve the same with commas between.",
        show_default=DEFAULT_TARGET,
    ),
]
CaFile = Annotated[
    Path | None,
    typer.Option(
        "--ca-file",
        envvar="TOKENWIRE_CA_FILE",
        help="PEM certificates that sign the server's one; turns TLS on.",
        rich_help_panel=_TLS,
    ),
]
UseTls = Annotated[
    bool,
    typer.Option("--tls", envvar="TOKENWIRE_TLS", help="TLS with the well-known authorities.", rich_help_panel=_TLS),
]
CertFile = Annotated[
    Path | None,
    typer.Option(
        "--cert-file",
        envvar="TOKENWIRE_CERT_FILE",
        help="PEM certificate to show to the server (mTLS).",
        rich_help_panel=_TLS,
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option("--key-file", envvar="TOKENWIRE_KEY_FILE", help="PEM key of that certificate.", rich_help_panel=_TLS),
]
ServerName = Annotated[
    str | None,
    typer.Option(
        "--server-name",
        envvar="TOKENWIRE_SERVER_NAME",
        help="Name in the server's certificate. Unset: the target's host.",
        rich_help_panel=_TLS,
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="TOKENWIRE_API_KEY",
        help="Who asks, where the service wants to know. Best as the variable: others can see flags.",
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", help="Seconds that the call may take. Unset: no limit."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON value, for scripts.")]
Stats = Annotated[bool, typer.Option("--stats", help="Print token counts and times (seconds) to standard error.")]
Model = Annotated[str, typer.Option("--model", help="Name of the model. Unset: the served one.")]
CacheSalt = Annotated[
    str | None,
    typer.Option("--cache-salt", help="Share cached prefixes only with the same salt."),
]

Priority = Annotated[
    int | None,
    typer.Option("--priority", help="Among waiting requests a lower number is served earlier. Unset: 0."),
]

MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", help="Tokens at most. Unset: the context limit.", rich_help_panel=_SAMPLING),
]
MinTokens = Annotated[
    int | None,
    typer.Option("--min-tokens", help="Tokens before a stop token.", rich_help_panel=_SAMPLING),
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", help="0 is greedy. Unset: 1.", rich_help_panel=_SAMPLING),
]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", help="Among the k likeliest only; 0: off.", rich_help_panel=_SAMPLING),
]
TopP = Annotated[
    float | None, typer.Option("--top-p", help="Nucleus mass in (0, 1]; 1: off.", rich_help_panel=_SAMPLING)
]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", help="Least relative probability, 0 to 1; 0: off.", rich_help_panel=_SAMPLING),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="Same seed, same text. Unset: a new one.", rich_help_panel=_SAMPLING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", help="End at this string; may be repeated.", rich_help_panel=_SAMPLING),
]
StopTokenId = Annotated[
    list[int] | None,
    typer.Option("--stop-token-id", help="End at this token; may be repeated.", rich_help_panel=_SAMPLING),
]
IgnoreEos = Annotated[
    bool | None,
    typer.Option(
        "--ignore-eos/--heed-eos",
        help="Go on past the end-of-sequence token. Unset: heed.",
        rich_help_panel=_SAMPLING,
        show_default=False,
    ),
]
IncludeStop = Annotated[
    bool | None,
    typer.Option(
        "--include-stop/--hide-stop",
        help="Keep the matched stop in the text. Unset: hide.",
        rich_help_panel=_SAMPLING,
        show_default=False,
    ),
]
SkipSpecial = Annotated[
    bool | None,
    typer.Option(
        "--skip-special-tokens/--keep-special-tokens",
        help="Leave special tokens out of the text. Unset: skip.",
        rich_help_panel=_SAMPLING,
        show_default=False,
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option("--repetition-penalty", help="For tokens seen so far, in (0, 2]; 1: off.", rich_help_panel=_SAMPLING),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option("--presence-penalty", help="For tokens of the answer, -2 to 2; 0: off.", rich_help_panel=_SAMPLING),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option("--frequency-penalty", help="The same, times their count, -2 to 2.", rich_help_panel=_SAMPLING),
]
Samples = Annotated[
    int | None,
    typer.Option("--n", help="So many answers, shown at the end one after the other.", rich_help_panel=_SAMPLING),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        help="Report log probabilities: of each token and of so many likeliest (0 to 20), to standard error or in"
        " --json.",
        rich_help_panel=_SAMPLING,
    ),
]
SchemaFile = Annotated[
    Path | None,
    typer.Option("--json-schema", help="Answer in JSON that fits the schema in this file.", rich_help_panel=_STRUCTURE),
]
AnyObject = Annotated[
    bool, typer.Option("--json-object", help="Answer with a JSON object.", rich_help_panel=_STRUCTURE)
]
Pattern = Annotated[
    str | None,
    typer.Option("--regex", help="Answer with what matches this pattern.", rich_help_panel=_STRUCTURE),
]
GrammarFile = Annotated[
    Path | None,
    typer.Option("--grammar", help="Answer by the grammar (Lark or GBNF) in this file.", rich_help_panel=_STRUCTURE),
]
Choices = Annotated[
    list[str] | None,
    typer.Option("--choice", help="Answer with one of these; may be repeated.", rich_help_panel=_STRUCTURE),
]


def tls(
    use_tls: bool, ca_file: Path | None, cert_file: Path | None, key_file: Path | None, server_name: str | None
) -> Tls | None:
    """None is plaintext. Raises BadParameter for flags that would be forgotten."""
    if not use_tls and ca_file is None:
        if (cert_file, key_file, server_name) != (None, None, None):
            raise typer.BadParameter("--cert-file, --key-file and --server-name need --ca-file or --tls")
        return None
    if (cert_file is None) != (key_file is None):
        raise typer.BadParameter("--cert-file and --key-file go together")
    return Tls(ca_file, cert_file, key_file, server_name)


def sampling(given: Mapping[str, Any]) -> Sampling:
    """Of the flags under "Sampling" and "Structured output", by the names that commands give them."""
    return Sampling(
        max_tokens=given["max_tokens"],
        min_tokens=given["min_tokens"],
        temperature=given["temperature"],
        top_k=given["top_k"],
        top_p=given["top_p"],
        min_p=given["min_p"],
        seed=given["seed"],
        stop=given["stop"] or (),
        stop_token_ids=given["stop_token_id"] or (),
        ignore_eos=given["ignore_eos"],
        include_stop_str_in_output=given["include_stop"],
        skip_special_tokens=given["skip_special_tokens"],
        repetition_penalty=given["repetition_penalty"],
        presence_penalty=given["presence_penalty"],
        frequency_penalty=given["frequency_penalty"],
        n=given["n"],
        logprobs=given["logprobs"],
        structured_output=structured_output(
            *(given[name] for name in ("json_schema", "json_object", "regex", "grammar", "choice"))
        ),
    )


def structured_output(
    json_schema: Path | None,
    json_object: bool,
    regex: str | None,
    grammar: Path | None,
    choice: list[str] | None,
) -> StructuredOutput | None:
    """The constraint of the flags. Raises BadParameter for several, or for a file that cannot be read."""
    given: list[StructuredOutput] = []
    if json_schema is not None:
        given.append(JsonSchema(_content(json_schema, "--json-schema")))
    if json_object:
        given.append(JsonObject())
    if regex is not None:
        given.append(Regex(regex))
    if grammar is not None:
        given.append(Grammar(_content(grammar, "--grammar")))
    if choice:
        given.append(Choice(choice))
    if len(given) > 1:
        raise typer.BadParameter("give one of --json-schema, --json-object, --regex, --grammar and --choice")
    return given[0] if given else None


def _content(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise typer.BadParameter(f"cannot read {path}: {reason}", param_hint=flag) from None
