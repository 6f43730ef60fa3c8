"""The Compose stack for real: built, started, asked, scraped, scaled to two engines, ended (docs/compose.md)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 3000


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_the_stack_runs_as_an_operator_would_run_it() -> None:
    """Needs Docker, or STANDIN: deploy/check/run.sh says what that is."""
    command = [str(ROOT / "deploy" / "check" / "run.sh")]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "the stack is as it should be" in done.stdout
