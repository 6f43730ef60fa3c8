"""Router and connection bookkeeping, mostly without sockets; converting between the wire and plain data."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import structlog

from service_runtime.tls import Dialer
from tests.fixtures import fake_engine as fe
from tests.fixtures.stack import until
from tokenizer_service.engines.connection import ConnectionLimits, EngineConnection
from tokenizer_service.engines.convert import engine_finish, submit_message
from tokenizer_service.engines.live_request import LiveRequest
from tokenizer_service.engines.matching import ModelCheck, TokenizerIdentity
from tokenizer_service.engines.messages import (
    EngineFinish,
    FinishReason,
    ModelInfo,
    SamplingOptions,
    StageTimes,
    TokenNews,
    TokenSubmission,
    Usage,
)
from tokenizer_service.engines.refusal import Refusal, RefusalCode
from tokenizer_service.routing.choice import Policy
from tokenizer_service.routing.router import Router
from tokenwire.common.v1 import outcome_pb2
from tokenwire.engine.v1 import engine_pb2

MODEL = ModelInfo("m", 100, 50, frozenset({2}), "abc", "e1")


class Sink:
    def __init__(self) -> None:
        self.news: list[tuple[list[int], EngineFinish | None]] = []
        self.lost: list[Refusal] = []

    def on_news(self, news: TokenNews) -> None:
        self.news.append((list(news.token_ids), news.finish))

    def on_lost(self, refusal: Refusal) -> None:
        self.lost.append(refusal)


def connection(model: ModelInfo | None = MODEL, **limits: Any) -> EngineConnection:
    check = ModelCheck(TokenizerIdentity("abc", 100), allow_mismatch=False)
    made = EngineConnection("x:1", "test", check, ConnectionLimits(**limits), Dialer(()), lambda: 0.5, lambda: None)
    made.model = model
    return made


def submission(prompt: int, max_tokens: int | None = None) -> TokenSubmission:
    return TokenSubmission("r", [1] * prompt, SamplingOptions(max_tokens=max_tokens))


def step(*outputs: engine_pb2.RequestOutput) -> engine_pb2.StepOutputs:
    return engine_pb2.StepOutputs(outputs=outputs)


async def test_outstanding_work_follows_the_tokens_and_ends_at_zero() -> None:
    made, sink = connection(), Sink()
    made.submit(submission(10, 5), sink)
    assert made.outstanding_tokens == 15
    made.requests.dispatch(step(engine_pb2.RequestOutput(handle=1, token_ids=[4, 5])))
    assert made.outstanding_tokens == 3
    finish = engine_pb2.Finish(reason=outcome_pb2.FINISH_REASON_STOP)
    made.requests.dispatch(step(engine_pb2.RequestOutput(handle=1, token_ids=[6], finish=finish)))
    assert made.outstanding_tokens == 0
    assert made.num_live == 0
    assert [ids for ids, _ in sink.news] == [[4, 5], [6]]
    made.requests.dispatch(step(engine_pb2.RequestOutput(handle=1, token_ids=[7])))  # late: nobody hears it
    assert len(sink.news) == 2


async def test_samples_count_their_work_and_end_one_by_one() -> None:
    made, sink = connection(), Sink()
    given = TokenSubmission("r", [1] * 10, SamplingOptions(max_tokens=5, n=3))
    stream = made.submit(given, sink)
    assert not isinstance(stream, Refusal)
    assert made.outstanding_tokens == 10 + 3 * 5
    made.requests.submits.clear()  # as if it had been sent
    finish = engine_pb2.Finish(reason=outcome_pb2.FINISH_REASON_STOP)
    made.requests.dispatch(step(engine_pb2.RequestOutput(handle=1, token_ids=[4, 5], index=2)))
    assert made.outstanding_tokens == 3 + 2 * 5
    made.requests.dispatch(step(engine_pb2.RequestOutput(handle=1, token_ids=[4], index=2, finish=finish)))
    assert made.outstanding_tokens == 2 * 5
    made.requests.dispatch(step(engine_pb2.RequestOutput(handle=1, token_ids=[9], index=2, finish=finish)))  # late
    made.requests.dispatch(step(engine_pb2.RequestOutput(handle=1, token_ids=[9], index=3)))  # there is no such sample
    stream.cancel(2)  # it has ended
    stream.cancel(1)
    stream.cancel(1)
    assert list(made.requests.cancels) == [(1, 1)]
    made.requests.dispatch(step(engine_pb2.RequestOutput(handle=1, index=1, finish=finish)))
    assert made.num_live == 1
    stream.close()
    assert list(made.requests.cancels) == [(1, 1), (1, None)]
    assert (made.outstanding_tokens, made.num_live) == (0, 0)
    assert [ids for ids, _ in sink.news] == [[4, 5], [4], []]


@pytest.mark.parametrize(("max_tokens", "work"), [(None, 50), (5, 15), (1000, 50)])
async def test_work_is_clamped_to_the_context(max_tokens: int | None, work: int) -> None:
    made = connection()
    made.submit(submission(10, max_tokens), Sink())
    assert made.outstanding_tokens == work


async def test_a_submit_that_was_not_sent_is_withdrawn_without_a_word_to_the_engine() -> None:
    made, sink = connection(), Sink()
    stream = made.submit(submission(10), sink)
    assert not isinstance(stream, Refusal)
    stream.close()
    assert (len(made.requests.submits), len(made.requests.cancels), made.outstanding_tokens, made.num_live) == (
        0,
        0,
        0,
        0,
    )
    assert [refusal.code for refusal in sink.lost] == [RefusalCode.CANCELLED]


async def test_the_queue_of_unsent_submits_is_bounded() -> None:
    made = connection(max_queued_submits=2)
    results = [made.submit(submission(1), Sink()) for _ in range(3)]
    assert [isinstance(result, Refusal) for result in results] == [False, False, True]
    assert made.num_live == 2


async def test_a_lost_connection_ends_everything_once() -> None:
    made, sinks = connection(), [Sink(), Sink()]
    for sink in sinks:
        made.submit(submission(3), sink)
    assert made._disconnect()
    assert not made._disconnect()
    assert [[refusal.code for refusal in sink.lost] for sink in sinks] == [[RefusalCode.UNAVAILABLE]] * 2
    assert (made.outstanding_tokens, made.num_live, made.is_connected) == (0, 0, False)
    refused = made.submit(submission(3), Sink())
    assert isinstance(refused, Refusal)
    assert refused.code is RefusalCode.UNAVAILABLE


async def test_the_router_spares_the_loaded_and_skips_the_lost() -> None:
    """B115."""
    first, second, lost = connection(), connection(), connection(None)
    router = Router((first, second, lost), Policy.LEAST_WORK)
    assert (router.num_connected, router.model()) == (2, MODEL)
    first.submit(submission(10, 10), Sink())
    for _ in range(3):
        router.submit(submission(1, 1), Sink())
    assert (first.num_live, second.num_live, lost.num_live) == (1, 3, 0)
    idle = Router((connection(), connection()))
    for _ in range(10):
        stream = idle.submit(submission(1, 1), Sink())
        assert not isinstance(stream, Refusal)
        stream.close()
    assert {c.requests.next_handle for c in idle.connections} == {6}
    nobody = Router((lost,)).submit(submission(1), Sink())
    assert isinstance(nobody, Refusal)
    assert nobody.code is RefusalCode.UNAVAILABLE


@pytest.mark.parametrize(("failures", "seconds"), [(0, 0.1), (1, 0.2), (3, 0.8), (5, 2.0), (1000, 2.0)])
async def test_the_backoff_is_bounded(failures: int, seconds: float) -> None:
    assert connection()._backoff(failures) == pytest.approx(seconds * 0.75)


@pytest.mark.parametrize(
    ("fingerprint", "vocab", "allowed", "fits"),
    [
        ("abc", 100, False, True),
        ("abc", 128, False, True),
        ("abc", 99, False, False),
        ("abd", 100, False, False),
        ("", 100, False, False),
        ("", 1, True, True),
    ],
)
def test_model_check(fingerprint: str, vocab: int, allowed: bool, fits: bool) -> None:
    """B144."""
    check = ModelCheck(TokenizerIdentity("abc", 100), allow_mismatch=allowed)
    complaint = check.complaint(ModelInfo("m", vocab, 50, frozenset(), fingerprint, "e"))
    assert (complaint is None) == fits


def test_an_engine_without_files_does_not_match_a_tokenizer_without_files() -> None:
    check = ModelCheck(TokenizerIdentity("", 100), allow_mismatch=False)
    assert check.complaint(ModelInfo("m", 100, 50, frozenset(), "", "e")) is not None


@pytest.mark.parametrize(("deadline", "seconds"), [(7.5, 2.5), (5.0, 0.0), (1.0, 0.0)])
def test_a_deadline_becomes_a_timeout_that_is_never_negative(deadline: float, seconds: float) -> None:
    given = TokenSubmission("r", [1], SamplingOptions(), deadline=deadline)
    timeout = submit_message(1, given, now=5.0).submit.request.timeout
    assert timeout.ToNanoseconds() == seconds * 1e9


@pytest.mark.parametrize(
    ("field", "ours"),
    [
        ("request.sampling.top_k", "options.sampling.top_k"),
        ("request.prompt_token_ids", "prompt"),
        ("request.prompt_token_ids[3]", "prompt[3]"),
        ("request.cache_salt", "options.cache_salt"),
        ("request.priority", "options.priority"),
        ("request.request_id", "request_id"),
    ],
)
def test_the_engines_field_names_become_the_clients(field: str, ours: str) -> None:
    error = outcome_pb2.RequestError(grpc_code=3, message="m")
    error.field_violations.add(field=field, description="d")
    usage = outcome_pb2.Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=3)
    finish = engine_finish(engine_pb2.Finish(reason=outcome_pb2.FINISH_REASON_ERROR, error=error, usage=usage))
    assert finish.refusal is not None
    assert [item.field for item in finish.refusal.violations] == [ours]
    assert (finish.reason, finish.usage) == (FinishReason.ERROR, Usage(1, 2, 3))


def test_the_stages_of_the_engine_come_as_seconds() -> None:
    finish = engine_pb2.Finish(reason=outcome_pb2.FINISH_REASON_LENGTH)
    assert engine_finish(finish).stages is None
    finish.stages.queue.FromMilliseconds(1500)
    assert engine_finish(finish).stages == StageTimes(1.5, 0.0, 0.0)
    finish.stages.prefill.FromMilliseconds(20)
    finish.stages.decode.FromMilliseconds(3)
    finish.stages.preemptions = 2
    assert engine_finish(finish).stages == StageTimes(1.5, 0.02, 0.003, 2)


async def test_a_replica_that_fails_again_and_again_gets_no_requests_for_a_while() -> None:
    """A full queue and a client's mistake are no failures; a token closes the breaker."""
    made = connection()
    codes = {"full": 8, "invalid": 3, "failed": 13, "gone": 14}

    def end(code: int) -> None:
        made.submit(submission(1), Sink())
        handle = made.requests.next_handle - 1
        error = outcome_pb2.RequestError(grpc_code=code, message="m")
        finish = engine_pb2.Finish(reason=outcome_pb2.FINISH_REASON_ERROR, error=error)
        made.requests.dispatch(step(engine_pb2.RequestOutput(handle=handle, finish=finish)))

    for name in ("full", "invalid") * 5:
        end(codes[name])
    assert made.is_usable
    for name in ("gone", "failed", "gone"):
        assert made.is_usable
        end(codes[name])
    assert (made.is_connected, made.is_usable) == (True, False)
    refused = Router((made,)).submit(submission(1), Sink())
    assert isinstance(refused, Refusal)
    made.requests.live[99] = LiveRequest(Sink(), 1, [5], {0}, False)
    made.requests.outstanding_tokens += 6
    made._take(step(engine_pb2.RequestOutput(handle=99, token_ids=[1])))
    assert made.is_usable


