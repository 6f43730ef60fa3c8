"""The real engine process over a socket: defaults of the model, log probabilities, mistakes found late."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from service_runtime.grpc_server import channel_options
from tests.fixtures.checkpoints import HIST_VOCAB, load_reference, write_hist
from tests.fixtures.engine_process import started_engine
from tokenwire.common.v1 import sampling_pb2
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc

GENERATION_CONFIG = {"eos_token_id": 0, "do_sample": True, "temperature": 0.5, "top_k": 7, "repetition_penalty": 1.5}
PROMPT = random.Random(1).choices(range(1, HIST_VOCAB), k=90)
SMALL = ("--num-blocks=64", "--block-size=16", "--step-token-budget=40", "--max-num-requests=8")
NEUTRAL = {"temperature": 1.0, "top_k": 0, "repetition_penalty": 1.0}
Sampling = sampling_pb2.SamplingParams


@pytest.fixture(scope="module")
def hist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_hist(tmp_path_factory.mktemp("checkpoints") / "hist")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG))
    return folder


class Engine:
    """Calls of one engine, by a blocking client."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=channel_options())
        self.stub: Any = engine_pb2_grpc.EngineServiceStub(self._channel)

    def defaults(self) -> sampling_pb2.SamplingParams:
        return self.stub.GetModelInfo(engine_pb2.GetModelInfoRequest(), timeout=10).default_sampling

    def messages(self, **sampling: Any) -> list[engine_pb2.GenerateResponse]:
        settings = Sampling(**{"max_tokens": 12, "seed": 5, "ignore_eos": True, **sampling})
        request = engine_pb2.TokenRequest(prompt_token_ids=PROMPT, sampling=settings)
        return list(self.stub.Generate(engine_pb2.GenerateRequest(request=request), timeout=60))

    def tokens(self, **sampling: Any) -> list[int]:
        return [token for message in self.messages(**sampling) for token in message.token_ids]

    def close(self) -> None:
        self._channel.close()


@pytest.fixture(scope="module")
def engine(hist: Path) -> Iterator[Engine]:
    with started_engine(hist, *SMALL) as process:
        engine = Engine(process.address)
        yield engine
        engine.close()


def test_the_models_defaults_fill_unset_fields_only(hist: Path, engine: Engine) -> None:
    """B091: request > generation_config > neutral; `GetModelInfo` tells what unset means."""
    defaults = engine.defaults()
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.5, 7, 1.0)
    assert (defaults.repetition_penalty, defaults.n, defaults.HasField("min_p")) == (1.5, 1, True)
    assert engine.tokens() == engine.tokens(temperature=0.5, top_k=7, repetition_penalty=1.5)
    assert engine.tokens(temperature=0.0) == engine.tokens(temperature=0.0, top_k=7, repetition_penalty=1.5)
    explicit = engine.tokens(**NEUTRAL)
    assert explicit != engine.tokens()
    with started_engine(hist, *SMALL, "--default-sampling=neutral") as process:
        neutral = Engine(process.address)
        assert (neutral.defaults().temperature, neutral.defaults().top_k) == (1.0, 0)
        assert neutral.tokens() == explicit
        neutral.close()


def test_each_token_has_its_log_probability_and_those_of_the_prompt_come_once(hist: Path, engine: Engine) -> None:
    messages = engine.messages(temperature=0.0, logprobs=3, prompt_logprobs=2)
    assert all(len(message.logprobs) == len(message.token_ids) for message in messages)
    (of_prompt,) = [list(message.prompt_logprobs) for message in messages if message.prompt_logprobs]
    entries = [*of_prompt, *(entry for message in messages for entry in message.logprobs)]
    text = PROMPT + [token for message in messages for token in message.token_ids]
    assert (len(of_prompt), len(entries)) == (len(PROMPT), len(text))
    model: Any = load_reference(hist)
    with torch.no_grad():
        reference = torch.log_softmax(model(torch.tensor([text])).logits[0].double(), dim=-1)
    assert not entries[0].HasField("token")
    for place in range(1, len(text)):
        entry, row = entries[place], reference[place - 1]
        assert entry.token.token_id == text[place]
        assert entry.token.logprob == pytest.approx(float(row[text[place]]), abs=5e-4)
        best = row.sort(descending=True).values[: 2 if place < len(PROMPT) else 3].tolist()
        assert [top.logprob for top in entry.top] == pytest.approx(best, abs=5e-4)


def test_a_mistake_that_is_found_late_is_the_clients_all_the_same(engine: Engine) -> None:
    before = engine.tokens(temperature=0.0)
    word = sampling_pb2.TokenSequence(token_ids=[5, 5])
    with pytest.raises(grpc.RpcError) as caught:
        engine.tokens(allowed_token_ids=[5], bad_words=[word])
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "no token is left" in caught.value.details()
    assert engine.tokens(temperature=0.0) == before
