"""The set of replicas and its discovery by DNS, without sockets."""

import asyncio
from collections.abc import Iterable

import pytest

from tests.unit.tokenizer_sessions.test_connection import Sink, connection, submission
from tokenizer_service.engines.connection import EngineConnection
from tokenizer_service.engines.refusal import Refusal, RefusalCode
from tokenizer_service.routing.discovery import MAX_ADDRESSES, DnsDiscovery
from tokenizer_service.routing.replicas import STATIC, Replicas, check_address
from tokenizer_service.routing.router import Router


def connect(address: str) -> EngineConnection:
    made = connection()
    made.address = address
    return made


def new_replicas(max_replicas: int = 1024) -> Replicas:
    return Replicas(connect, lambda: None, max_replicas)


def addresses(replicas: Replicas) -> list[str]:
    return [each.address for each in replicas.connections]


@pytest.mark.parametrize("address", ["a:1", "a.b-c.svc:65535", "10.0.0.7:50051", "[::1]:50051", "[fe80::1]:1"])
def test_good_addresses(address: str) -> None:
    assert check_address(address) is None


@pytest.mark.parametrize(
    ("address", "word"),
    [
        ("", "HOST:PORT"),
        ("a", "HOST:PORT"),
        (":5", "HOST:PORT"),
        ("a:", "HOST:PORT"),
        ("a b:5", "HOST:PORT"),
        ("dns:///a:5", "HOST:PORT"),
        ("::1:50051", "[IPv6]:PORT"),
        ("a:x", "HOST:PORT"),
        ("a:٣", "HOST:PORT"),
        ("a:0", "port 0"),
        ("a:65536", "port 65536"),
        ("a" * 400 + ":1", "402 characters"),
        ("a:" + "9" * 290, "port 999999"),
    ],
)
def test_bad_addresses_are_refused_with_words(address: str, word: str) -> None:
    refusal = check_address(address)
    assert refusal is not None
    assert (refusal.code, refusal.violations[0].field) == (RefusalCode.INVALID_ARGUMENT, "address")
    assert word in refusal.message


async def test_an_operator_adds_and_removes() -> None:
    replicas = new_replicas(max_replicas=2)
    router = Router(replicas.connections)
    assert replicas.add("a:1", STATIC) is None
    assert replicas.add_by_operator("b:1") is None
    duplicate, full = replicas.add_by_operator("a:1"), replicas.add_by_operator("c:1")
    assert duplicate is not None
    assert (duplicate.code, "static" in duplicate.message) == (RefusalCode.ALREADY_EXISTS, True)
    assert full is not None
    assert (full.code, "2 engines" in full.message) == (RefusalCode.RESOURCE_EXHAUSTED, True)
    unknown = replicas.remove_by_operator("x:1")
    assert unknown is not None
    assert unknown.code is RefusalCode.NOT_FOUND
    assert replicas.remove_by_operator("a:1") is None
    assert (addresses(replicas), router.num_connected) == (["b:1"], 1)
    await asyncio.gather(*(each.leaving for each in replicas.all() if each.leaving))
    assert [each.address for each in replicas.all()] == ["b:1"]


async def test_a_removed_replica_goes_when_its_last_request_has_ended() -> None:
    replicas = new_replicas()
    replicas.add("a:1", STATIC)
    (leaver,) = replicas.connections
    sink = Sink()
    stream = leaver.submit(submission(3), sink)
    assert not isinstance(stream, Refusal)
    assert replicas.remove_by_operator("a:1") is None
    again = replicas.remove_by_operator("a:1")
    assert again is not None
    assert again.code is RefusalCode.NOT_FOUND
    refused = Router(replicas.connections).submit(submission(3), Sink())
    assert isinstance(refused, Refusal)
    assert isinstance(leaver.submit(submission(3), Sink()), Refusal)
    assert ([each.address for each in replicas.all()], sink.lost) == (["a:1"], [])
    stream.close()
    leaving = replicas.all()[0].leaving
    assert leaving is not None
    await leaving
    assert replicas.all() == ()


async def test_what_leaves_can_be_wanted_back() -> None:
    replicas = new_replicas()
    replicas.add("a:1", STATIC)
    (leaver,) = replicas.connections
    stream = leaver.submit(submission(3), Sink())
    assert not isinstance(stream, Refusal)
    replicas.remove_by_operator("a:1")
    assert replicas.add_by_operator("a:1") is None
    stream.close()
    await asyncio.sleep(0)
    assert replicas.connections == [leaver]
    assert not isinstance(leaver.submit(submission(3), Sink()), Refusal)
    assert [each.sources for each in replicas.all()] == [{"operator"}]


class Answers:
    """A resolver that plays these, one a question."""

    def __init__(self, *answers: Iterable[str] | Exception) -> None:
        self._answers = list(answers)

    async def __call__(self, name: str, port: int) -> Iterable[str]:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_dns_adds_what_appears_and_drains_what_vanishes() -> None:
    replicas = new_replicas()
    replicas.add("10.0.0.1:7", STATIC)
    answers = Answers(
        ["10.0.0.1", "10.0.0.2", "::1"], OSError("no name server"), [], UnicodeError("label"), ["10.0.0.2", "10.0.0.3"]
    )
    discovery = DnsDiscovery.of("engines.local:7", 1.0, answers, replicas.replace)
    seen = []
    for _ in range(5):
        await discovery.refresh()
        seen.append(addresses(replicas))
    first = ["10.0.0.1:7", "10.0.0.2:7", "[::1]:7"]
    assert seen == [first, first, first, first, ["10.0.0.1:7", "10.0.0.2:7", "10.0.0.3:7"]]
    refused = replicas.remove_by_operator("10.0.0.2:7")
    assert refused is not None
    assert (refused.code, "dns:engines.local:7" in refused.message) == (RefusalCode.FAILED_PRECONDITION, True)
    assert replicas.remove_by_operator("10.0.0.1:7") is None  # DNS gives it no longer


async def test_the_addresses_of_a_name_are_bounded() -> None:
    replicas = new_replicas()
    many = [f"10.0.{number // 250}.{number % 250}" for number in range(MAX_ADDRESSES + 50)]
    await DnsDiscovery.of("n:7", 1.0, Answers(many), replicas.replace).refresh()
    assert len(replicas.connections) == MAX_ADDRESSES


async def test_two_names_share_an_address_until_both_have_dropped_it() -> None:
    replicas = new_replicas()
    replicas.replace("dns:a:7", ["x:7"])
    replicas.replace("dns:b:7", ["x:7"])
    replicas.replace("dns:a:7", [])
    assert addresses(replicas) == ["x:7"]
    replicas.replace("dns:b:7", [])
    assert addresses(replicas) == []
