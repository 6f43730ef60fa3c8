"""From TokenRequest to a validated request: every field is honoured or refused with its path and numbers."""

import pytest
from google.protobuf.duration_pb2 import Duration

from engine_service.api.parse import EngineRequest, parse_token_request
from engine_service.core.admission import EngineLimits
from engine_service.core.outcome import Refusal, RefusalCode
from engine_service.core.sampling import ConstraintKind, SamplingDefaults, SamplingParams, StructuredOutput
from tests.fixtures.hostile_token_requests import CASES, Case
from tokenwire.common.v1 import sampling_pb2
from tokenwire.engine.v1.engine_pb2 import TokenRequest

LIMITS = EngineLimits(512, 512, frozenset({0}), 16, 64)


def parse(message: TokenRequest, call_timeout_s: float | None = None) -> EngineRequest | Refusal:
    return parse_token_request(
        message, LIMITS, call_timeout_s=call_timeout_s, draw_seed=lambda: 77, draw_name=lambda: "drawn"
    )


def served(**fields: object) -> EngineRequest:
    request = parse(TokenRequest(**fields))  # type: ignore[arg-type]
    assert isinstance(request, EngineRequest), request
    return request


def test_the_table_covers_every_field() -> None:
    """A field that is added to the contract fails here until someone decides what hostile values do."""
    fields = {field.name for field in TokenRequest.DESCRIPTOR.fields} - {"sampling"}
    fields |= {f"sampling.{field.name}" for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields}
    assert {case.field for case in CASES} == fields


@pytest.mark.parametrize("case", CASES, ids=str)
def test_hostile_values(case: Case) -> None:
    """B027, B028, B084, B088, B093, B098, B107."""
    result = parse(case.message())
    if not case.is_refused:
        assert isinstance(result, EngineRequest), result
        return
    assert isinstance(result, Refusal)
    assert result.code is RefusalCode.INVALID
    assert result.field == f"request.{case.field}"
    for number in case.numbers:
        assert number in result.message


def test_unset_fields_get_the_documented_defaults() -> None:
    request = served(prompt_token_ids=[1, 2, 3])
    assert request == EngineRequest("drawn", (1, 2, 3), SamplingParams(max_tokens=509, seed=77), None, "")


def test_explicit_values_are_used_as_given() -> None:
    """B091: zero is not unset."""
    sampling = sampling_pb2.SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.0,
        top_k=5,
        top_p=0.5,
        min_p=0.25,
        seed=0,
        stop_token_ids=[4, 4, 8],
        ignore_eos=True,
    )
    request = served(prompt_token_ids=[1], request_id="r", cache_salt="s", sampling=sampling)
    assert request == EngineRequest(
        "r", (1,), SamplingParams(9, 0, 2, 0.0, 5, 0.5, 0.25, frozenset({4, 8}), True), None, "s"
    )


def test_explicit_token_rules_and_outputs_are_used_as_given() -> None:
    sampling = sampling_pb2.SamplingParams(
        max_tokens=9,
        seed=1,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={9: 1.5, 3: -100.0},
        allowed_token_ids=[3, 9, 9, 4],
        banned_token_ids=[4],
        bad_words=[sampling_pb2.TokenSequence(token_ids=[9, 3]), sampling_pb2.TokenSequence(token_ids=[9, 3])],
        logprobs=0,
        prompt_logprobs=5,
        n=3,
        structured_output=sampling_pb2.StructuredOutput(choice=sampling_pb2.Choices(values=["a", "é"])),
    )
    request = served(prompt_token_ids=[1], sampling=sampling, priority=-7, tenant="a", weight=9)
    assert (request.samples, request.priority, request.tenant, request.weight) == (3, -7, "a", 9)
    assert request.sampling == SamplingParams(
        max_tokens=9,
        seed=1,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias=((3, -100.0), (9, 1.5)),
        allowed_token_ids=frozenset({3, 4, 9}),
        banned_token_ids=frozenset({4}),
        bad_words=((9, 3),),
        logprobs=0,
        prompt_logprobs=5,
        structured_output=StructuredOutput(ConstraintKind.CHOICE, '["a", "é"]'),
    )


def test_unset_fields_get_the_models_defaults_and_set_ones_do_not() -> None:
    """B091: request > generation_config > neutral; an explicit neutral value is not unset."""
    defaults = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.9, min_p=0.1, repetition_penalty=1.1)

    def sampling_of(message: sampling_pb2.SamplingParams) -> SamplingParams:
        request = parse_token_request(
            TokenRequest(prompt_token_ids=[1], sampling=message),
            LIMITS,
            call_timeout_s=None,
            draw_seed=lambda: 77,
            draw_name=lambda: "drawn",
            defaults=defaults,
        )
        assert isinstance(request, EngineRequest)
        return request.sampling

    unset = sampling_of(sampling_pb2.SamplingParams())
    assert unset == SamplingParams(511, 77, 0, 0.6, 20, 0.9, 0.1, repetition_penalty=1.1)
    explicit = sampling_pb2.SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    assert sampling_of(explicit) == SamplingParams(511, 77, 0, 0.0)


@pytest.mark.parametrize(("top_k", "expected"), [(-1, 0), (0, 0), (1, 1), (511, 511), (512, 0), (2**63 - 1, 0)])
def test_top_k_off_is_one_value(top_k: int, expected: int) -> None:
    """B085."""
    sampling = sampling_pb2.SamplingParams(top_k=top_k)
    assert served(prompt_token_ids=[1], sampling=sampling).sampling.top_k == expected


@pytest.mark.parametrize(
    ("prompt_tokens", "requested", "expected"), [(511, None, 1), (511, 9, 1), (10, 502, 502), (10, 503, 502)]
)
def test_max_tokens_is_clamped_to_the_context(prompt_tokens: int, requested: int | None, expected: int) -> None:
    """B098."""
    sampling = sampling_pb2.SamplingParams(max_tokens=requested)
    request = served(prompt_token_ids=[1] * prompt_tokens, sampling=sampling)
    assert request.sampling.max_tokens == expected


@pytest.mark.parametrize(
    ("timeout", "call_timeout_s", "expected"),
    [
        (None, None, None),
        (None, 3.0, 3.0),
        (Duration(seconds=2, nanos=500_000_000), None, 2.5),
        (Duration(seconds=2), 3.0, 2.0),
        (Duration(seconds=4), 3.0, 3.0),
        (Duration(), 3.0, 0.0),
    ],
)
def test_the_earlier_deadline_counts(
    timeout: Duration | None, call_timeout_s: float | None, expected: float | None
) -> None:
    request = parse(TokenRequest(prompt_token_ids=[1], timeout=timeout), call_timeout_s)
    assert isinstance(request, EngineRequest)
    assert request.timeout_s == expected


def test_an_unknown_field_is_ignored() -> None:
    """A newer client may send fields this engine does not know."""
    unknown = TokenRequest(prompt_token_ids=[1]).SerializeToString() + b"\xfa\x3f\x03new"
    message = TokenRequest.FromString(unknown)
    assert isinstance(parse(message), EngineRequest)
