"""The commands: chat, generate, tokenize, models, health; engines and lora are groups of their own.

Must not know: gRPC, how output looks.
"""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from tokenwire_client import cli_options as flags
from tokenwire_client.channels import DEFAULT_TARGET
from tokenwire_client.cli_chat import converse
from tokenwire_client.cli_engines import app as engines_app
from tokenwire_client.cli_lora import app as lora_app
from tokenwire_client.cli_operate import drain, steps
from tokenwire_client.cli_output import EXIT_FAILED, as_json, exit_codes, show_answers, show_models
from tokenwire_client.cli_plugins import GROUP, add_own, add_plugins
from tokenwire_client.sync import Client
from tokenwire_client.sync_stream import Stream
from tokenwire_client.top.command import top
from tokenwire_client.types import Message

app = typer.Typer(
    help="Talk to a Tokenwire tokenizer service.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(engines_app, name="engines")
app.add_typer(lora_app, name="lora")
app.command()(steps)
app.command()(drain)
app.command()(top)


load = typer.Typer(help="Load tests and capacity planning.", no_args_is_help=True)
app.add_typer(load, name=GROUP)


def run() -> None:
    """Runs the command line of this process."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets a question mark, not a crash.
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    if sys.argv[1:2] == [GROUP]:  # only then is their import worth its time
        add_own(load)
        add_plugins(load)
    app()


@app.command()
def chat(
    prompt: Annotated[
        str | None,
        typer.Argument(help="One user turn. Unset: a conversation on a terminal, else standard input."),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message before it.")] = None,
    target: flags.Target = DEFAULT_TARGET,
    timeout: flags.Timeout = None,
    api_key: flags.ApiKey = None,
    tls: flags.UseTls = False,
    ca_file: flags.CaFile = None,
    cert_file: flags.CertFile = None,
    key_file: flags.KeyFile = None,
    server_name: flags.ServerName = None,
    json_output: flags.AsJson = False,
    stats: flags.Stats = False,
    model: flags.Model = "",
    cache_salt: flags.CacheSalt = None,
    priority: flags.Priority = None,
    max_tokens: flags.MaxTokens = None,
    min_tokens: flags.MinTokens = None,
    temperature: flags.Temperature = None,
    top_k: flags.TopK = None,
    top_p: flags.TopP = None,
    min_p: flags.MinP = None,
    seed: flags.Seed = None,
    stop: flags.Stop = None,
    stop_token_id: flags.StopTokenId = None,
    ignore_eos: flags.IgnoreEos = None,
    include_stop: flags.IncludeStop = None,
    skip_special_tokens: flags.SkipSpecial = None,
    repetition_penalty: flags.RepetitionPenalty = None,
    presence_penalty: flags.PresencePenalty = None,
    frequency_penalty: flags.FrequencyPenalty = None,
    n: flags.Samples = None,
    logprobs: flags.Logprobs = None,
    json_schema: flags.SchemaFile = None,
    json_object: flags.AnyObject = False,
    regex: flags.Pattern = None,
    grammar: flags.GrammarFile = None,
    choice: flags.Choices = None,
) -> None:
    """Streams the assistant's answer; without a prompt, on a terminal, a whole conversation."""
    sampling = flags.sampling(locals())
    before = [] if system is None else [Message("system", system)]
    security = flags.tls(tls, ca_file, cert_file, key_file, server_name)
    with exit_codes(), Client(target, timeout=timeout, tls=security, api_key=api_key) as client:

        def start(messages: Sequence[Message]) -> Stream:
            return client.chat(messages, sampling, model=model, cache_salt=cache_salt, priority=priority)

        if prompt is None and sys.stdin.isatty() and not json_output:
            if n is not None and n > 1:
                raise typer.BadParameter("a conversation has one answer to each turn", param_hint="--n")
            converse(start, before, stats)
            return
        turn = Message("user", _text_or_input(prompt))
        show_answers(start([*before, turn]), n or 1, json_output=json_output, stats=stats)


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue. Unset: standard input.")] = None,
    token_ids: Annotated[
        str | None, typer.Option("--token-ids", help="Token ids to continue instead, as in 1,2,3.")
    ] = None,
    target: flags.Target = DEFAULT_TARGET,
    timeout: flags.Timeout = None,
    api_key: flags.ApiKey = None,
    tls: flags.UseTls = False,
    ca_file: flags.CaFile = None,
    cert_file: flags.CertFile = None,
    key_file: flags.KeyFile = None,
    server_name: flags.ServerName = None,
    json_output: flags.AsJson = False,
    stats: flags.Stats = False,
    model: flags.Model = "",
    cache_salt: flags.CacheSalt = None,
    priority: flags.Priority = None,
    max_tokens: flags.MaxTokens = None,
    min_tokens: flags.MinTokens = None,
    temperature: flags.Temperature = None,
    top_k: flags.TopK = None,
    top_p: flags.TopP = None,
    min_p: flags.MinP = None,
    seed: flags.Seed = None,
    stop: flags.Stop = None,
    stop_token_id: flags.StopTokenId = None,
    ignore_eos: flags.IgnoreEos = None,
    include_stop: flags.IncludeStop = None,
    skip_special_tokens: flags.SkipSpecial = None,
    repetition_penalty: flags.RepetitionPenalty = None,
    presence_penalty: flags.PresencePenalty = None,
    frequency_penalty: flags.FrequencyPenalty = None,
    n: flags.Samples = None,
    logprobs: flags.Logprobs = None,
    json_schema: flags.SchemaFile = None,
    json_object: flags.AnyObject = False,
    regex: flags.Pattern = None,
    grammar: flags.GrammarFile = None,
    choice: flags.Choices = None,
) -> None:
    """Streams the continuation of a text, without a chat template."""
    sampling = flags.sampling(locals())
    if token_ids is not None and prompt is not None:
        raise typer.BadParameter("give a prompt or --token-ids, not both", param_hint="--token-ids")
    source = _text_or_input(prompt) if token_ids is None else _numbers(token_ids)
    security = flags.tls(tls, ca_file, cert_file, key_file, server_name)
    with exit_codes(), Client(target, timeout=timeout, tls=security, api_key=api_key) as client:
        stream = client.generate(source, sampling, model=model, cache_salt=cache_salt, priority=priority)
        show_answers(stream, n or 1, json_output=json_output, stats=stats)


