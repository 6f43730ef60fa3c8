"""Bounded threads for work on text (templates, encoding, decoding) that would hold up the event loop.

Must not know: what the work is.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from tokenizer_service.engines.refusal import Refusal, RefusalCode

T = TypeVar("T")


class EncodePool:
    """`num_threads` workers behind a queue of at most `max_queued` jobs. Used from one event loop.

    A job whose caller is cancelled leaves the queue at once; one that already runs is finished and dropped.
    """

    def __init__(self, num_threads: int, max_queued: int) -> None:
        self._max_queued = max_queued
        self._jobs: OrderedDict[int, _Job] = OrderedDict()
        self._changed = threading.Condition()
        self._num_busy = 0
        self._next_job = 0
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"encode-{number}", daemon=True) for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_queued(self) -> int:
        return len(self._jobs)

    async def run(self, function: Callable[[], T]) -> T | Refusal:
        """The result of `function` in a thread; a refusal when the queue is full. Raises what it raises."""
        loop = asyncio.get_running_loop()
        job = _Job(function, loop, loop.create_future())
        number = self._enqueue(job)
        if isinstance(number, Refusal):
            return number
        try:
            result: T | Refusal = await job.future
            return result
        finally:
            with self._changed:
                self._jobs.pop(number, None)

    def _enqueue(self, job: "_Job") -> int | Refusal:
        with self._changed:
            if self._is_closed:
                return _closed()
            idle = len(self._threads) - self._num_busy
            if len(self._jobs) >= self._max_queued + idle:
                return Refusal(
                    RefusalCode.RESOURCE_EXHAUSTED,
                    f"{len(self._jobs):,} texts wait to be encoded, the limit is {self._max_queued:,}",
                    retry_after_s=1.0,
                )
            self._next_job += 1
            self._jobs[self._next_job] = job
            self._changed.notify()
            return self._next_job

    def _work(self) -> None:
        while (job := self._take()) is not None:
            job.run()
            with self._changed:
                self._num_busy -= 1
            del job  # its text must not live until the next one comes

    def _take(self) -> "_Job | None":
        with self._changed:
            while not self._jobs and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            self._num_busy += 1
            return self._jobs.popitem(last=False)[1]

    def close(self) -> None:
        """Refuses what waits, lets running jobs finish, ends the threads."""
        with self._changed:
            self._is_closed = True
            waiting = list(self._jobs.values())
            self._jobs.clear()
            self._changed.notify_all()
        for job in waiting:
            job.settle(_closed(), None)
        for thread in self._threads:
            thread.join()


def _closed() -> Refusal:
    return Refusal(RefusalCode.UNAVAILABLE, "the service is shutting down", retry_after_s=1.0)


class _Job:
    """A function, and the future of the loop that waits for it."""

    __slots__ = ("_function", "_loop", "future")

    def __init__(
        self, function: Callable[[], Any], loop: asyncio.AbstractEventLoop, future: "asyncio.Future[Any]"
    ) -> None:
        self._function = function
        self._loop = loop
        self.future = future

    def run(self) -> None:
        """In a worker thread. The error, whatever it is, belongs to the one who asked."""
        try:
            result = self._function()
        except Exception as error:
            self._loop.call_soon_threadsafe(self.settle, None, error)
        else:
            self._loop.call_soon_threadsafe(self.settle, result, None)

    def settle(self, result: object, error: Exception | None) -> None:
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)
