"""The blocking client over real sockets; what it shares with the asyncio client is tested there."""

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tests.fixtures.fake_tokenizer_service import (
    End,
    FakeTokenizerService,
    Hold,
    Refuse,
    Say,
    completion,
    echo_script,
    echo_text,
    serving_in_thread,
)
from tokenwire_client.errors import Cancelled, DeadlineExceeded, IncompleteStream, InvalidRequest, Unavailable
from tokenwire_client.retry import NO_RETRIES, RetryPolicy
from tokenwire_client.sync import Client
from tokenwire_client.types import Delta, HealthStatus, Message, Model, Sampling

HELD = [Say("a", (1,)), Hold("never"), End(completion())]
SOON = RetryPolicy(attempts=4, first_backoff=0.01, max_backoff=0.02)
GONE = Refuse(grpc.StatusCode.UNAVAILABLE, "no engine")


@pytest.fixture
def held() -> Iterator[tuple[FakeTokenizerService, Client]]:
    service = FakeTokenizerService({"held": [HELD]})
    with serving_in_thread(service) as target, Client(target) as client:
        yield service, client


def test_the_whole_surface() -> None:
    script = [Say("Par", (1, 2)), Say("is", (3,)), End(completion(stop_token_id=4), "!", (4,))]
    with (
        serving_in_thread(FakeTokenizerService({"hi": [script], "1,2": [script]})) as target,
        Client(target) as client,
    ):
        for stream in (client.generate("hi"), client.generate([1, 2]), client.chat([Message("user", "hi")])):
            assert stream.completion is None
            assert list(stream) == [Delta("Par", (1, 2)), Delta("is", (3,)), Delta("!", (4,))]
            done = stream.result()
            assert done is stream.completion
            assert (done.text, done.token_ids, done.stop_token_id) == ("Paris!", (1, 2, 3, 4), 4)
        assert client.tokenize("aé") == (97, 195, 169)
        assert bytes(client.tokenize([Message("user", "x")])) == b"user:x;"
        assert client.detokenize([97, 195, 169]) == "aé"
        assert client.models() == (Model("tiny", 256, 64, (0, 2), "ab12", 2),)
        assert client.health().serving
        assert client.health("draining").status is HealthStatus.NOT_SERVING


def test_many_threads_share_one_client_b147_b149() -> None:
    """B149: each thread sees its own tokens; B147: two batches, each in the order of its inputs."""
    with (
        serving_in_thread(FakeTokenizerService()) as target,
        Client(target, streams_per_connection=8) as client,
        ThreadPoolExecutor(32) as threads,
    ):
        for batch in (range(100), range(30, 130)):
            prompts = [f"p{number}" for number in batch]
            results = threads.map(lambda prompt: client.generate(prompt).result(), prompts)
            assert [result.text for result in results] == [echo_text(prompt) for prompt in prompts]


def leave_by_break(client: Client) -> None:
    for _ in client.generate("held"):
        break


def leave_by_break_and_keep_the_stream(client: Client) -> None:
    stream = client.generate("held")
    for _ in stream:
        break
    with pytest.raises(Cancelled, match="left before its end"):
        stream.result()


def leave_by_with(client: Client) -> None:
    with client.generate("held") as stream:
        next(iter(stream))


def leave_by_close(client: Client) -> None:
    stream = client.generate("held")
    deltas = iter(stream)
    next(deltas)
    stream.close()
    stream.close()
    with pytest.raises(Cancelled):
        next(deltas)


def leave_by_collection(client: Client) -> None:
    stream = client.generate("held")
    deltas = iter(stream)
    next(deltas)
    del stream, deltas
    gc.collect()


def leave_by_deadline(client: Client) -> None:
    with pytest.raises(DeadlineExceeded):
        client.generate("held", timeout=0.2).result()


def leave_by_closing_the_client(client: Client) -> None:
    deltas = iter(client.generate("held"))
    next(deltas)
    client.close()
    with pytest.raises(Cancelled):
        next(deltas)
    with pytest.raises(Cancelled, match="client is closed"):
        client.generate("held")


WAYS_OUT = [
    leave_by_break,
    leave_by_break_and_keep_the_stream,
    leave_by_with,
    leave_by_close,
    leave_by_collection,
    leave_by_deadline,
    leave_by_closing_the_client,
]


@pytest.mark.parametrize("leave", WAYS_OUT, ids=lambda way: way.__name__)
def test_leaving_a_stream_cancels_it_in_the_service(
    held: tuple[FakeTokenizerService, Client], leave: Callable[[Client], None]
) -> None:
    service, client = held
    leave(client)
    [call] = service.calls("held")
    assert call.cancelled.wait(1.0)
    assert sum(client._pool.calls()) == 0


def test_closing_from_another_thread_ends_the_reader(held: tuple[FakeTokenizerService, Client]) -> None:
    service, client = held
    stream = client.generate("held")
    caught: list[BaseException] = []

    def read() -> None:
        try:
            stream.result()
        except Cancelled as error:
            caught.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    [call] = service.wait_for_calls("held")
    stream.close()
    reader.join(5.0)
    assert [type(error) for error in caught] == [Cancelled]
    assert call.cancelled.wait(1.0)


def test_a_finished_stream_is_not_cancelled() -> None:
    service = FakeTokenizerService()
    with serving_in_thread(service) as target, Client(target) as client:
        with client.generate("p") as stream:
            stream.result()
        assert sum(client._pool.calls()) == 0
    assert not service.calls("p")[0].cancelled.is_set()


def test_an_incomplete_stream_is_an_error() -> None:
    service = FakeTokenizerService({"p": [[Say("x", (1,))]]})
    with serving_in_thread(service) as target, Client(target) as client:
        with pytest.raises(IncompleteStream, match="after 1 tokens"):
            client.generate("p").result()
        assert len(service.calls("p")) == 1


def test_a_wrong_value_is_refused_before_anything_is_sent() -> None:
    service = FakeTokenizerService()
    with serving_in_thread(service) as target, Client(target) as client:
        with pytest.raises(InvalidRequest, match=r"options\.sampling\.seed"):
            client.generate("p", Sampling(seed=2**64))
        with pytest.raises(InvalidRequest, match="timeout"):
            client.tokenize("p", timeout=0.0)
    assert service.calls("p") == service.calls("Tokenize") == []


@pytest.mark.parametrize(
    ("scripts", "retry", "calls", "text"),
    [
        ([[GONE], [GONE], echo_script("p")], SOON, 3, echo_text("p")),
        ([[GONE]], SOON, 4, None),
        ([[GONE], echo_script("p")], NO_RETRIES, 1, None),
        ([[Say("x"), GONE], echo_script("p")], SOON, 1, None),
    ],
)
def test_retries(scripts: list[list[Say | Refuse]], retry: RetryPolicy, calls: int, text: str | None) -> None:
    service = FakeTokenizerService({"p": scripts}, {"Tokenize": [GONE, GONE]})
    with serving_in_thread(service) as target, Client(target, retry=retry) as client:
        stream = client.generate("p")
        if text is None:
            with pytest.raises(Unavailable, match="no engine"):
                stream.result()
        else:
            assert stream.result().text == text
            assert client.tokenize("a") == (97,)
        assert len(service.calls("p")) == calls
        assert sum(client._pool.calls()) == 0
