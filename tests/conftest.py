"""For every test: threads that wait must sleep. Spinning OpenMP threads are 3-8 times slower on shared cores.

The variable is read when torch is imported, so it is set before anything else. And tracebacks are plain, as in a
service: what the log library prints unless it is told otherwise takes seconds, in the event loop of the test.
"""

import os
import signal

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# What a shell runs in the background ignores Ctrl-C, and so would the commands that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import grpc.aio
import pytest
import structlog

# Collecting old channels after the last of them was shut down may hang inside grpc.aio; one use that lasts for
# the whole run keeps it initialised.
grpc.aio.init_grpc_aio()

structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers that run the suite together must know the tests by the same names."""
    changing = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if changing:
        raise pytest.UsageError(f"names that hold an address, which is another one in each process: {changing}")
