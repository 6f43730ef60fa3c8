"""Each status of a service becomes its exception, in both clients, for streams and single answers."""

from collections.abc import Iterator

import grpc
import pytest

from tests.fixtures.fake_tokenizer_service import (
    FakeTokenizerService,
    Refuse,
    Say,
    serving,
    serving_in_thread,
)
from tokenwire_client import errors
from tokenwire_client.client import AsyncClient
from tokenwire_client.errors import FieldViolation, TokenwireError
from tokenwire_client.retry import NO_RETRIES
from tokenwire_client.sync import Client
from tokenwire_client.types import Message

Code = grpc.StatusCode

STATUSES: list[tuple[Refuse, type[TokenwireError]]] = [
    (
        Refuse(Code.INVALID_ARGUMENT, "2 fields", (("top_p", "1.5 > 1"), ("seed", "2^64"))),
        errors.InvalidRequest,
    ),
    (Refuse(Code.OUT_OF_RANGE, "far"), errors.InvalidRequest),
    (Refuse(Code.FAILED_PRECONDITION, "not so"), errors.InvalidRequest),
    (Refuse(Code.ALREADY_EXISTS, "id in use"), errors.InvalidRequest),
    (Refuse(Code.NOT_FOUND, "no model x"), errors.NotFound),
    (Refuse(Code.RESOURCE_EXHAUSTED, "queue of 8 is full", (), 1.5), errors.Overloaded),
    (Refuse(Code.DEADLINE_EXCEEDED, "late"), errors.DeadlineExceeded),
    (Refuse(Code.UNAVAILABLE, "no engine", (), 0.25), errors.Unavailable),
    (Refuse(Code.CANCELLED, "cancelled there"), errors.Cancelled),
    (Refuse(Code.UNAUTHENTICATED, "who"), errors.Unauthenticated),
    (Refuse(Code.PERMISSION_DENIED, "not you"), errors.PermissionDenied),
    (Refuse(Code.INTERNAL, "broken"), errors.Internal),
    (Refuse(Code.UNKNOWN, "odd"), errors.Internal),
    (Refuse(Code.UNIMPLEMENTED, "not here"), errors.Internal),
    (Refuse(Code.DATA_LOSS, "lost"), errors.Internal),
    (Refuse(Code.ABORTED, "aborted"), errors.Internal),
    (Refuse(Code.INVALID_ARGUMENT, "broken details", raw_details=b"\xff\xff"), errors.InvalidRequest),
]
IDS = [f"{refusal.code.name}-{refusal.message}" for refusal, _ in STATUSES]


def check(error: TokenwireError, refusal: Refuse, kind: type[TokenwireError]) -> None:
    assert type(error) is kind
    assert error.code.name == refusal.code.name
    assert error.message == refusal.message
    assert error.retry_after == refusal.retry_after_s
    assert error.field_violations == tuple(FieldViolation(*each) for each in refusal.violations)


def service() -> FakeTokenizerService:
    """For each status: refused at once, after two deltas, and by a unary method."""
    scripts = {f"at once {name}": [[refusal]] for name, (refusal, _) in zip(IDS, STATUSES, strict=True)}
    scripts |= {
        f"later {name}": [[Say("a", (1,)), Say("b", (2,)), refusal]]
        for name, (refusal, _) in zip(IDS, STATUSES, strict=True)
    }
    return FakeTokenizerService(scripts, {"Tokenize": [refusal for refusal, _ in STATUSES]})


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    with serving_in_thread(service()) as address:
        yield address


@pytest.mark.parametrize(("name", "refusal", "kind"), [(n, *s) for n, s in zip(IDS, STATUSES, strict=True)], ids=IDS)
def test_statuses_of_blocking_streams(target: str, name: str, refusal: Refuse, kind: type[TokenwireError]) -> None:
    with Client(target, retry=NO_RETRIES) as client:
        with pytest.raises(TokenwireError) as caught:
            client.generate(f"at once {name}").result()
        check(caught.value, refusal, kind)
        stream = client.chat([Message("user", f"later {name}")])
        deltas = iter(stream)
        assert [next(deltas).text, next(deltas).text] == ["a", "b"]
        with pytest.raises(TokenwireError) as caught:
            next(deltas)
        check(caught.value, refusal, kind)
        assert stream.completion is None
        with pytest.raises(TokenwireError) as caught:
            stream.result()
        check(caught.value, refusal, kind)


async def test_statuses_of_async_streams() -> None:
    async with serving(service()) as target, AsyncClient(target, retry=NO_RETRIES) as client:
        for name, (refusal, kind) in zip(IDS, STATUSES, strict=True):
            with pytest.raises(TokenwireError) as caught:
                await client.generate(f"at once {name}").result()
            check(caught.value, refusal, kind)
            stream = client.chat([Message("user", f"later {name}")])
            deltas = aiter(stream)
            assert [(await anext(deltas)).text, (await anext(deltas)).text] == ["a", "b"]
            with pytest.raises(TokenwireError) as caught:
                await anext(deltas)
            check(caught.value, refusal, kind)
            assert stream.completion is None
            with pytest.raises(TokenwireError) as caught:
                await stream.result()
            check(caught.value, refusal, kind)


async def test_statuses_of_async_answers() -> None:
    async with serving(service()) as target, AsyncClient(target, retry=NO_RETRIES) as client:
        for refusal, kind in STATUSES:
            with pytest.raises(TokenwireError) as caught:
                await client.tokenize("x")
            check(caught.value, refusal, kind)
        assert await client.tokenize("x") == (120,)


def test_statuses_of_blocking_answers() -> None:
    with serving_in_thread(service()) as target, Client(target, retry=NO_RETRIES) as client:
        for refusal, kind in STATUSES:
            with pytest.raises(TokenwireError) as caught:
                client.tokenize("x")
            check(caught.value, refusal, kind)
        assert client.tokenize("x") == (120,)


async def test_an_unknown_health_service_is_not_found() -> None:
    async with serving(FakeTokenizerService()) as target, AsyncClient(target) as client:
        with pytest.raises(errors.NotFound):
            await client.health("no.such.Service")
