"""docs/known-faults.md: each test it names for a fault exists and names the fault.

Must not know: what the faults are.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| \d+ \| (B\d{3}) \| (.*) \|$", (ROOT / "docs" / "known-faults.md").read_text(), re.M)
    assert len(rows) >= 60
    for fault, tests in rows:
        for path, name in re.findall(r"`([^`:]+)::(\w+)`", tests):
            text = (ROOT / path).read_text()
            assert fault in text, (fault, path)
            assert f"def {name}(" in text, (fault, path, name)
