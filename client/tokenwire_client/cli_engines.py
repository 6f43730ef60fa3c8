"""The commands `tokenwire engines`: list, add, remove.

Must not know: gRPC, clients of models.
"""

from typing import Annotated

import typer

from tokenwire_client import cli_options as flags
from tokenwire_client.cli_output import as_json, exit_codes, show_table
from tokenwire_client.operator import DEFAULT_TIMEOUT_S, Operator

app = typer.Typer(help="The engine replicas of a tokenizer service, for its operator.", no_args_is_help=True)

OperatorTarget = Annotated[
    str,
    typer.Option(
        "--operator",
        envvar="TOKENWIRE_OPERATOR",
        help="Host:port for operators (the service's --operator-port).",
    ),
]
Address = Annotated[str, typer.Argument(help="HOST:PORT of an engine service.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds that the call may take.")]


@app.command(name="list")
def list_engines(
    operator: OperatorTarget,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    json_output: flags.AsJson = False,
    tls: flags.UseTls = False,
    ca_file: flags.CaFile = None,
    cert_file: flags.CertFile = None,
    key_file: flags.KeyFile = None,
    server_name: flags.ServerName = None,
) -> None:
    """Lists the engines: who named them, their state, requests that run there."""
    security = flags.tls(tls, ca_file, cert_file, key_file, server_name)
    with exit_codes(), Operator(operator, timeout=timeout, tls=security) as service:
        engines = service.engines()
        if json_output:
            print(as_json(engines))
            return
        rows = [(each.address, each.state, ",".join(each.sources), str(each.live_requests)) for each in engines]
        show_table(("address", "state", "sources", "live_requests"), rows)


@app.command()
def add(
    address: Address,
    operator: OperatorTarget,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    tls: flags.UseTls = False,
    ca_file: flags.CaFile = None,
    cert_file: flags.CertFile = None,
    key_file: flags.KeyFile = None,
    server_name: flags.ServerName = None,
) -> None:
    """Adds an engine until the service's next start."""
    security = flags.tls(tls, ca_file, cert_file, key_file, server_name)
    with exit_codes(), Operator(operator, timeout=timeout, tls=security) as service:
        service.add_engine(address)


@app.command()
def remove(
    address: Address,
    operator: OperatorTarget,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    tls: flags.UseTls = False,
    ca_file: flags.CaFile = None,
    cert_file: flags.CertFile = None,
    key_file: flags.KeyFile = None,
    server_name: flags.ServerName = None,
) -> None:
    """Gives an engine no more requests; those that run there go on."""
    security = flags.tls(tls, ca_file, cert_file, key_file, server_name)
    with exit_codes(), Operator(operator, timeout=timeout, tls=security) as service:
        service.remove_engine(address)
