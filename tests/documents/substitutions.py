"""All that a document's command is not run as written with, and why. Nothing else is replaced.

Must not know: pages.
"""

import re
from collections.abc import Mapping

# Default ports, and those that documents use for ports that are off by default. Tests run beside other services, so
# each stands for a free one.
PORTS = (50049, 50050, 50051, 50061, 8000, 9090, 9091)
_PORT = re.compile(r"\b(" + "|".join(map(str, PORTS)) + r")\b")

# Names of hosts that are the reader's own.
HOSTS = {"tokenizer-1": "127.0.0.1", "tokenizer-2": "127.0.0.1"}

# Files that are the reader's own, as small as they may be; `my-model` is the default model.
FILES = {
    "conv.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    + "".join(f"2024-01-01 00:00:0{second}.0000000,{20 + second},4\n" for second in range(4)),
    "toolagent.jsonl": "".join(
        f'{{"timestamp": {second * 1000}, "input_length": 520, "output_length": 4, "hash_ids": [1, {second + 2}]}}\n'
        for second in range(3)
    ),
    "sharegpt.json": '[{"conversations": [{"from": "human", "value": "Name three rivers."}, '
    '{"from": "gpt", "value": "The Rhine, the Nile, the Amazon."}]}]',
}

# `make TARGET` with `--dry-run`: the test that runs it, or what it would do to the run that it is part of.
DRY_TARGETS = {
    "test": "this suite is what it runs",
    "lint": "`make test` has run it before this suite",
    "docs": "tests/documents/test_site.py builds the site",
    "protos": "tests/contract/test_protos.py generates and compares them",
    "clean": "it would remove the environment that runs the tests",
}

# In the default suite engines that pages start do not compute (`--simulate`) but for these: the commands are the point
# there (a simulated engine has no adapters), and pages that start none are run against the real model.
COMPUTING = ("README.md", "lora.md")

# Pages whose services start beside those that other pages find running: on any free ports, not on the default ones.
SHARING = ("docs/operating.md",)

# In the default suite a load test takes a second; in the slow group some more.
_SECONDS = re.compile(r"(--duration|-t) (\d+)(s?)\b")
_WARMUP = re.compile(r"--warmup \d+\b")

# Load tests name the default target only when they need another one; here it has another port.
_LOAD = re.compile(r"^tokenwire load (?:run|sweep)\b(?!.*--target).*$", re.MULTILINE)
_LOAD_TARGET = f"sweep --target 127.0.0.1:{PORTS[1]} --duration 5 --warmup 1 --ttft 1 --tpot 0.1"

# Tests within tests are collected, not run.
_PYTEST = re.compile(r"\bpytest -q\b")


def with_ports(code: str, ports: Mapping[int, int]) -> str:
    """Default ports and example hosts are those of the services that run here."""
    for name, address in HOSTS.items():
        code = code.replace(name, address)
    code = _LOAD.sub(_with_target, code).replace("make loadtest", f'make loadtest LOADTEST="{_LOAD_TARGET}"')
    return _PORT.sub(lambda found: str(ports.get(int(found[1]), found[1])), code)


def _with_target(found: re.Match[str]) -> str:
    address = "http://127.0.0.1:8000" if "--kind http" in found[0] else "127.0.0.1:50050"
    return f"{found[0]} --target {address}"


def shortened(code: str, most_s: int) -> str:
    """Load tests take `most_s` seconds at most, and tests within tests are collected only."""
    code = _SECONDS.sub(lambda found: f"{found[1]} {min(int(found[2]), most_s)}{found[3]}", code)
    code = _WARMUP.sub(f"--warmup {most_s / 5:g}", code)
    return _PYTEST.sub("pytest --collect-only -q", code)
