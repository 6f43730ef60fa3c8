"""The commands for operators of an engine: `steps` and `drain`.

Must not know: gRPC, what is in the recorded steps.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenwire_client import cli_options as flags
from tokenwire_client.cli_output import EXIT_FAILED, as_json, exit_codes
from tokenwire_client.tls import Tls

if TYPE_CHECKING:
    from tokenwire_client.engine_operator import EngineOperator

_TIMEOUT_S = 60.0
_MEGABYTE = 1_000_000

EngineTarget = Annotated[
    str, typer.Option("--engine", envvar="TOKENWIRE_ENGINE", help="Host:port of the engine service (its gRPC port).")
]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds that the call may take.")]


def steps(
    engine: EngineTarget,
    out: Annotated[Path, typer.Option("--out", help="File to write; an old one is replaced.")] = Path("steps.json"),
    last: Annotated[int | None, typer.Option("--last", min=1, help="Only so many steps. Unset: all recorded.")] = None,
    max_megabytes: Annotated[int, typer.Option("--max-megabytes", min=1, help="Give up beyond this size.")] = 200,
    timeout: Timeout = _TIMEOUT_S,
    tls: flags.UseTls = False,
    ca_file: flags.CaFile = None,
    cert_file: flags.CertFile = None,
    key_file: flags.KeyFile = None,
    server_name: flags.ServerName = None,
) -> None:
    """Fetches an engine's last steps as a file for Perfetto (ui.perfetto.dev) or chrome://tracing."""
    security = flags.tls(tls, ca_file, cert_file, key_file, server_name)
    with exit_codes(), _operator(engine, timeout, security) as service:
        size = _write(service.steps(last), out, max_megabytes * _MEGABYTE)
        typer.echo(f"{out} ({size:,} bytes)")


def drain(
    engine: EngineTarget,
    grace: Annotated[
        float | None, typer.Option("--grace", min=0, help="Seconds for running requests. Unset: the engine's setting.")
    ] = None,
    timeout: Timeout = _TIMEOUT_S,
    json_output: flags.AsJson = False,
    tls: flags.UseTls = False,
    ca_file: flags.CaFile = None,
    cert_file: flags.CertFile = None,
    key_file: flags.KeyFile = None,
    server_name: flags.ServerName = None,
) -> None:
    """Ends an engine service: no new requests, running ones finish. Prints how many still run."""
    security = flags.tls(tls, ca_file, cert_file, key_file, server_name)
    with exit_codes(), _operator(engine, timeout, security) as service:
        live = service.drain(grace)
        print(as_json({"engine": engine, "live_requests": live}) if json_output else f"draining live_requests={live}")


def _operator(target: str, timeout: float, tls: Tls | None) -> "EngineOperator":
    # Only these commands need the engine's messages.
    from tokenwire_client.engine_operator import EngineOperator

    return EngineOperator(target, timeout=timeout, tls=tls)


def _write(parts: Iterable[bytes], out: Path, most_bytes: int) -> int:
    """Bytes written. The file appears when it is whole, or not at all."""
    unfinished = out.with_name(out.name + ".part")
    size = 0
    try:
        with unfinished.open("wb") as file:
            for part in parts:
                size += len(part)
                if size > most_bytes:
                    raise _failed(f"the recorded steps are over {most_bytes:,} bytes: ask for fewer with --last")
                file.write(part)
        unfinished.replace(out)
    except OSError as error:
        raise _failed(f"cannot write {out}: {error.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)
    return size


def _failed(reason: str) -> typer.Exit:
    typer.echo(f"tokenwire: {reason}", err=True)
    return typer.Exit(EXIT_FAILED)
