"""The command that containers ask whether they are well."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from service_runtime.grpc_server import ServiceHealth, bind
from service_runtime.health_check import main

NAME = "tokenwire.test.v1.Service"


@pytest.fixture
async def server() -> AsyncIterator[tuple[ServiceHealth, str]]:
    """A server's health, and its address."""
    server = grpc.aio.server()
    health = ServiceHealth([NAME])
    await health.add_to(server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    yield health, f"127.0.0.1:{port}"
    await server.stop(0)


async def ask(*arguments: str) -> int:
    """In a thread: the command blocks."""
    return await asyncio.to_thread(main, list(arguments))


async def test_it_says_what_the_server_says(
    server: tuple[ServiceHealth, str], capsys: pytest.CaptureFixture[str]
) -> None:
    health, address = server
    assert await ask(address, NAME) == 1
    assert "NOT_SERVING" in capsys.readouterr().err
    assert await ask(address, "live") == 0
    await health.set_serving(True)
    assert await ask(address, NAME) == 0
    assert await ask(address) == 0


async def test_a_name_that_is_not_served_is_not_well(
    server: tuple[ServiceHealth, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert await ask(server[1], "tokenwire.other.v1.Service") == 1
    assert "NOT_FOUND" in capsys.readouterr().err


def test_nobody_there_is_not_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["127.0.0.1:1", "--timeout", "5"]) == 1
    assert "UNAVAILABLE" in capsys.readouterr().err
