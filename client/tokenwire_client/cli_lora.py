"""The commands `tokenwire lora`: load, unload, list.

Must not know: gRPC, clients of models.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from tokenwire_client import cli_options as flags
from tokenwire_client.cli_engines import OperatorTarget, Timeout
from tokenwire_client.cli_output import EXIT_FAILED, as_json, exit_codes, show_table
from tokenwire_client.operator import DEFAULT_TIMEOUT_S, Operator
from tokenwire_client.operator_adapters import EngineAdapters, EngineOutcome

app = typer.Typer(help="LoRA adapters on all engines of a tokenizer service, for its operator.", no_args_is_help=True)

_LOAD_TIMEOUT_S = 60.0
_SHOWN_DIGITS = 12

Name = Annotated[str, typer.Argument(help="Name of the adapter: of its folder below the engines' --lora-dir.")]


@app.command()
def load(
    name: Name,
    operator: OperatorTarget,
    timeout: Timeout = _LOAD_TIMEOUT_S,
    json_output: flags.AsJson = False,
    tls: flags.UseTls = False,
    ca_file: flags.CaFile = None,
    cert_file: flags.CertFile = None,
    key_file: flags.KeyFile = None,
    server_name: flags.ServerName = None,
) -> None:
    """Loads an adapter, again if it is there, on every connected engine. Exit code 1 if one of them refuses."""
    security = flags.tls(tls, ca_file, cert_file, key_file, server_name)
    with exit_codes(), Operator(operator, timeout=timeout, tls=security) as service:
        _show(service.load_adapter(name), json_output)


@app.command()
def unload(
    name: Name,
    operator: OperatorTarget,
    timeout: Timeout = _LOAD_TIMEOUT_S,
    json_output: flags.AsJson = False,
    tls: flags.UseTls = False,
    ca_file: flags.CaFile = None,
    cert_file: flags.CertFile = None,
    key_file: flags.KeyFile = None,
    server_name: flags.ServerName = None,
) -> None:
    """Makes every connected engine forget an adapter. Exit code 1 if one of them refuses or does not have it."""
    security = flags.tls(tls, ca_file, cert_file, key_file, server_name)
    with exit_codes(), Operator(operator, timeout=timeout, tls=security) as service:
        _show(service.unload_adapter(name), json_output)


@app.command(name="list")
def list_adapters(
    operator: OperatorTarget,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    json_output: flags.AsJson = False,
    tls: flags.UseTls = False,
    ca_file: flags.CaFile = None,
    cert_file: flags.CertFile = None,
    key_file: flags.KeyFile = None,
    server_name: flags.ServerName = None,
) -> None:
    """Lists each adapter on each engine: in memory, on disk (read when wanted), or missing there."""
    security = flags.tls(tls, ca_file, cert_file, key_file, server_name)
    with exit_codes(), Operator(operator, timeout=timeout, tls=security) as service:
        engines = service.adapters()
        if json_output:
            print(as_json(engines))
        else:
            show_table(("adapter", "engine", "state", "fingerprint"), list(list_rows(engines)))


def _show(outcomes: Sequence[EngineOutcome], json_output: bool) -> None:
    if json_output:
        print(as_json(outcomes))
    else:
        rows = [(each.address, each.error.value if each.error else "ok", each.message) for each in outcomes]
        show_table(("engine", "outcome", "message"), rows)
    if any(each.error is not None for each in outcomes):
        raise typer.Exit(EXIT_FAILED)


def list_rows(engines: Sequence[EngineAdapters]) -> Iterator[tuple[str, str, str, str]]:
    """Every engine under every name, so that one that lacks it is seen."""
    known = [{adapter.name: adapter for adapter in engine.adapters} for engine in engines]
    for name in sorted({name for names in known for name in names}):
        for engine, names in zip(engines, known, strict=True):
            adapter = names.get(name)
            if adapter is None:
                yield name, engine.address, _absence(engine), ""
            else:
                state = "in memory" if adapter.in_memory else "on disk"
                yield name, engine.address, state, adapter.fingerprint[:_SHOWN_DIGITS]


def _absence(engine: EngineAdapters) -> str:
    """Of an engine without a session it is not known."""
    return "missing" if engine.state in ("connected", "draining") else engine.state
