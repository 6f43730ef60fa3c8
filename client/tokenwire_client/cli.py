"""Entry point of the `tokenwire` command.

Must not know: what the commands do. It says what is missing when the command's packages are not installed.
"""


def main() -> None:
    """Runs the command line; exit codes: 0 done, 2 usage or invalid request, 130 interrupted, 1 otherwise."""
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
