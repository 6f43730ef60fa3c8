"""Sends requests so that always `concurrency` of them are in flight, and notes when tokens arrive.

Must not know: what a target is beyond `send`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

from benchmarks.serving.records import Record
from benchmarks.serving.workload import BenchRequest

Clock = Callable[[], float]
OnTokens = Callable[[int], None]
Send = Callable[[BenchRequest, OnTokens], Awaitable[int | None]]
"""Serves one request: calls back with the number of tokens of each message as it arrives; returns how many
tokens the server says it generated. Raises when there is no whole answer."""

REQUEST_TIMEOUT_S = 180.0


async def run_closed_loop(
    send: Send,
    requests: Sequence[BenchRequest],
    concurrency: int,
    clock: Clock,
    timeout_s: float = REQUEST_TIMEOUT_S,
) -> list[Record]:
    """A record of each request; failures are records too."""
    if concurrency < 1:
        raise ValueError(f"concurrency {concurrency} is below 1")
    left = iter(requests)
    records: list[Record] = []
    clients = (_client(send, left, records, clock, timeout_s) for _ in range(concurrency))
    await asyncio.gather(*clients)
    return records


async def _client(
    send: Send, left: Iterator[BenchRequest], records: list[Record], clock: Clock, timeout_s: float
) -> None:
    for request in left:
        records.append(await record_one(send, request, clock, timeout_s))


async def record_one(send: Send, request: BenchRequest, clock: Clock, timeout_s: float = REQUEST_TIMEOUT_S) -> Record:
    """Sends one request and notes what happens."""
    arrivals: list[tuple[float, int]] = []
    tokens: int | None = None
    error: str | None = None
    sent = clock()
    try:
        async with asyncio.timeout(timeout_s):
            tokens = await send(request, lambda count: arrivals.append((clock(), count)))
    except TimeoutError:
        error = f"no whole answer within {timeout_s:.0f} s"
    except Exception as failure:  # whatever a target's client raises is that request's error
        error = f"{type(failure).__name__}: {failure}"
    return Record(request.key, sent, tuple(arrivals), clock(), tokens, error)
