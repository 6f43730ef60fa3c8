"""The flags of the `tokenwire` command, each with its unit and default.

Must not know: clients, output.
"""

from typing import Annotated

import typer

from tokenwire_client.channels import DEFAULT_TARGET

_SAMPLING = "Sampling"

Target = Annotated[
    str,
    typer.Option(
        "--target",
        envvar="TOKENWIRE_TARGET",
        help="The tokenizer service: host:port, or any gRPC name.",
        show_default=DEFAULT_TARGET,
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
