"""Metrics of generations: what is told of each, exemplars, why requests are turned away."""

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tokenizer_service.api.generation_metrics import EndedGeneration, GenerationMetrics, rejection
from tokenizer_service.engines.losses import LOST
from tokenizer_service.engines.messages import FinishReason, Usage
from tokenizer_service.engines.refusal import QuotaBreach, Refusal, RefusalCode, invalid_field
from tokenizer_service.sessions.events import Completed

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
FULL = Refusal(RefusalCode.RESOURCE_EXHAUSTED, "full", retry_after_s=1.0)
SLOW_READER = Refusal(RefusalCode.RESOURCE_EXHAUSTED, "slow reader")


def ended(**changes: object) -> EndedGeneration:
    fields = {
        "seconds": 9.0,
        "first_token_s": 1.0,
        "last_token_s": 9.0,
        "prompt_tokens": 7,
        "generated_tokens": 5,
        "max_tokens": None,
        "samples": 1,
        "is_good": True,
    }
    return EndedGeneration(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 2.0),
        ({"generated_tokens": 1}, None),
        ({"is_good": False}, None),
        ({"first_token_s": None, "last_token_s": None, "generated_tokens": 0}, None),
        ({"generated_tokens": 10, "samples": 2}, 2.0),
    ],
)
def test_time_per_output_token_is_that_after_the_first(changes: dict[str, object], seconds: float | None) -> None:
    assert ended(**changes).seconds_per_token == seconds


def test_exemplars_lead_to_the_trace_and_only_of_requests_that_have_one() -> None:
    registry = CollectorRegistry()
    metrics = GenerationMetrics(registry)
    metrics.observe_first_token(0.3, "")
    metrics.observe_first_token(0.02, TRACE)
    metrics.observe_end(ended(trace_id=TRACE))
    found = [
        (sample.name, sample.exemplar.labels, sample.exemplar.value)
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if sample.exemplar is not None
    ]
    assert found == [
        ("tokenwire_tokenizer_time_to_first_token_seconds_bucket", {"trace_id": TRACE}, 0.02),
        ("tokenwire_tokenizer_request_seconds_bucket", {"trace_id": TRACE}, 9.0),
    ]


def test_a_sample_is_counted_by_what_ended_it() -> None:
    registry = CollectorRegistry()
    metrics = GenerationMetrics(registry)
    usage = Usage(1, 1, 0)
    metrics.count_finished(Completed(FinishReason.STOP, usage, None, None, 1))
    metrics.count_finished(Completed(FinishReason.STOP, usage, "END", None, 1))
    metrics.count_finished(Completed(FinishReason.STOP, usage, None, None, 1, has_tool_calls=True))
    metrics.count_finished(Completed(FinishReason.LENGTH, usage, None, None, 1, has_tool_calls=True))
    for reason in ("stop", "stop_string", "tool_calls", "length"):
        assert registry.get_sample_value("tokenwire_tokenizer_finished_samples_total", {"reason": reason}) == 1


@pytest.mark.parametrize(
    ("refusal", "was_taken", "reason"),
    [
        (invalid_field("prompt", "is empty"), False, "invalid"),
        (invalid_field("options", "cannot be followed"), True, None),
        (FULL, False, "overloaded"),
        (FULL, True, "overloaded"),
        (SLOW_READER, True, None),
        (LOST, False, "unavailable"),
        (LOST, True, None),
        (Refusal(RefusalCode.CANCELLED, "left"), False, None),
        (Refusal(RefusalCode.INTERNAL, "ours"), False, None),
        (Refusal(RefusalCode.UNAUTHENTICATED, "who?"), False, "unauthenticated"),
        (
            Refusal(RefusalCode.RESOURCE_EXHAUSTED, "", quota=QuotaBreach("tenant:a", "max_requests", "")),
            False,
            "tenant_limit",
        ),
    ],
)
def test_a_rejection_is_of_what_no_work_was_done_for(refusal: Refusal, was_taken: bool, reason: str | None) -> None:
    assert rejection(refusal, was_taken=was_taken) == reason
