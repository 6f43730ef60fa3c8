"""Sampling settings and log probabilities between messages and plain data."""

import math
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenizer_service.engines.convert import cancel_message, model_info, submit_message, with_logprobs
from tokenizer_service.engines.messages import (
    Choice,
    Grammar,
    JsonObject,
    JsonSchema,
    PositionLogprobs,
    Regex,
    SamplingOptions,
    TokenNews,
    TokenSubmission,
)
from tokenizer_service.engines.sampling_wire import fill_sampling, sampling_options
from tokenwire.common.v1 import sampling_pb2
from tokenwire.common.v1.logprobs_pb2 import PositionLogprobs as PositionMessage
from tokenwire.engine.v1 import engine_pb2

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False)
ID_LISTS = st.lists(INT64, max_size=3).map(tuple)
STRUCTURES = st.one_of(
    st.builds(JsonSchema, st.text(max_size=5)),
    st.just(JsonObject()),
    st.builds(Regex, st.text(max_size=5)),
    st.builds(Grammar, st.text(max_size=5)),
    st.builds(Choice, st.lists(st.text(max_size=3), max_size=3).map(tuple)),
)


def unset_or(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


OPTIONS = st.builds(
    SamplingOptions,
    **{
        name: unset_or(INT64)
        for name in ("max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs", "n")
    },
    **{
        name: unset_or(FLOATS)
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
    },
    ignore_eos=unset_or(st.booleans()),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids", "banned_token_ids"), ID_LISTS),
    logit_bias=st.dictionaries(INT64, FLOATS, max_size=3).map(lambda biases: tuple(sorted(biases.items()))),
    bad_words=st.lists(ID_LISTS, max_size=3).map(tuple),
    structured_output=unset_or(STRUCTURES),
)


def message_of(options: SamplingOptions) -> sampling_pb2.SamplingParams:
    message = sampling_pb2.SamplingParams()
    fill_sampling(message, options)
    return sampling_pb2.SamplingParams.FromString(message.SerializeToString())


@given(OPTIONS)
def test_nothing_is_lost_on_the_way_to_an_engine(options: SamplingOptions) -> None:
    """Zero and unset stay different; an empty choice stays a choice."""
    assert sampling_options(message_of(options)) == options


def test_every_field_of_the_message_has_its_place() -> None:
    assert {field.name for field in fields(SamplingOptions)} == {
        field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields
    }


def test_a_number_that_is_none_is_kept_for_validation() -> None:
    nan = sampling_options(sampling_pb2.SamplingParams(temperature=math.nan)).temperature
    assert nan is not None
    assert math.isnan(nan)


@pytest.mark.parametrize(("salt", "priority"), [(None, None), ("", 0), ("s", -5)])
def test_a_submission_says_who_shares_and_how_urgent_it_is(salt: str | None, priority: int | None) -> None:
    given_ = TokenSubmission("r", [1], SamplingOptions(), cache_salt=salt, priority=priority)
    request = submit_message(7, given_, now=0.0).submit.request
    assert request.HasField("cache_salt") == (salt is not None)
    assert request.HasField("priority") == (priority is not None)
    assert (request.cache_salt, request.priority) == (salt or "", priority or 0)


def test_a_cancel_names_a_sample_or_none() -> None:
    assert not cancel_message(7, None).cancel.HasField("index")
    one = cancel_message(7, 0).cancel
    assert (one.handle, one.HasField("index"), one.index) == (7, True, 0)


def test_the_engine_s_defaults_are_known() -> None:
    opened = engine_pb2.SessionOpened(engine_epoch="e")
    opened.model.default_sampling.temperature = 0.0
    opened.model.default_sampling.top_k = 40
    assert model_info(opened).default_sampling == SamplingOptions(temperature=0.0, top_k=40)


def test_news_carry_log_probabilities() -> None:
    first = PositionMessage(rank=0)
    position = PositionMessage(token={"token_id": 5, "logprob": -0.5}, rank=2, top=[{"token_id": 6, "logprob": -0.25}])
    output = engine_pb2.RequestOutput(logprobs=[position], prompt_logprobs=[first, position])
    read = PositionLogprobs((5, -0.5), 2, ((6, -0.25),))
    news = TokenNews(3, [5])
    made = with_logprobs(news, output)
    assert made[:4] == (3, [5], None, (read,))
    assert list(made.prompt_logprobs) == [PositionLogprobs(None, 0, ()), read]
    assert made.prompt_logprobs[1:5] == (read,)
    assert (len(made.prompt_logprobs), bool(with_logprobs(news, engine_pb2.RequestOutput()).prompt_logprobs)) == (
        2,
        False,
    )
