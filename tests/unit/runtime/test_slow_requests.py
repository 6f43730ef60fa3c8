"""Lines about slow requests: only beyond the threshold, a bounded number, and none is forgotten silently."""

import structlog

from service_runtime.slow_requests import BURST, SlowRequests, never_slow


def test_the_threshold_and_off() -> None:
    slow = SlowRequests(2.0, lambda: 0.0)
    assert [slow.is_slow(seconds) for seconds in (0.0, 1.99, 2.0, 3.0)] == [False, False, True, True]
    assert not never_slow().is_slow(1e9)


def test_a_flood_is_cut_and_the_next_line_says_how_much_was_left_out() -> None:
    now = [0.0]
    slow = SlowRequests(1.0, lambda: now[0])
    with structlog.testing.capture_logs() as lines:
        for number in range(BURST + 7):
            slow.tell(lambda number=number: {"request_id": str(number)})
        assert [line["request_id"] for line in lines] == [str(number) for number in range(BURST)]
        now[0] = 1.0
        slow.tell(lambda: {"request_id": "late"})
        slow.tell(lambda: {"request_id": "too many"})
        now[0] = 2.0
        slow.tell(lambda: {"request_id": "last"})
    assert lines[BURST] == {
        "event": "slow_request",
        "log_level": "warning",
        "request_id": "late",
        "left_out": 7,
    }
    assert (lines[-1]["request_id"], lines[-1]["left_out"], len(lines)) == ("last", 1, BURST + 2)