async def test_a_draining_replica_does_not_fail() -> None:
    """Nor is its going a warning, unless it takes requests along."""
    made = connection()
    with structlog.testing.capture_logs() as logs:
        made._note_draining()
        made._disconnect()
        assert not made.breaker.is_troubled
        made.model = MODEL
        made.submit(submission(3), Sink())
        made._note_draining()
        made._disconnect()
        assert not made.breaker.is_troubled
        made.model = MODEL
        made._disconnect()
    assert made.breaker.is_troubled
    levels = [(log["event"], log["log_level"]) for log in logs if log["event"] != "engine_draining"]
    assert levels == [("engine_drained", "info"), *[("engine_disconnected", "warning")] * 2]


async def test_the_shortest_context_of_the_connected_counts_for_all() -> None:
    short, long, lost = connection(), connection(replace(MODEL, max_model_len=4000)), connection(None)
    router = Router((long, lost, short), Policy.LEAST_WORK)
    assert router.model() == MODEL
    short.model = None
    found = router.model()
    assert found is not None
    assert found.max_model_len == 4000


def test_unset_fields_get_the_models_own_settings_before_any_engine_has_them() -> None:
    given = SamplingOptions(temperature=0.0, seed=3)
    theirs = SamplingOptions(temperature=0.6, top_k=20, max_tokens=9, seed=4)
    assert given.with_defaults(theirs) == SamplingOptions(temperature=0.0, top_k=20, seed=3)
    assert given.with_defaults(SamplingOptions()) is given


