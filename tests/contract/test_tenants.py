"""Tenants over gRPC and HTTP: keys, limits, what reaches the engine, metrics; over real sockets."""

import asyncio
import hashlib
import ssl
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.fixtures import fake_engine as fe
from tests.fixtures.certificates import Authority
from tests.fixtures.http_calls import CHAT, COMPLETIONS, body_of, error_of, http
from tests.fixtures.tokenizer_app import Service, collect, default_model, eventually, failure, ids_request, running
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb
from tokenwire_client import NO_RETRIES, AsyncClient, Sampling, Tls, Unauthenticated


def sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(name: str, **more: Any) -> str:
    fields = {"name": f'"{name}"', "key_sha256": f'["{sha(name + "-key")}"]'} | {k: str(v) for k, v in more.items()}
    return "[[tenant]]\n" + "\n".join(f"{key} = {value}" for key, value in fields.items()) + "\n"


def tenants(path: Path, *entries: str) -> Path:
    file = path / "tenants.toml"
    file.write_text("\n".join(entries))
    return file


def key(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {name}-key"),)


async def script(request: fe.FakeRequest) -> None:
    await request.play([1000, 1001], eos=2)


def detail(error: grpc.aio.AioRpcError, kind: Any) -> Any:
    status = rpc_status.from_call(error)
    assert status is not None
    found = kind()
    assert [item.Unpack(found) for item in status.details].count(True) == 1
    return found


async def generate(service: Service, name: str, **options: Any) -> Any:
    return await collect(service.stub.Generate(ids_request([1, 2, 3], **options), metadata=key(name)))


async def test_the_same_keys_protect_grpc_and_http(tmp_path: Path) -> None:
    file = tenants(tmp_path, entry("a"), entry("b"))
    async with running(default_model(), script, tenants=file, api_key=("plain",)) as service, http(service) as client:
        calls = (
            service.stub.ListModels(pb.ListModelsRequest()),
            service.stub.Generate(ids_request([1])),
            service.stub.Tokenize(pb.TokenizeRequest(text="x"), metadata=(("authorization", "Bearer wrong"),)),
        )
        for call in calls:
            assert (await failure(call)).code() is grpc.StatusCode.UNAUTHENTICATED
        assert await service.health() == 1  # open
        await generate(service, "a")
        plain = (("authorization", "Bearer plain"),)
        await collect(service.stub.Generate(ids_request([1]), metadata=plain))
        error_of(await client.post(CHAT, json=body_of(CHAT)), 401)
        for name in ("a-key", "plain"):
            answer = await client.post(CHAT, json=body_of(CHAT), headers={"authorization": f"Bearer {name}"})
            assert answer.status_code == 200
        assert service.outcomes()["Generate", "UNAUTHENTICATED"] == 1
        assert service.metric("tenant_requests_total", tenant="a", code="OK") == 2


async def test_the_client_library_sends_its_key(tmp_path: Path) -> None:
    file = tenants(tmp_path, entry("a"))
    async with running(default_model(), script, tenants=file) as service:
        target = f"127.0.0.1:{service.app.port}"
        async with AsyncClient(target, api_key="a-key") as client:
            assert (await client.generate([1, 2], Sampling(max_tokens=4)).result()).token_ids[:2] == (1000, 1001)
            assert await client.tokenize("x")
        async with AsyncClient(target) as stranger:
            assert (await stranger.health()).serving
            with pytest.raises(Unauthenticated, match="API key"):
                await stranger.models()


async def test_what_the_engine_is_told(tmp_path: Path) -> None:
    """Tenant, weight, priority and a salt of its own; a tenant that shares the common cache has the client's salt."""
    file = tenants(
        tmp_path, entry("a", weight=7, priority=3), entry("b", share_prefix_cache="true"), entry("c", min_priority=-5)
    )
    seen: list[Any] = []

    async def note(request: fe.FakeRequest) -> None:
        seen.append(request.message)
        await request.play([1000], eos=2)

    async with running(default_model(), note, tenants=file) as service:
        await generate(service, "a", cache_salt="s")
        await generate(service, "a")
        await generate(service, "b", cache_salt="s")
        await generate(service, "c", priority=-5)
        error = await failure(service.stub.Generate(ids_request([1], priority=2), metadata=key("a")))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "options.priority"
    assert [(m.tenant, m.weight, m.priority) for m in seen] == [("a", 7, 3), ("a", 7, 3), ("b", 1, 0), ("c", 1, -5)]
    assert [m.cache_salt for m in seen] == [f"tenant:a:{sha('s')}", "tenant:a:", "s", "tenant:c:"]


async def test_without_tenants_nothing_is_told_and_nothing_is_asked() -> None:
    seen: list[Any] = []

    async def note(request: fe.FakeRequest) -> None:
        seen.append(request.message)
        await request.play([1000], eos=2)

    async with running(default_model(), note) as service:
        await collect(service.stub.Generate(ids_request([1, 2], cache_salt="tenant")))
    assert not any(seen[0].HasField(name) for name in ("tenant", "weight", "priority"))
    assert seen[0].cache_salt == "tenant"


async def test_requests_at_once(tmp_path: Path) -> None:
    file = tenants(tmp_path, entry("a", max_requests=2), entry("b"))
    async with running(default_model(), fe.until_cancelled, tenants=file) as service, http(service) as client:
        held = [service.stub.Generate(ids_request([1]), metadata=key("a")) for _ in range(2)]
        await service.engine.wait_until(lambda: service.engine.num_live == 2)
        error = await failure(service.stub.Generate(ids_request([1]), metadata=key("a")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToSeconds() == 1
        (violation,) = detail(error, error_details_pb2.QuotaFailure).violations
        assert violation.subject == "tenant:a"
        assert "max_requests" in violation.description
        answer = await client.post(CHAT, json=body_of(CHAT), headers={"authorization": "Bearer a-key"})
        assert error_of(answer, 429)["code"] == "rate_limit_exceeded"
        assert answer.headers["retry-after"] == "1"
        other = service.stub.Generate(ids_request([1]), metadata=key("b"))
        await service.engine.wait_until(lambda: service.engine.num_live == 3)
        assert service.metric("tenant_active_requests", tenant="a") == 2
        assert service.metric("tenant_refusals_total", tenant="a", limit="max_requests") == 2
        for call in (*held, other):
            call.cancel()
        await service.engine.wait_until(lambda: service.engine.num_live == 0)
        assert service.metric("tenant_active_requests", tenant="a") == 0
        assert service.metric("tenant_tokens_in_flight", tenant="b") == 0


async def test_reading_takes_a_place_of_the_tenants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words that must not come are encoded while the request is read: a tenant has no more of that than of requests."""
    loop, go_on = asyncio.get_running_loop(), asyncio.Event()

    def slow_encode(*_: object) -> list[int]:
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
        return [5]

    file = tenants(tmp_path, entry("a", max_requests=1), entry("b"))
    async with running(default_model(), script, tenants=file, encode_threads=2) as service, http(service) as client:
        monkeypatch.setattr(default_model().encoder, "encode", slow_encode)
        body = body_of(COMPLETIONS, prompt=[1, 2], bad_words=["x"])
        a, b = ({"authorization": f"Bearer {name}-key"} for name in "ab")
        first = asyncio.create_task(client.post(COMPLETIONS, json=body, headers=a))
        await eventually(lambda: service.metric("tenant_active_requests", tenant="a") == 1)
        for _ in range(3):
            refused = await client.post(COMPLETIONS, json=body, headers=a)
            assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
            assert refused.headers["retry-after"] == "1"
        error = await failure(service.stub.Generate(ids_request([1]), metadata=key("a")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert service.metric("tenant_refusals_total", tenant="a", limit="max_requests") == 4
        await generate(service, "b")
        other = asyncio.create_task(client.post(COMPLETIONS, json=body, headers=b))
        await eventually(lambda: service.metric("tenant_active_requests", tenant="b") == 1)
        go_on.set()
        assert ((await first).status_code, (await other).status_code) == (200, 200)
        await eventually(lambda: service.metric("active_requests") == 0)
        assert [service.metric("tenant_active_requests", tenant=name) for name in "ab"] == [0, 0]


async def test_ids_are_a_tenants_own(tmp_path: Path) -> None:
    """Two tenants call their requests the same, over gRPC and HTTP; the engine never hears of one id twice.

    Without '~' and behind it, where an engine's id begins that is not the client's.
    """
    file = tenants(tmp_path, entry("a"), entry("b"))
    async with running(default_model(), fe.until_cancelled, tenants=file) as service, http(service) as client:
        first = service.stub.Generate(ids_request([1], request_id="same"), metadata=key("a"))
        await service.engine.wait_until(lambda: service.engine.num_live == 1)
        known = service.engine.requests[0].message.request_id
        calls = [
            service.stub.Generate(ids_request([1], request_id=name), metadata=key("b"))
            for name in ("same", known, "same~1")
        ]
        await service.engine.wait_until(lambda: service.engine.num_live == 4)
        headers = {"authorization": "Bearer a-key", "x-request-id": "same"}
        error_of(await client.post(CHAT, json=body_of(CHAT), headers=headers), 409)
        headers["x-request-id"] = "same~1"
        fifth = asyncio.create_task(client.post(CHAT, json=body_of(CHAT), headers=headers))
        await service.engine.wait_until(lambda: service.engine.num_live == 5)
        ids = [request.message.request_id for request in service.engine.requests]
        assert len(set(ids)) == 5
        assert sorted(request.client_id for request in service.engine.requests) == sorted(
            ["same", "same", known, "same~1", "same~1"]
        )
        for call in (first, *calls):
            call.cancel()
        fifth.cancel()
        await service.engine.wait_until(lambda: service.engine.num_live == 0)


async def test_tokens_per_minute_give_back_what_was_not_generated(tmp_path: Path) -> None:
    """1,000 a minute: 3 of the prompt and 900 that may come are taken, 3 tokens (EOS too) come, 894 go back."""
    file = tenants(tmp_path, entry("a", tokens_per_minute=1000))
    async with running(default_model(), script, tenants=file) as service:
        for _ in range(5):
            await generate(service, "a", sampling={"max_tokens": 900})
        assert service.metric("tenant_tokens_total", tenant="a", kind="generated") == 15
        error = await failure(
            service.stub.Generate(ids_request([1, 2, 3], sampling={"max_tokens": 998}), metadata=key("a"))
        )
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        error = await failure(
            service.stub.Generate(ids_request([1, 2, 3], sampling={"max_tokens": 990}), metadata=key("a"))
        )
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        delay = detail(error, error_details_pb2.RetryInfo).retry_delay.ToTimedelta().total_seconds()
        assert 0.1 <= delay <= 1.4  # 23 of 1,000 are missing


async def test_tokens_in_flight_and_a_retry_that_succeeds(tmp_path: Path) -> None:
    """The client library waits as long as RetryInfo says and tries again."""
    file = tenants(tmp_path, entry("a", max_tokens_in_flight=100))
    go = asyncio.Event()

    async def wait(request: fe.FakeRequest) -> None:
        await go.wait()
        await request.play([1000], eos=2)

    async with running(default_model(), wait, tenants=file) as service:
        target = f"127.0.0.1:{service.app.port}"
        async with AsyncClient(target, api_key="a-key") as client:
            first = asyncio.create_task(client.generate([1, 2], Sampling(max_tokens=60)).result())
            await service.engine.wait_until(lambda: service.engine.num_live == 1)
            error = await failure(
                service.stub.Generate(ids_request([1], sampling={"max_tokens": 60}), metadata=key("a"))
            )
            assert "62 tokens" in str(error.details())
            assert service.metric("tenant_tokens_in_flight", tenant="a") == 62
            go.set()
            await first
            await client.generate([1, 2], Sampling(max_tokens=60)).result()


async def test_a_key_that_is_taken_away_is_refused_at_once(tmp_path: Path) -> None:
    file = tenants(tmp_path, entry("a"), entry("b"))
    async with running(default_model(), script, tenants=file) as service:
        await generate(service, "a")
        tenants(tmp_path, entry("b"))
        assert (await failure(service.stub.Generate(ids_request([1]), metadata=key("a")))).code() is (
            grpc.StatusCode.UNAUTHENTICATED
        )
        file.write_text("not toml [")
        await generate(service, "b")


async def test_a_certificate_says_who_it_is(tmp_path: Path) -> None:
    """Over gRPC and HTTP; by common name and by alternative name; a key counts before it."""
    authority = Authority(tmp_path)
    server = authority.server("server")
    file = tenants(
        tmp_path,
        '[[tenant]]\nname = "a"\ncertificate_names = ["alice"]\n',
        '[[tenant]]\nname = "b"\ncertificate_names = ["bob@example.org"]\n',
        entry("c"),
    )
    seen: list[str] = []

    async def note(request: fe.FakeRequest) -> None:
        seen.append(request.message.tenant)
        await request.play([1000], eos=2)

    tls = {"tls_cert_file": server.cert, "tls_key_file": server.key, "tls_client_ca_file": authority.ca}
    async with running(default_model(), note, tenants=file, wait=False, **tls) as service:
        await eventually(lambda: service.app.fleet.router.num_connected == 1)
        for name, key_ in (("alice", None), ("bob", None), ("alice", "c-key"), ("mallory", None)):
            mine = authority.client(name)
            target = f"127.0.0.1:{service.app.port}"
            async with AsyncClient(
                target, tls=Tls(authority.ca, mine.cert, mine.key), api_key=key_, retry=NO_RETRIES
            ) as client:
                if name == "mallory":
                    with pytest.raises(Unauthenticated):
                        await client.generate([1]).result()
                else:
                    await client.generate([1]).result()
        mine, stranger = authority.client("bob"), authority.client("mallory")
        for identity, status in ((mine, 200), (stranger, 401)):
            context = ssl.create_default_context(cafile=str(authority.ca))
            context.load_cert_chain(identity.cert, identity.key)
            async with httpx.AsyncClient(verify=context) as client:
                answer = await client.post(f"https://localhost:{service.app.http_port}{CHAT}", json=body_of(CHAT))
                assert answer.status_code == status
    assert seen == ["a", "b", "c", "b"]
