"""TLS of servers and links over real sockets: who gets in, what new files change, and files that cannot be used."""

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service_runtime.grpc_server import ServiceHealth, bind, server_options
from service_runtime.tls import BadTls, Dialer, LinkTls, ServerTls
from service_runtime.tls_files import LinkTlsFiles, ServerTlsFiles, link_files, server_files
from tests.fixtures.certificates import Authority, Identity

ONE_CONNECTION_EACH = [("grpc.use_local_subchannel_pool", 1)]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def serving(files: ServerTlsFiles) -> AsyncIterator[str]:
    """A gRPC server with nothing but its health."""
    server = grpc.aio.server(options=server_options(1 << 20))
    await ServiceHealth([]).add_to(server)
    port = bind(server, "127.0.0.1", 0, ServerTls(files))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def ask(address: str, files: LinkTlsFiles | None) -> Any:
    """The code of a health check over a connection of its own; OK when it was answered."""
    dialer = Dialer(ONE_CONNECTION_EACH, None if files is None else LinkTls(files))
    async with dialer.open(address, dialer.credentials()) as channel:
        call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        return await call.code()


async def greeted_by(context: ssl.SSLContext, port: int) -> str:
    """The organization in the certificate of the TLS server on `port`, once it said hello; empty: it did not."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        found: Any = writer.get_extra_info("peercert")
        # With TLS 1.3 a client learns of its refusal only now.
        hello = await reader.read()
        writer.close()
    except (ssl.SSLError, ConnectionError):
        return ""
    names = [value for part in found["subject"] for name, value in part if name == "organizationName"]
    return str(names[0]) if hello == b"hello" else ""


async def test_only_clients_that_trust_the_authority_get_through(authority: Authority, tmp_path: Path) -> None:
    mine = authority.server("server")
    async with serving(ServerTlsFiles(mine.cert, mine.key)) as address:
        assert await ask(address, LinkTlsFiles(authority.ca)) is grpc.StatusCode.OK
        assert await ask(address, None) is grpc.StatusCode.UNAVAILABLE
        stranger = Authority(tmp_path, "stranger")
        assert await ask(address, LinkTlsFiles(stranger.ca)) is grpc.StatusCode.UNAVAILABLE


async def test_mutual_tls_wants_a_certificate_of_the_client_authority(authority: Authority, tmp_path: Path) -> None:
    mine, stranger = authority.server("server"), Authority(tmp_path, "stranger")
    good, bad = authority.client("good"), stranger.client("bad")
    async with serving(ServerTlsFiles(mine.cert, mine.key, authority.ca)) as address:
        assert await ask(address, LinkTlsFiles(authority.ca, (good.cert, good.key))) is grpc.StatusCode.OK
        assert await ask(address, LinkTlsFiles(authority.ca)) is grpc.StatusCode.UNAVAILABLE
        assert await ask(address, LinkTlsFiles(authority.ca, (bad.cert, bad.key))) is grpc.StatusCode.UNAVAILABLE


async def test_the_server_name_is_what_the_certificate_must_be_for(authority: Authority) -> None:
    mine = authority.server("server", "engine.internal")
    async with serving(ServerTlsFiles(mine.cert, mine.key)) as address:
        assert await ask(address, LinkTlsFiles(authority.ca)) is grpc.StatusCode.UNAVAILABLE
        named = LinkTlsFiles(authority.ca, server_name="engine.internal")
        assert await ask(address, named) is grpc.StatusCode.OK


async def test_a_new_connection_sees_the_new_certificate_and_an_old_one_lives_on(
    authority: Authority, tmp_path: Path
) -> None:
    mine, successor = authority.server("server"), Authority(tmp_path, "successor")
    async with serving(ServerTlsFiles(mine.cert, mine.key)) as address:
        dialer = Dialer(ONE_CONNECTION_EACH, LinkTls(LinkTlsFiles(authority.ca)))
        async with dialer.open(address, dialer.credentials()) as old:
            stub = health_pb2_grpc.HealthStub(old)
            await stub.Check(health_pb2.HealthCheckRequest())
            mine.replace(successor.server("server"))
            assert await ask(address, LinkTlsFiles(successor.ca)) is grpc.StatusCode.OK
            assert await ask(address, LinkTlsFiles(authority.ca)) is grpc.StatusCode.UNAVAILABLE
            await stub.Check(health_pb2.HealthCheckRequest())


async def test_a_bad_change_keeps_the_certificate_and_is_logged_once(authority: Authority) -> None:
    mine, other = authority.server("server"), authority.server("other")
    async with serving(ServerTlsFiles(mine.cert, mine.key)) as address:
        with structlog.testing.capture_logs() as logs:
            shutil.copyfile(other.key, mine.key)
            for _ in range(3):
                assert await ask(address, LinkTlsFiles(authority.ca)) is grpc.StatusCode.OK
            mine.replace(other)
            assert await ask(address, LinkTlsFiles(authority.ca)) is grpc.StatusCode.OK
    failed = [line for line in logs if line["event"] == "tls_reload_failed"]
    assert len(failed) == 1
    assert "does not belong" in failed[0]["reason"]
    assert "tls_reloaded" in [line["event"] for line in logs]


async def test_http_contexts_change_certificate_and_client_authority(authority: Authority, tmp_path: Path) -> None:
    """Of a listener that stays; a client authority that was taken away lets nobody in any more."""
    mine, client = authority.server("first"), authority.client("client")
    client_ca = shutil.copyfile(authority.ca, tmp_path / "clients.pem")
    context = ServerTls(ServerTlsFiles(mine.cert, mine.key, client_ca)).ssl_context()

    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        trust = ssl.create_default_context(cafile=authority.ca)
        trust.load_cert_chain(client.cert, client.key)
        assert await greeted_by(trust, port) == "first"
        mine.replace(authority.server("second"))
        assert await greeted_by(trust, port) == "second"
        shutil.copyfile(Authority(tmp_path, "stranger").ca, client_ca)
        assert await greeted_by(trust, port) == ""


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
def test_old_protocols_are_off(authority: Authority, version: ssl.TLSVersion) -> None:
    mine = authority.server("server")
    assert ServerTls(ServerTlsFiles(mine.cert, mine.key)).ssl_context().minimum_version > version


def test_a_link_has_the_same_credentials_until_its_files_change(authority: Authority, tmp_path: Path) -> None:
    client = authority.client("client")
    link = LinkTls(LinkTlsFiles(authority.ca, (client.cert, client.key)))
    first = link.credentials()
    assert link.credentials() is first
    client.replace(Authority(tmp_path, "other").client("client"))
    assert link.credentials() is not first


def spoil(way: str, mine: Identity, authority: Authority) -> str:
    """Makes the files unusable; a word that the complaint must hold."""
    if way == "missing":
        mine.key.unlink()
        return "No such file"
    if way == "garbage":
        mine.cert.write_text("no certificate")
        return "PEM"
    if way == "mismatch":
        shutil.copyfile(authority.server("other").key, mine.key)
        return "does not belong"
    mine.key.write_bytes(_encrypted(mine.key.read_bytes()))
    return "encrypted"


def _encrypted(key: bytes) -> bytes:
    from cryptography.hazmat.primitives import serialization as form

    loaded = form.load_pem_private_key(key, None)
    return loaded.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.BestAvailableEncryption(b"secret"))


@pytest.mark.parametrize("way", ["missing", "garbage", "mismatch", "encrypted"])
def test_files_that_cannot_be_used_are_named(authority: Authority, way: str) -> None:
    mine = authority.server("server")
    word = spoil(way, mine, authority)
    for make in (
        lambda: ServerTls(ServerTlsFiles(mine.cert, mine.key)),
        lambda: LinkTls(LinkTlsFiles(authority.ca, (mine.cert, mine.key))),
    ):
        with pytest.raises(BadTls) as complaint:
            make()
        assert word in str(complaint.value)
        assert str(mine.cert.parent) in str(complaint.value)


def test_an_authority_that_cannot_be_used_is_named(authority: Authority) -> None:
    mine = authority.server("server")
    authority.ca.write_text("nothing")
    for make in (
        lambda: ServerTls(ServerTlsFiles(mine.cert, mine.key, authority.ca)),
        lambda: LinkTls(LinkTlsFiles(authority.ca)),
    ):
        with pytest.raises(BadTls, match=r"ca\.pem does not hold certificates"):
            make()


def test_settings_that_make_no_sense_together(tmp_path: Path) -> None:
    file = tmp_path / "file"
    assert server_files(None, None, None) is link_files(None, None, None, None) is None
    for server in ((file, None, None), (None, file, None), (None, None, file), (file, None, file)):
        with pytest.raises(ValueError, match="--tls-cert-file"):
            server_files(*server)
    for link in ((file, file, None, None), (file, None, file, None), (None, file, file, None), (None, None, None, "n")):
        with pytest.raises(ValueError, match="--engine-"):
            link_files(*link)


async def test_one_identity_serves_several_ports(authority: Authority) -> None:
    mine = authority.server("server")
    tls = ServerTls(ServerTlsFiles(mine.cert, mine.key))
    server = grpc.aio.server(options=server_options(1 << 20))
    await ServiceHealth([]).add_to(server)
    ports = [bind(server, "127.0.0.1", 0, tls) for _ in range(2)]
    await server.start()
    try:
        for port in ports:
            assert await ask(f"127.0.0.1:{port}", LinkTlsFiles(authority.ca)) is grpc.StatusCode.OK
    finally:
        await server.stop(None)
