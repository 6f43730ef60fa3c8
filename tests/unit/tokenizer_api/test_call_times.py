"""The stages of a slow generation add up to its time, whatever is known of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenizer_service.api.call_times import CallTimes
from tokenizer_service.engines.messages import StageTimes

SECONDS = st.floats(0, 1e4)


@given(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, st.integers(0, 2))
def test_the_stages_are_the_whole(
    encode: float, wait: float, queue: float, prefill: float, decode: float, deliver: float, failovers: int
) -> None:
    first = encode + wait + queue + prefill
    total = first + decode + deliver
    times = CallTimes(total, encode, first, StageTimes(queue, prefill, decode))
    stages = times.stages(failovers)
    assert sum(stages.values()) == pytest.approx(total, abs=1e-4)
    assert (stages["queue_seconds"], stages["prefill_seconds"]) == pytest.approx((queue, prefill), abs=1e-5)
    if failovers:
        assert stages["elsewhere_seconds"] == pytest.approx(wait + deliver, abs=1e-4)
    else:
        assert stages["wait_seconds"] == pytest.approx(wait, abs=1e-4)
        assert stages["deliver_seconds"] == pytest.approx(deliver, abs=1e-4)


@given(SECONDS, SECONDS)
def test_what_is_not_known_is_not_made_up(encode: float, rest: float) -> None:
    total = encode + rest
    assert CallTimes(total).stages(0) == {"encode_seconds": round(total, 6)}
    alone = CallTimes(total, encode).stages(0)
    assert alone.keys() == {"encode_seconds", "elsewhere_seconds"}
    assert sum(alone.values()) == pytest.approx(total, abs=1e-5)


def test_one_that_ended_without_a_token_has_waited() -> None:
    times = CallTimes(10.0, 1.0, None, StageTimes(4.0, 0.0, 0.0))
    assert times.stages(0) == {
        "encode_seconds": 1.0,
        "queue_seconds": 4.0,
        "prefill_seconds": 0.0,
        "decode_seconds": 0.0,
        "wait_seconds": 5.0,
        "deliver_seconds": 0.0,
    }
