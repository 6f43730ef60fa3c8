"""Entry point of the `tokenwire` command.

Must not know: what the commands do. It says what is missing when the command's packages are not installed.
"""

import os


def main() -> None:
    """Runs the command line; exit codes: 0 done, 2 usage or invalid request, 130 interrupted, 1 otherwise."""
    # gRPC's own log lines would land between the words; failures are reported by the command.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from tokenwire_client.cli_app import run
    except ModuleNotFoundError as missing:
        package = str(missing.name).partition(".")[0]
        if package not in {"rich", "typer"}:
            raise
        raise SystemExit(f"tokenwire: the command needs {package}: pip install 'tokenwire[client]'") from None
    run()


if __name__ == "__main__":
    main()
