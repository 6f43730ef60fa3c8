"""Lets a step run while the next one is planned: a worker's calls on a thread of their own.

Must not know: what a step computes.
"""

import sys
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from engine_service.core.plan import Plan, Result
from engine_service.worker.lora.adapter import Adapter
from engine_service.worker.worker import Worker

# The compute thread comes back from C++ needing the interpreter at once; the default lets others keep it for 5 ms.
_SWITCH_SECONDS = 0.0002


class ThreadedWorker:
    """`submit` returns at once; plans run one after the other, in order. Failures come out of `result`."""

    def __init__(self, worker: Worker) -> None:
        self.info = worker.info
        self._worker = worker
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker")
        self._running: deque[Future[Result]] = deque()
        sys.setswitchinterval(_SWITCH_SECONDS)

    def submit(self, plan: Plan) -> None:
        self._running.append(self._thread.submit(self._execute, plan))

    def result(self) -> Result:
        return self._running.popleft().result()

    def read_adapter(self, folder: Path) -> Adapter:
        return self._worker.read_adapter(folder)

    def install_adapter(self, number: int, adapter: Adapter) -> None:
        """Waits for the plans before, and for this."""
        self._thread.submit(self._worker.install_adapter, number, adapter).result()

    def drop_adapter(self, number: int) -> None:
        self._thread.submit(self._worker.drop_adapter, number).result()

    def close(self) -> None:
        """Waits for what runs, then frees what the worker holds."""
        self._running.clear()
        self._thread.shutdown(cancel_futures=True)
        self._worker.close()

    def _execute(self, plan: Plan) -> Result:
        self._worker.submit(plan)
        return self._worker.result()
