"""Makes docs/top.svg, the view of `tokenwire top`, from services that run: `python docs/picture_of_top.py HOST:PORT`.

Must not know: what the view shows.
"""

import re
import sys
import time
from pathlib import Path

from rich.console import Console

from tokenwire_client.operator import Operator
from tokenwire_client.top.command import Watch
from tokenwire_client.top.rates import History
from tokenwire_client.top.view import render

TARGET = Path(__file__).with_name("top.svg")
LOOKS = 20
INTERVAL_S = 0.5
MAX_REQUESTS = 12


def main(address: str) -> None:
    """`address` is the operators' port of a tokenizer service. Takes ten seconds, for the curve."""
    with Operator(address) as operator:
        watch = Watch(operator, History(address), MAX_REQUESTS, time.monotonic)
        for _ in range(LOOKS):
            frame = watch.look()
            time.sleep(INTERVAL_S)
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=150, file=nowhere, force_terminal=True, highlight=False)
        console.print(render(frame, MAX_REQUESTS))
        picture = console.export_svg(title="tokenwire top")
    # Without the font that a viewer would fetch from elsewhere.
    TARGET.write_text(re.sub(r"@font-face\s*{[^}]*}\s*", "", picture))


if __name__ == "__main__":
    main(sys.argv[1])
