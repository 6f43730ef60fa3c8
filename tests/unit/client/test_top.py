"""The view of `tokenwire top`: rates of two readings, and the frame as text."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from tokenwire_client.operator_status import (
    Engine,
    EngineFigures,
    EngineStatus,
    LiveRequest,
    ServiceFigures,
    Status,
)
from tokenwire_client.top.command import frame_json
from tokenwire_client.top.rates import Frame, History, Reading
from tokenwire_client.top.view import block_bar, duration, render, sparkline

FIGURES = EngineFigures(
    running_requests=3,
    waiting_requests=7,
    waiting_tokens=900,
    total_blocks=1000,
    used_blocks=250,
    cached_blocks=500,
    free_blocks=250,
    steps_total=100,
    step_seconds_total=2.0,
    preemptions_total=4,
    prompt_tokens_total=5_000,
    generated_tokens_total=800,
    cached_tokens_total=1_000,
    looked_up_tokens_total=4_000,
    evictions_total=0,
    last_step_age=0.01,
)
LATER = replace(
    FIGURES,
    steps_total=150,
    step_seconds_total=3.0,
    prompt_tokens_total=6_000,
    generated_tokens_total=1_000,
    cached_tokens_total=1_900,
    looked_up_tokens_total=5_000,
    preemptions_total=5,
)
SERVICE = ServiceFigures(
    model_name="model",
    is_draining=False,
    uptime=3_700.0,
    active_requests=2,
    max_requests=4096,
    encode_queue=1,
    prompt_tokens_total=10,
    generated_tokens_total=20,
    routed_requests_total={"prefix": 5, "load": 1, "only": 0},
    failovers_total={"lost": 2},
    failed_failovers_total={},
)
OLD = LiveRequest("chat-1", "search", "Chat", "generating", 120, 41, 4.5, 0.5, ("10.0.0.1:50051",))
NEW = LiveRequest("chat-2", "", "Generate", "waiting", 9, 0, 0.25, None, ("10.0.0.1:50051",))


def engine_status(figures: EngineFigures | None, epoch: str = "e1", error: str = "") -> EngineStatus:
    return EngineStatus(Engine("10.0.0.1:50051", ("static",), "connected", 2, epoch), figures, error)


def status(figures: EngineFigures | None = FIGURES, **changes: str) -> Status:
    return Status(SERVICE, (engine_status(figures, **changes),), (OLD, NEW))


def text(frame: Frame, max_requests: int = 10) -> str:
    console = Console(file=io.StringIO(), width=160, highlight=False)
    console.print(render(frame, max_requests))
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def frame_of(first: Status, second: Status, seconds: float = 2.0) -> Frame:
    history = History("127.0.0.1:50055")
    history.add(Reading(100.0, first))
    return history.add(Reading(100.0 + seconds, second))


def test_rates_are_what_happened_in_between() -> None:
    (rates,) = frame_of(status(), status(LATER)).rates.values()
    assert rates.generated_tokens_per_second == 100.0
    assert rates.prompt_tokens_per_second == 500.0
    assert rates.steps_per_second == 25.0
    assert rates.step_ms == pytest.approx(20.0)
    assert rates.tokens_per_step == 24.0
    assert rates.prefix_hit_ratio == 0.9
    assert rates.preemptions == 1


def test_what_did_not_happen_has_no_rate() -> None:
    (rates,) = frame_of(status(), status()).rates.values()
    assert (rates.generated_tokens_per_second, rates.steps_per_second) == (0.0, 0.0)
    assert (rates.step_ms, rates.tokens_per_step, rates.prefix_hit_ratio) == (None, None, None)


@pytest.mark.parametrize(
    "second",
    [
        status(replace(FIGURES, steps_total=1)),
        status(LATER, epoch="e2"),
        status(None, error="unavailable"),
    ],
    ids=["counters fell", "another life", "no answer"],
)
def test_an_engine_that_started_again_or_is_silent_has_no_rates(second: Status) -> None:
    frame = frame_of(status(), second)
    assert frame.rates == {}
    assert frame.history == (0.0,)


def test_the_frame_shows_engines_and_requests() -> None:
    lines = text(frame_of(status(), status(LATER))).splitlines()
    shown = "\n".join(lines)
    assert "127.0.0.1:50055  model model  up 1h01m" in lines[0]
    assert lines[1].startswith("tokens/s  out 100.0  in 500.0  █")
    assert "active 2 of 4,096  to encode 1  routed: load 1 prefix 5  failovers: lost 2  given up: 0" in lines[2]
    (row,) = [line for line in lines if line.startswith("10.0.0.1:50051")]
    assert row.split()[1:8] == ["connected", "3", "7", "20.0", "24.0", "100.0", "500.0"]
    assert "█████▒▒▒▒▒▒▒▒▒▒·····" in row
    assert row.split()[-3:] == ["250/500/250", "90%", "5"]
    (first, second) = [line.split() for line in lines if line.startswith("chat-")]
    assert first == ["chat-1", "search", "generating", "120", "41", "4.5s", "500ms", "10.0", "10.0.0.1:50051"]
    assert second == ["chat-2", "-", "waiting", "9", "0", "250ms", "-", "-", "10.0.0.1:50051"]
    assert "idle" not in shown


def test_requests_beyond_the_room_are_counted() -> None:
    shown = text(frame_of(status(), status()), max_requests=1)
    assert "chat-1" in shown
    assert "chat-2" not in shown
    assert "and 1 more" in shown


def test_a_narrow_terminal_keeps_the_numbers() -> None:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    console.print(render(frame_of(status(), status(LATER)), 10))
    output = console.file
    assert isinstance(output, io.StringIO)
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    (row,) = [line for line in lines if "120" in line]
    assert all(number in row.split() for number in ("120", "41", "4.5s", "500ms", "10.0"))


def test_an_idle_service_says_so() -> None:
    idle = Status(replace(SERVICE, active_requests=0, is_draining=True), (), ())
    shown = text(frame_of(idle, idle))
    assert "idle" in shown
    assert "draining" in shown
    assert "none" in shown


def test_a_silent_engine_and_a_service_that_is_away() -> None:
    assert "not connected" in text(frame_of(status(None), status(None, error="not connected")))
    history = History("there")
    nothing = history.away("connection refused", 5.0)
    assert text(nothing).splitlines() == ["tokenwire top  there", "the service is away: connection refused"]
    history.add(Reading(10.0, status()))
    shown = text(history.away("connection refused", 13.0))
    assert "the service is away: connection refused; shown is what it said 3.0s ago" in shown
    assert "chat-1" in shown
    assert history.add(Reading(14.0, status(LATER))).problem == ""


def test_what_a_client_calls_its_request_does_not_steer_the_terminal() -> None:
    hostile = replace(OLD, request_id="a\x1b[2J" + "x" * 250)
    evil = replace(status(), requests=(hostile,))
    shown = text(frame_of(evil, evil))
    assert "\x1b" not in shown
    assert "a␛[2Jxxx" in shown
    assert all(len(line) <= 160 for line in shown.splitlines())


def test_the_json_is_the_whole_frame() -> None:
    frame = frame_of(status(), status(LATER))
    told = json.loads(frame_json(frame))
    assert told["generated_tokens_per_second"] == 100.0
    assert told["rates"]["10.0.0.1:50051"]["step_ms"] == pytest.approx(20.0)
    assert told["status"]["requests"][0]["request_id"] == "chat-1"
    assert told["status"]["engines"][0]["figures"]["used_blocks"] == 250


def test_curves_bars_and_times() -> None:
    assert sparkline([]) == ""
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([0, 1, 2, 4]) == "▁▃▅█"
    assert block_bar(replace(FIGURES, used_blocks=1, cached_blocks=0)).plain == "█" + "·" * 19
    assert block_bar(replace(FIGURES, used_blocks=1000, cached_blocks=0)).plain == "█" * 20
    assert block_bar(replace(FIGURES, used_blocks=995, cached_blocks=5)).plain == "█" * 20
    times = [0.012, 3.44, 307, 7_500, 274_000]
    assert [duration(each) for each in times] == ["12ms", "3.4s", "5m07s", "2h05m", "3d04h"]


def test_the_curve_is_bounded() -> None:
    history = History("there", length=5)
    frames = [history.add(Reading(float(at), status())) for at in range(20)]
    assert len(frames[-1].history) == 5
