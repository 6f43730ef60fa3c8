"""Which failures are tried again, after how long, and never past the deadline."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenwire_client.errors import ErrorCode, InvalidRequest, TokenwireError, error_for
from tokenwire_client.retry import NO_RETRIES, Attempts, RetryPolicy, check_timeout

POLICY = RetryPolicy(attempts=4, first_backoff=1.0, max_backoff=3.0, jitter=lambda: 0.0)


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def unavailable(retry_after: float | None = None) -> TokenwireError:
    return error_for(ErrorCode.UNAVAILABLE, "gone", retry_after)


def test_pauses_grow_to_the_limit_and_end() -> None:
    attempts = Attempts(POLICY, None, Clock())
    assert [attempts.pause_after(unavailable()) for _ in range(5)] == [0.5, 1.0, 1.5, None, None]


@pytest.mark.parametrize("code", [code for code in ErrorCode if code is not ErrorCode.UNAVAILABLE])
def test_only_unavailable_is_tried_again(code: ErrorCode) -> None:
    assert Attempts(POLICY, None, Clock()).pause_after(error_for(code, "no", 0.1)) is None


def test_the_off_switch() -> None:
    assert Attempts(NO_RETRIES, None, Clock()).pause_after(unavailable()) is None


@pytest.mark.parametrize(("asked", "pause"), [(0.1, 0.5), (2.0, 2.0), (3.0, 3.0), (3.1, None)])
def test_the_servers_pause_is_kept_or_the_error_raised(asked: float, pause: float | None) -> None:
    assert Attempts(POLICY, None, Clock()).pause_after(unavailable(asked)) == pause


def test_another_service_need_not_wait_as_long_as_the_one_that_asked_for_it() -> None:
    assert Attempts(POLICY, None, Clock()).pause_after(unavailable(30.0), elsewhere=True) == 0.5


@pytest.mark.parametrize(("timeout", "pause"), [(0.5, None), (0.51, 0.5), (10.0, 0.5)])
def test_no_pause_reaches_the_deadline(timeout: float, pause: float | None) -> None:
    assert Attempts(POLICY, timeout, Clock()).pause_after(unavailable()) == pause


def test_all_attempts_share_one_deadline() -> None:
    clock = Clock()
    attempts = Attempts(POLICY, 10.0, clock)
    assert attempts.remaining() == 10.0
    clock.now += 4.0
    assert attempts.remaining() == 6.0
    clock.now += 40.0
    assert attempts.remaining() == 0.0
    assert Attempts(POLICY, None, clock).remaining() is None


@given(
    st.integers(1, 10_000),
    st.floats(0, 1, exclude_max=True),
    st.floats(0.001, 10),
    st.floats(0.001, 100),
)
def test_a_backoff_is_between_half_and_all_of_its_ceiling(
    failures: int, jitter: float, first: float, limit: float
) -> None:
    policy = RetryPolicy(first_backoff=first, max_backoff=limit, jitter=lambda: jitter)
    ceiling = min(limit, first * 2.0 ** min(failures - 1, 1000))
    assert ceiling / 2 <= policy.backoff(failures) <= ceiling


@pytest.mark.parametrize(("given_", "kept"), [(None, None), (math.inf, None), (0.001, 0.001), (5, 5), (1e8, 1e8)])
def test_timeouts(given_: float | None, kept: float | None) -> None:
    assert check_timeout(given_) == kept


@pytest.mark.parametrize("timeout", [0, -1, math.nan, -math.inf, 1e9, 1e300])
def test_a_senseless_timeout_is_refused(timeout: float) -> None:
    with pytest.raises(InvalidRequest, match=r"timeout: must be in \(0, 100000000\] seconds"):
        check_timeout(timeout)
