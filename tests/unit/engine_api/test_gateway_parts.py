"""Parts of the gateway facade that need no socket: translation, stop strings, event bounds, the missing extra."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm_pb2
from tokenizers import Tokenizer

from engine_service.api.live_request import Unread
from engine_service.api.vllm_compat.answer import SampleAnswer
from engine_service.api.vllm_compat.info import default_sampling_json
from engine_service.api.vllm_compat.model_files import MAX_BUNDLE_BYTES, BundleTooLarge, bundle_tokenizer
from engine_service.api.vllm_compat.request import token_request
from engine_service.api.vllm_compat.stop_watch import StopWatch
from engine_service.api.vllm_compat.subscriptions import Subscription
from engine_service.core.kv_events import BlocksRemoved, CacheSnapshot, EventsLost, KvEventLog
from engine_service.core.outcome import Finish, FinishReason, PositionLogprobs
from engine_service.core.sampling import SamplingDefaults
from tests.fixtures.checkpoints import write_byte_tokenizer
from tokenwire.engine.v1 import engine_pb2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def translated(**sampling: object) -> engine_pb2.TokenRequest:
    message = vllm_pb2.GenerateRequest(sampling_params=vllm_pb2.SamplingParams(**sampling))
    request = token_request(message)
    assert isinstance(request, engine_pb2.TokenRequest)
    return request


def test_what_this_flavour_cannot_leave_open_is_neutral() -> None:
    sampling = translated().sampling
    assert (sampling.top_p, sampling.repetition_penalty, sampling.top_k, sampling.n) == (1.0, 1.0, 0, 1)
    assert not any(sampling.HasField(name) for name in ("temperature", "max_tokens", "seed", "logprobs"))  # type: ignore[arg-type]


def test_zero_is_not_unset_where_the_flavour_tells_them_apart() -> None:
    sampling = translated(temperature=0.0, seed=0, logprobs=0).sampling
    assert all(sampling.HasField(name) for name in ("temperature", "seed", "logprobs"))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["json_schema", "regex", "grammar", "json_object", "choice"])
def test_constraints_are_carried(name: str) -> None:
    value = {"json_object": True, "choice": vllm_pb2.ChoiceConstraint(choices=["a", "b"])}.get(name, "x")
    structured = translated(**{name: value}).sampling.structured_output
    assert structured.WhichOneof("constraint") == name
    if name == "choice":
        assert list(structured.choice.values) == ["a", "b"]


def test_defaults_are_told_when_they_are_not_neutral() -> None:
    assert default_sampling_json(SamplingDefaults()) == ""
    assert default_sampling_json(SamplingDefaults(temperature=0.2, top_k=20)) == '{"temperature": 0.2, "top_k": 20}'


@pytest.mark.parametrize("stops", [["brown"], ["ow"], ["n f", "zzz"], ["q"], ["fox"], ["cafe", "quick brown"]])
def test_stop_strings_are_found_with_the_token_that_completes_them(tokenizer: Tokenizer, stops: list[str]) -> None:
    ids = tokenizer.encode("the quick brown fox — ünïcode 🌶 end").ids
    texts = [tokenizer.decode(ids[: place + 1]) for place in range(len(ids))]
    expected = next(place for place, text in enumerate(texts) if any(stop in text for stop in stops))
    watch = StopWatch(tokenizer, stops, 0)
    assert [watch.add(token) for token in ids[: expected + 1]] == [False] * expected + [True]
    assert watch.found in stops


def test_stop_strings_in_the_first_tokens_end_nothing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abc abc").ids
    watch = StopWatch(tokenizer, ["abc"], 3)
    assert [watch.add(token) for token in ids].index(True) == len(ids) - 1


def test_broken_characters_cost_little_and_hide_nothing_after_them(tokenizer: Tokenizer) -> None:
    """The library's window grows with bytes that make no character."""
    (lone,) = [token for token in range(3, 259) if tokenizer.id_to_token(token) == "ð"]
    watch = StopWatch(tokenizer, ["stop"], 0)
    assert not any(watch.add(lone) for _ in range(4000))
    assert any(watch.add(token) for token in tokenizer.encode("aaaaaaaaaaaaaaaaaaaaaaaaaaaa stop").ids * 2)


