"""What a traceback in a log says: where it happened, never what the variables held."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys, structlog
from service_runtime.logs import configure_logging
configure_logging(level="info", log_format=sys.argv[1], service="test")
def fail(prompt):
    messages = [{"content": prompt}]
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise ValueError("outer") from error
for logger in (structlog.get_logger(), logging.getLogger("a.library")):
    try:
        fail("".join(("SEC", "RET")))
    except ValueError:
        logger.exception("failed")
"""


@pytest.mark.parametrize("log_format", ["json", "console", "auto"])
def test_a_traceback_shows_no_variables(log_format: str) -> None:
    """With the package beside it that would print them all, as a client's installation has."""
    import rich  # noqa: F401

    run = subprocess.run([sys.executable, "-c", PROGRAM, log_format], capture_output=True, text=True, check=True)
    assert run.stderr.count("ValueError: outer") == run.stderr.count("KeyError: 'inner'") == 2
    assert "SECRET" not in run.stderr
    assert "Warning" not in run.stderr
    if log_format != "console":
        assert [json.loads(line)["event"] for line in run.stderr.splitlines()] == ["failed"] * 2
