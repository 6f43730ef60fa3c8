"""The asyncio client and services that fail, are not there or are several: what is tried again, and what is not."""

import asyncio
import socket
from typing import Any

import grpc
import pytest

from tests.fixtures.fake_tokenizer_service import (
    FakeTokenizerService,
    Refuse,
    Say,
    echo_script,
    echo_text,
    serving,
)
from tokenwire_client.client import AsyncClient
from tokenwire_client.errors import (
    TokenwireError,
    Unavailable,
)
from tokenwire_client.retry import NO_RETRIES, RetryPolicy

SOON = RetryPolicy(attempts=4, first_backoff=0.01, max_backoff=0.02)
GONE = Refuse(grpc.StatusCode.UNAVAILABLE, "no engine")


@pytest.mark.parametrize("failures", [1, 3])
async def test_unavailable_is_tried_again_before_the_first_message(failures: int) -> None:
    """All attempts share one deadline: the clock here runs seven seconds with each failure."""
    now = 0.0

    def jitter() -> float:
        nonlocal now
        now += 7.0
        return 0.5

    retry = RetryPolicy(attempts=4, first_backoff=0.01, max_backoff=0.02, jitter=jitter)
    service = FakeTokenizerService({"p": [*[[GONE]] * failures, echo_script("p")]}, {"Tokenize": [GONE] * failures})
    async with (
        serving(service) as target,
        AsyncClient(target, retry=retry, timeout=30.0, clock=lambda: now) as client,
    ):
        assert (await client.generate("p").result()).text == echo_text("p")
        assert await client.tokenize("a") == (97,)
    for name in ("p", "Tokenize"):
        seen = [call.remaining_s for call in service.calls(name)]
        assert seen == pytest.approx([30.0 - 7.0 * n for n in range(failures + 1)], abs=2.0)


@pytest.mark.parametrize(
    ("script", "retry", "calls"),
    [
        ([GONE], SOON, 4),
        ([GONE], NO_RETRIES, 1),
        ([Say("x"), GONE], SOON, 1),
        ([Refuse(grpc.StatusCode.UNAVAILABLE, "later", (), 60.0)], SOON, 1),
        ([Refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (), 0.01)], SOON, 1),
    ],
)
async def test_when_it_is_not_tried_again(script: list[Any], retry: RetryPolicy, calls: int) -> None:
    service = FakeTokenizerService({"p": [script]})
    async with serving(service) as target, AsyncClient(target, retry=retry) as client:
        with pytest.raises(TokenwireError):
            await client.generate("p").result()
        assert len(service.calls("p")) == calls
        assert sum(client._pool.calls()) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def test_a_service_that_is_down_is_unavailable() -> None:
    async with AsyncClient(f"127.0.0.1:{free_port()}", retry=SOON, timeout=20.0) as client:
        with pytest.raises(Unavailable):
            await client.generate("p").result()
        with pytest.raises(Unavailable):
            await client.health()


async def test_a_service_that_starts_meanwhile_is_found() -> None:
    port = free_port()
    failed = asyncio.Event()

    def jitter() -> float:
        failed.set()
        return 0.5

    retry = RetryPolicy(attempts=50, first_backoff=0.1, max_backoff=0.2, jitter=jitter)
    async with AsyncClient(f"127.0.0.1:{port}", retry=retry, timeout=30.0) as client:
        answer = asyncio.create_task(client.generate("p").result())
        await failed.wait()
        async with serving(FakeTokenizerService(), address=f"127.0.0.1:{port}"):
            assert (await answer).text == echo_text("p")


async def test_replicas_behind_one_name_share_the_work_b115() -> None:
    """B115: two addresses get 30-70 % each; when one stops, the other serves all."""
    services = [FakeTokenizerService(), FakeTokenizerService()]
    async with serving(services[0]) as first:
        async with serving(services[1]) as second:
            client = AsyncClient(f"ipv4:{first},{second}", retry=SOON)
            while not all(service.calls("warm") for service in services):
                await client.generate("warm").result()
            for number in range(100):
                await client.generate(f"p{number}").result()
            shares = [sum(bool(s.calls(f"p{n}")) for n in range(100)) for s in services]
            assert sum(shares) == 100
            assert 30 <= shares[0] <= 70
        for number in range(20):
            await client.generate(f"q{number}").result()
        assert all(services[0].calls(f"q{number}") for number in range(20))
        await client.close()