def test_a_cut_sample_tells_only_what_is_left() -> None:
    entries = [PositionLogprobs((token, -float(token)), 2, ((9, -0.5), (token, -float(token)))) for token in (1, 2, 3)]
    answer = SampleAnswer(0, [5, 6])
    answer.add(Unread([1, 2, 3], None, entries))
    answer.cut(2)
    chunk = answer.chunk(0).chunk
    assert list(chunk.token_ids) == list(chunk.output_logprobs.token_ids) == [1, 2]
    assert [list(top.token_ids) for top in chunk.output_logprobs.top_logprobs] == [[1, 9], [2, 9]]
    finish = Finish(FinishReason.ABORT, 2, 3, 0)
    last = answer.complete(finish, "x", is_stream=False).complete
    assert (last.finish_reason, last.matched_stop_str, last.completion_tokens) == ("stop", "x", 2)
    assert list(last.output_logprobs.token_logprobs) == [-1.0, -2.0]


@pytest.mark.parametrize("is_stream", [True, False])
async def test_log_probabilities_of_the_prompt_are_told_once(is_stream: bool) -> None:
    first, second = PositionLogprobs(None, 0, ()), PositionLogprobs((6, -1.5), 2, ((9, -0.5), (6, -1.5)))
    answer = SampleAnswer(0, [5, 6])
    for entry in (first, second):
        await answer.add_prompt_logprobs([entry])
    told = answer.chunk(0).chunk.input_logprobs if is_stream else None
    last = answer.complete(Finish(FinishReason.LENGTH, 2, 0, 0), None, is_stream=is_stream).complete
    assert last.HasField("input_logprobs") is not is_stream
    scored = told or last.input_logprobs
    assert list(scored.token_ids) == [5, 6]
    assert [value.HasField("value") for value in scored.token_logprobs] == [False, True]
    assert [list(top.token_ids) for top in scored.top_logprobs] == [[], [6, 9]]


def test_a_log_of_events_is_bounded_and_a_snapshot_heals_it() -> None:
    log = KvEventLog(max_events=3)
    log.add(BlocksRemoved((bytes([number]),)) for number in range(10))
    assert log.take() == (EventsLost(),)
    log.add([BlocksRemoved((b"1",))])
    assert log.take() == ()
    log.add([CacheSnapshot(b""), BlocksRemoved((b"2",))])
    assert log.take() == (CacheSnapshot(b""), BlocksRemoved((b"2",)))


async def test_a_subscription_begins_with_a_snapshot() -> None:
    subscription = Subscription()
    subscription.add([BlocksRemoved((b"1",))])
    subscription.add([CacheSnapshot(b""), BlocksRemoved((b"2",))])
    assert await asyncio.wait_for(subscription.take(), 5) == (CacheSnapshot(b""), BlocksRemoved((b"2",)))
    subscription.end()
    assert await asyncio.wait_for(subscription.take(), 5) == ()


def test_the_zip_is_bounded(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(MAX_BUNDLE_BYTES + 1)
    with pytest.raises(BundleTooLarge, match="209,715,201"):
        bundle_tokenizer(tmp_path)
    assert bundle_tokenizer(tmp_path / "nothing") is None


def test_a_missing_extra_is_said_plainly() -> None:
    code = (
        "import sys; sys.modules['smg_grpc_proto'] = None; sys.argv = ['tokenwire-engine', '--port=0', "
        "'--metrics-port=0', '--vllm-compat-port=0']; from engine_service.__main__ import main; main()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == (
        "tokenwire-engine: --vllm-compat-port needs the package smg_grpc_proto: install tokenwire[gateway]"
    )
