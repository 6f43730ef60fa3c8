"""What scraping costs, from windows; a scrape as Prometheus does it."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry, Counter

from benchmarks.serving.scrape_overhead import Scraper, Window, overhead
from service_runtime.metrics import start_metrics_server


def test_the_overhead_is_that_of_the_medians() -> None:
    plain = [Window(False, rate, 0.0, 0.0, 0) for rate in (100.0, 102.0, 10.0)]
    scraped = [Window(True, rate, 0.0, 1.0, 10) for rate in (99.0, 98.0, 500.0)]
    assert overhead([*plain, *scraped]) == pytest.approx(0.01)


async def test_the_scraper_reads_whole_pages_again_and_again() -> None:
    registry = CollectorRegistry()
    Counter("seen", "A counter.", registry=registry).inc()
    server = start_metrics_server(registry, "127.0.0.1", 0, lambda: True)
    try:
        scraper = Scraper([f"http://127.0.0.1:{server.port}/metrics"], every_s=0.0)
        async with scraper.running():
            while len(scraper.times_ms) < 3:  # noqa: ASYNC110 (its own task)
                await asyncio.sleep(0.001)
    finally:
        server.close()
    assert scraper.num_bytes > 20
