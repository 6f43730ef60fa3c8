"""What it costs to be watched: throughput with and without scraping both services every second, in turns.

`python -m benchmarks.serving.scrape_overhead [--pairs N] [--seconds S]`. The services and a closed loop of clients run
all the time; windows with and without a scraper take turns (A B, B A, ...), and each counts the tokens that arrive in
it. The scraper asks as Prometheus does: OpenMetrics, compressed. Prints the ratio of the medians; the limit is 1 %.
Must not know: what the metrics are.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.serving.closed_loop import Send
from benchmarks.serving.grpc_clients import tokenizer_client
from benchmarks.serving.machine import BusyMeter
from benchmarks.serving.processes import GroupProcess
from benchmarks.serving.services import logged_event, start_services
from benchmarks.serving.workload import BenchRequest, Shape, WordList, make_workload
from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder

LIMIT = 0.01
_START_S = 180.0
_ANSWER_S = 10.0
_HEADERS = {
    "Accept": "application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Accept-Encoding": "gzip",
}
_REQUESTS = 4096


@dataclass(frozen=True, slots=True)
class Window:
    """`busy`: part of all cores that other processes used. `scrape_ms` and `bytes`: of both services together."""

    is_scraped: bool
    tokens_per_s: float
    busy: float
    scrape_ms: float
    num_bytes: int


@dataclass(slots=True)
class Scraper:
    """Asks every page once a second, as cheaply as it can: who watches is on another machine, and here it is not."""

    urls: Sequence[str]
    every_s: float
    times_ms: list[float] = field(default_factory=list)
    num_bytes: int = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            begin = time.perf_counter()
            sizes = [await _get(url) for url in self.urls]
            self.times_ms.append((time.perf_counter() - begin) * 1e3)
            self.num_bytes = sum(sizes)
            await asyncio.sleep(max(0.0, self.every_s - (time.perf_counter() - begin)))


async def _get(url: str) -> int:
    """Bytes of the answer's body."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        head = [f"GET {parts.path} HTTP/1.0", f"Host: {parts.netloc}", *(f"{k}: {v}" for k, v in _HEADERS.items())]
        writer.write("\r\n".join([*head, "", ""]).encode())
        status, _, rest = (await asyncio.wait_for(reader.read(), _ANSWER_S)).partition(b"\r\n")
    finally:
        writer.close()
    if status.split()[1:2] != [b"200"]:
        raise RuntimeError(f"{url} answered {status.decode(errors='replace')!r}")
    return len(rest.partition(b"\r\n\r\n")[2])


@dataclass(slots=True)
class Load:
    """Clients that are always `concurrency`, and the tokens that they have got so far."""

    send: Send
    requests: Iterator[BenchRequest]
    tokens: int = 0

    def count(self, tokens: int) -> None:
        self.tokens += tokens

    async def client(self) -> None:
        for request in self.requests:
            await self.send(request, self.count)


async def _window(load: Load, scraper: Scraper | None, seconds: float, cpu_s: Callable[[], float]) -> Window:
    own, meter, before, begin = cpu_s(), BusyMeter(), load.tokens, time.perf_counter()
    async with AsyncExitStack() as stack:
        if scraper is not None:
            await stack.enter_async_context(scraper.running())
        await asyncio.sleep(seconds)
        rate = (load.tokens - before) / (time.perf_counter() - begin)
    busy = meter.look(cpu_s() - own)
    if scraper is None:
        return Window(False, rate, busy, 0.0, 0)
    return Window(True, rate, busy, statistics.median(scraper.times_ms), scraper.num_bytes)


async def run(options: argparse.Namespace, logs: Path) -> list[Window]:
    """The windows in the order in which they were measured, printed as they end."""
    model = resolve_model_folder(DEFAULT_MODEL)
    processes: list[GroupProcess] = []
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    deadline = time.monotonic() + _START_S
    async with AsyncExitStack() as stack:

        def started(process: GroupProcess) -> None:
            processes.append(process)
            stack.push_async_callback(process.stop)

        services = await start_services(
            model, logs / "run.log", ("--threads", str(options.threads)), (), environment, deadline, started
        )
        urls = [await _metrics_url(process, deadline) for process in processes]
        send = await stack.enter_async_context(tokenizer_client(services.tokenizer))
        shape = Shape(options.prompt_tokens, options.output_tokens, spread=0.5)
        requests = make_workload(WordList.of_folder(model), shape, _REQUESTS, seed=1)
        load = Load(send, itertools.cycle(requests))
        clients = [asyncio.create_task(load.client()) for _ in range(options.concurrency)]
        try:
            return await _measure(load, urls, options, lambda: sum(process.cpu_s() for process in processes), clients)
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


async def _metrics_url(process: GroupProcess, deadline: float) -> str:
    return f"http://127.0.0.1:{(await logged_event(process, 'listening', deadline))['metrics_port']}/metrics"


async def _measure(
    load: Load,
    urls: Sequence[str],
    options: argparse.Namespace,
    cpu_s: Callable[[], float],
    clients: "Sequence[asyncio.Task[None]]",
) -> list[Window]:
    await asyncio.sleep(options.warm_up)
    windows: list[Window] = []
    for number in range(options.pairs):
        for is_scraped in (False, True) if number % 2 == 0 else (True, False):
            scraper = Scraper(urls, options.every) if is_scraped else None
            windows.append(await _window(load, scraper, options.seconds, cpu_s))
            for client in clients:
                if client.done():
                    client.result()  # raises what it failed with
            print(_line(windows[-1]), flush=True)
    return windows


def _line(window: Window) -> str:
    name = "scraped" if window.is_scraped else "plain"
    text = f"{name:8} {window.tokens_per_s:8.1f} tokens/s  neighbours {window.busy:.2f}"
    if not window.is_scraped:
        return text
    return f"{text}  a scrape of both {window.scrape_ms:.1f} ms, {window.num_bytes:,} bytes"


def overhead(windows: Sequence[Window]) -> float:
    """The part of the throughput that scraping costs, by the medians; below 0 where it is lost in the noise."""
    rates = {kind: [w.tokens_per_s for w in windows if w.is_scraped is kind] for kind in (False, True)}
    return 1 - statistics.median(rates[True]) / statistics.median(rates[False])


def main(arguments: Sequence[str]) -> int:
    """0 when the limit holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15, help="windows of each kind")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a window")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between scrapes")
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds before the first window")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the engine")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as logs:
        windows = asyncio.run(run(options, Path(logs)))
    cost = overhead(windows)
    plain, scraped = (
        statistics.median(w.tokens_per_s for w in windows if w.is_scraped is kind) for kind in (False, True)
    )
    verdict = "ok" if cost <= LIMIT else "MISSED"
    print(f"medians {plain:.1f} and {scraped:.1f} tokens/s, ratio {scraped / plain:.4f}: {cost:+.2%} ({verdict})")
    return 0 if cost <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
