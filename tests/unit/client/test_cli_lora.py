"""What `tokenwire lora list` shows of each engine."""

import pytest

from tokenwire_client.cli_lora import list_rows
from tokenwire_client.operator_adapters import Adapter, EngineAdapters

RED = Adapter("red", "0123456789abcdef", in_memory=True)
GREEN = Adapter("green", "fedcba9876543210", in_memory=False)


@pytest.mark.parametrize(
    ("state", "shown"),
    [("connected", "missing"), ("draining", "missing"), ("connecting", "connecting"), ("leaving", "leaving")],
)
def test_every_engine_stands_under_every_name(state: str, shown: str) -> None:
    engines = (EngineAdapters("a:1", "connected", (RED, GREEN)), EngineAdapters("b:1", state, ()))
    assert list(list_rows(engines)) == [
        ("green", "a:1", "on disk", "fedcba987654"),
        ("green", "b:1", shown, ""),
        ("red", "a:1", "in memory", "0123456789ab"),
        ("red", "b:1", shown, ""),
    ]


def test_the_same_name_with_other_contents_is_seen() -> None:
    other = Adapter("red", "ffff", in_memory=True)
    engines = (EngineAdapters("a:1", "connected", (RED,)), EngineAdapters("b:1", "connected", (other,)))
    assert [row[3] for row in list_rows(engines)] == ["0123456789ab", "ffff"]