@app.command()
def tokenize(
    text: Annotated[str | None, typer.Argument(help="The text. Unset: standard input.")] = None,
    special_tokens: Annotated[
        bool | None,
        typer.Option(
            "--add-special-tokens/--no-special-tokens",
            help="Let the tokenizer add its own (such as a beginning of sequence). Unset: add.",
            show_default=False,
        ),
    ] = None,
    target: flags.Target = DEFAULT_TARGET,
    timeout: flags.Timeout = None,
    api_key: flags.ApiKey = None,
    tls: flags.UseTls = False,
    ca_file: flags.CaFile = None,
    cert_file: flags.CertFile = None,
    key_file: flags.KeyFile = None,
    server_name: flags.ServerName = None,
    json_output: flags.AsJson = False,
    model: flags.Model = "",
) -> None:
    """Prints the token ids of a text, separated by spaces."""
    source = _text_or_input(text)
    security = flags.tls(tls, ca_file, cert_file, key_file, server_name)
    with exit_codes(), Client(target, timeout=timeout, tls=security, api_key=api_key) as client:
        ids = client.tokenize(source, model=model, add_special_tokens=special_tokens)
        print(as_json(ids) if json_output else " ".join(map(str, ids)))


@app.command()
def models(
    target: flags.Target = DEFAULT_TARGET,
    timeout: flags.Timeout = None,
    api_key: flags.ApiKey = None,
    tls: flags.UseTls = False,
    ca_file: flags.CaFile = None,
    cert_file: flags.CertFile = None,
    key_file: flags.KeyFile = None,
    server_name: flags.ServerName = None,
    json_output: flags.AsJson = False,
) -> None:
    """Lists what is served: lengths in tokens, engine replicas connected now."""
    security = flags.tls(tls, ca_file, cert_file, key_file, server_name)
    with exit_codes(), Client(target, timeout=timeout, tls=security, api_key=api_key) as client:
        served = client.models()
        if json_output:
            print(as_json(served))
        else:
            show_models(served)


@app.command()
def health(
    service: Annotated[str, typer.Argument(help="A gRPC service's full name. Unset: the server.")] = "",
    target: flags.Target = DEFAULT_TARGET,
    timeout: flags.Timeout = None,
    api_key: flags.ApiKey = None,
    tls: flags.UseTls = False,
    ca_file: flags.CaFile = None,
    cert_file: flags.CertFile = None,
    key_file: flags.KeyFile = None,
    server_name: flags.ServerName = None,
    json_output: flags.AsJson = False,
) -> None:
    """Asks the standard health check; exit code 0 only when it is serving."""
    security = flags.tls(tls, ca_file, cert_file, key_file, server_name)
    with exit_codes(), Client(target, timeout=timeout, tls=security, api_key=api_key) as client:
        state = client.health(service)
        print(as_json(state) if json_output else state.status.value)
        if not state.serving:
            raise typer.Exit(EXIT_FAILED)


def _text_or_input(text: str | None) -> str:
    """The argument, or standard input without its last line break."""
    if text is not None:
        return text
    if sys.stdin.isatty():
        raise typer.BadParameter("give the text, or pipe it to standard input")
    return sys.stdin.read().removesuffix("\n")


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise typer.BadParameter("must be integers separated by commas", param_hint="--token-ids") from None