@pytest.mark.parametrize(("hang_timeout_s", "heartbeat_s"), [(0.1, 0.1), (0.6, 0.2), (30.0, 10.0), (86_400.0, 10.0)])
def test_the_heartbeat_follows_the_hang_timeout(hang_timeout_s: float, heartbeat_s: float) -> None:
    assert ConnectionLimits(hang_timeout_s=hang_timeout_s).heartbeat_s == pytest.approx(heartbeat_s)


async def test_a_session_ends_with_its_writer_and_is_opened_again() -> None:
    """What the writer dies of is not the call's end: engine and reader know nothing of it."""
    told = engine_pb2.GetModelInfoResponse(
        model_name="m", vocab_size=100, max_model_len=50, eos_token_ids=[2], tokenizer_fingerprint="abc"
    )
    engine = fe.FakeEngine(told, fe.until_cancelled)
    await engine.start()
    made = connection(None, first_backoff_s=0.01)
    made.address = engine.address
    running = asyncio.create_task(made.run())
    try:
        await engine.wait_until(lambda: len(engine.sessions) == 1)
        await until(lambda: made.is_usable, fe.WAIT_S)
        sink = Sink()
        made.submit(submission(3), sink)
        await engine.wait_until(lambda: engine.num_live == 1)
        with structlog.testing.capture_logs() as logs:
            made.requests.cancels["not a handle", None] = None  # type: ignore[index]
            made.requests.has_commands.set()
            await engine.wait_until(lambda: len(engine.opened) == 2)
        assert [refusal.code for refusal in sink.lost] == [RefusalCode.UNAVAILABLE]
        assert [log["log_level"] for log in logs if log["event"] == "engine_session_broken"] == ["error"]
        await until(lambda: made.is_usable, fe.WAIT_S)
        made.submit(submission(4), Sink())
        await engine.wait_until(lambda: len(engine.requests) == 2)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await engine.stop()
