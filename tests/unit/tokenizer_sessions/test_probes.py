"""Why no session opens, over real sockets: said once, in plain words, without hosts and paths."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog

from service_runtime.tls import Dialer, LinkTls, ServerTls
from service_runtime.tls_files import LinkTlsFiles, ServerTlsFiles
from tests.fixtures import fake_engine as fe
from tests.fixtures.certificates import Authority
from tests.fixtures.stack import until
from tokenizer_service.engines.connection import ConnectionLimits, EngineConnection
from tokenizer_service.engines.matching import ModelCheck, TokenizerIdentity
from tokenwire.engine.v1 import engine_pb2

MODEL = engine_pb2.GetModelInfoResponse(vocab_size=100, max_model_len=50, tokenizer_fingerprint="abc")
Links = Callable[[Authority, Authority], Dialer]


def link(authority: Authority, name: str | None = None) -> Dialer:
    return Dialer((), LinkTls(LinkTlsFiles(authority.ca, None, name)))


def connection(address: str, dialer: Dialer) -> EngineConnection:
    check = ModelCheck(TokenizerIdentity("abc", 100), allow_mismatch=False)
    limits = ConnectionLimits(open_timeout_s=0.15, first_backoff_s=0.01, max_backoff_s=0.02)
    return EngineConnection(address, "test", check, limits, dialer, lambda: 0.5, lambda: None)


@pytest.mark.parametrize(
    ("kind", "dialer", "words"),
    [
        ("tls", lambda mine, other: link(other), "its certificate is not accepted: unable to get local issuer"),
        ("tls", lambda mine, other: link(mine, "other.example"), "its certificate is for another name"),
        ("mutual", lambda mine, other: link(mine), "it closes the connection at once"),
        ("tls", lambda mine, other: Dialer(()), "it closes the connection at once"),
        ("plain", lambda mine, other: link(mine), "it does not speak TLS"),
        ("none", lambda mine, other: Dialer(()), "nothing listens at its address"),
    ],
)
async def test_trouble_is_named_once(tmp_path: Path, kind: str, dialer: Links, words: str) -> None:
    mine, other = Authority(tmp_path), Authority(tmp_path, "other")
    server = mine.server("server")
    files = ServerTlsFiles(server.cert, server.key, mine.ca if kind == "mutual" else None)
    engine = fe.FakeEngine(MODEL, fe.until_cancelled)
    await engine.start(tls=ServerTls(files) if kind in ("tls", "mutual") else None)
    if kind == "none":
        await engine.stop()
    made = connection(engine.address, dialer(mine, other))
    attempts = 0

    def count(_logger: object, _method: str, event: dict[str, object]) -> dict[str, object]:
        nonlocal attempts
        attempts += event["event"] == "engine_session_failed"
        return event

    with structlog.testing.capture_logs(processors=[count]) as logs:
        running = asyncio.create_task(made.run())
        try:
            await until(lambda: attempts >= 4, 15.0)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await engine.stop()
    told = [log for log in logs if log["log_level"] == "warning"]
    assert [log["event"] for log in told] == ["engine_unreachable"]
    assert told[0]["reason"].startswith(words)
    assert str(tmp_path) not in str(told)
    assert "OPENSSL" not in str(told)


async def test_trouble_that_comes_back_is_told_again() -> None:
    """An engine that starts later, and goes; nothing is said of a short absence."""
    engine = fe.FakeEngine(MODEL, fe.until_cancelled)
    await engine.start()
    made = connection(engine.address, Dialer(()))
    with structlog.testing.capture_logs() as logs:
        running = asyncio.create_task(made.run())
        try:
            for number in (1, 2):
                await until(lambda: made.is_connected, 15.0)
                await engine.stop()
                await until(lambda n=number: sum(log["event"] == "engine_unreachable" for log in logs) == n, 15.0)
                await engine.start(engine.port)
            await until(lambda: made.is_connected, 15.0)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await engine.stop()
