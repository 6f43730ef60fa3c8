"""TLS on both links, as operators and clients use it: the whole way encrypted, new certificates, starts that fail."""

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from service_runtime.tls import ServerTls
from service_runtime.tls_files import ServerTlsFiles
from tests.fixtures import fake_engine as fe
from tests.fixtures.certificates import Authority, Identity
from tests.fixtures.engine_process import EngineProcess
from tests.fixtures.tokenizer_app import default_model, model_info
from tests.fixtures.tokenizer_process import tokenizer_process
from tokenizer_service.app import TokenizerApp
from tokenizer_service.config import TokenizerSettings
from tokenwire_client import NO_RETRIES, AsyncClient, Client, InvalidRequest, Tls, Unavailable
from tokenwire_client.operator import Operator


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def server_flags(mine: Identity, client_ca: Path | None = None) -> dict[str, Any]:
    return {"tls_cert_file": mine.cert, "tls_key_file": mine.key, "tls_client_ca_file": client_ca}


def link_flags(ca: Path, mine: Identity) -> dict[str, Any]:
    return {"engine_ca_file": ca, "engine_cert_file": mine.cert, "engine_key_file": mine.key}


async def hello(request: fe.FakeRequest) -> None:
    await request.play([19556], eos=2)


@asynccontextmanager
async def serving(engine: fe.FakeEngine, **settings: Any) -> AsyncIterator[TokenizerApp]:
    fields = {"engine": (f"localhost:{engine.port}",), "port": 0, "http_port": 0} | settings
    app = TokenizerApp(TokenizerSettings(**fields), default_model(), random.Random(1))
    await app.start()
    try:
        yield app
    finally:
        await app.stop()


async def until_serving(client: AsyncClient) -> None:
    async with asyncio.timeout(15):
        while not (await client.health(timeout=5)).serving:  # noqa: ASYNC110 (the state of another service)
            await asyncio.sleep(0.01)


async def test_the_whole_way_is_encrypted_and_each_side_shows_a_certificate(authority: Authority) -> None:
    engine_side, link, front, client = (
        authority.server("engine"),
        authority.client("tokenizer"),
        authority.server("front"),
        authority.client("client"),
    )
    engine = fe.FakeEngine(model_info(default_model()), hello)
    await engine.start(tls=ServerTls(ServerTlsFiles(engine_side.cert, engine_side.key, authority.ca)))
    try:
        flags = server_flags(front, authority.ca) | link_flags(authority.ca, link) | {"operator_port": 0}
        async with serving(engine, **flags) as app:
            target, tls = f"127.0.0.1:{app.port}", Tls(authority.ca, client.cert, client.key)
            async with AsyncClient(target, tls=tls) as secure:
                await until_serving(secure)
                assert (await secure.generate([5]).result()).text == "Hello"
            assert await asyncio.to_thread(blocking_answer, target, tls) == "Hello"
            for wrong in (None, Tls(authority.ca), Tls()):
                async with AsyncClient(target, tls=wrong, retry=NO_RETRIES, timeout=5) as stranger:
                    with pytest.raises(Unavailable):
                        await stranger.health()
            await check_command(target, authority.ca, client)
            with Operator(f"127.0.0.1:{app.operator_port}", tls=tls) as operator:
                assert [engine.state for engine in await asyncio.to_thread(operator.engines)] == ["connected"]
            await check_http(f"https://127.0.0.1:{app.http_port}", authority.ca, client)
    finally:
        await engine.stop()


def blocking_answer(target: str, tls: Tls) -> str:
    with Client(target, tls=tls) as client:
        return client.generate([5]).result().text


async def check_command(target: str, ca: Path, client: Identity) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tokenwire_client.cli", "generate", "--target", target, "--token-ids", "5"),
        *("--ca-file", str(ca), "--cert-file", str(client.cert), "--key-file", str(client.key)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert (await process.communicate())[0] == b"Hello\n"


async def check_http(url: str, ca: Path, client: Identity) -> None:
    import ssl

    trust = ssl.create_default_context(cafile=ca)
    with pytest.raises(httpx.TransportError):
        async with httpx.AsyncClient(base_url=url, verify=trust) as stranger:
            await stranger.get("/ready")
    trust.load_cert_chain(client.cert, client.key)
    async with httpx.AsyncClient(base_url=url, verify=trust) as http:
        answer = await http.post("/v1/completions", json={"prompt": [5]})
        assert answer.json()["choices"][0]["text"] == "Hello"
        # A bound that is broken is answered before the connection closes, without TLS's missing half-close.
        assert (await http.get("/ready", headers={"x-long": "x" * 70_000})).status_code == 431


async def test_a_link_takes_new_certificates_at_its_next_connection(authority: Authority, tmp_path: Path) -> None:
    """The engine comes back with another authority; the tokenizer service's files are changed under it."""
    engine = fe.FakeEngine(model_info(default_model()), hello)
    second = Authority(tmp_path, "second")
    link = authority.client("tokenizer")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(authority.ca.read_bytes())

    def server_tls(signer: Authority) -> ServerTls:
        mine = signer.server("engine")
        return ServerTls(ServerTlsFiles(mine.cert, mine.key, signer.ca))

    await engine.start(tls=server_tls(authority))
    async with serving(engine, **link_flags(trusted, link)) as app, AsyncClient(f"127.0.0.1:{app.port}") as client:
        await until_serving(client)
        port = engine.port
        await engine.stop()
        trusted.write_bytes(second.ca.read_bytes())
        link.replace(second.client("tokenizer"))
        await engine.start(port, server_tls(second))
        try:
            await until_serving(client)
            assert (await client.generate([5]).result()).text == "Hello"
        finally:
            await engine.stop()


def test_client_files_that_cannot_be_used_are_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cert_file and key_file go together"):
        Tls(cert_file="only.pem")
    with (
        pytest.raises(InvalidRequest, match=r"tls\.ca_file: cannot be read: No such file"),
        Client("127.0.0.1:1", tls=Tls(tmp_path / "absent.pem")) as client,
    ):
        client.health()


def test_an_engine_service_with_bad_files_does_not_start(authority: Authority) -> None:
    mine, other = authority.server("mine"), authority.server("other")
    engine = EngineProcess("--model=unused", f"--tls-cert-file={mine.cert}", f"--tls-key-file={other.key}")
    try:
        assert engine.wait_exit(30.0) == 1
    finally:
        engine.close()
    assert engine.lines[-1].startswith("tokenwire-engine: the key in ")
    assert "does not belong" in engine.lines[-1]


async def test_a_tokenizer_service_with_bad_files_does_not_start(authority: Authority) -> None:
    absent = authority.ca.with_name("absent.pem")
    async with tokenizer_process("--engine-ca-file", str(absent)) as service:
        assert await service.wait_exit() == 1
    (line,) = service.other_lines
    assert line == f"tokenwire-tokenizer: {absent} cannot be read: No such file or directory\n"
