"""The `tokenwire` command against a scripted service: output, exit codes, terminal, Ctrl-C."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from tests.fixtures.command_process import WAIT_S, Terminal, start_command
from tests.fixtures.fake_tokenizer_service import (
    End,
    FakeTokenizerService,
    Hold,
    Refuse,
    Say,
    completion,
    echo_text,
    serving_in_thread,
)
from tokenwire_client.cli_app import app

SCRIPTS: dict[str, Any] = {
    "paris": [[Say("Par", (1, 2)), Say("is", (3,)), End(completion(seed=9, request_id="r", stop_string="."))]],
    "held": [[Say("begun", (1,)), Hold("never"), End(completion())]],
    "slow": [[Hold("never")]],
    "esc": [[Say("\x1b[31mred\x9b0m\ttab é", (1,)), End(completion())]],
    "refused": [[Refuse(grpc.StatusCode.INVALID_ARGUMENT, "top_p is wrong", (("top_p", "1.5"), ("seed", "x")))]],
    "full": [[Refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue of 8 is full", (), 1.5)]],
    "no model": [[Refuse(grpc.StatusCode.NOT_FOUND, "no model of that name")]],
    "broken": [[Say("half", (1,))]],
}


@pytest.fixture(scope="module")
def fake() -> FakeTokenizerService:
    return FakeTokenizerService(SCRIPTS)


@pytest.fixture(scope="module")
def target(fake: FakeTokenizerService) -> Iterator[str]:
    with serving_in_thread(fake) as address:
        yield address


def run(target: str, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), input=stdin, env={"TOKENWIRE_TARGET": target})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("arguments", "stdin", "output"),
    [
        (["chat", "paris"], "", "Paris\n"),
        (["chat"], "paris\n", "Paris\n"),
        (["generate", "paris"], "", "Paris\n"),
        (["generate"], "paris", "Paris\n"),
        (["generate", "--token-ids", "7, 8"], "", echo_text("7,8") + "\n"),
        (["chat", "esc"], "", "\x1b[31mred\x9b0m\ttab é\n"),
        (["tokenize", "aé"], "", "97 195 169\n"),
        (["tokenize"], "a\n", "97\n"),
        (["tokenize", "ab", "--json"], "", "[97, 98]\n"),
        (["models"], "", "name\tmax_model_len\tvocab_size\tconnected_engines\ntiny\t64\t256\t2\n"),
        (["health"], "", "serving\n"),
        (["health", "--json"], "", '{"status": "serving"}\n'),
    ],
)
def test_output_for_pipes(target: str, arguments: list[str], stdin: str, output: str) -> None:
    assert run(target, *arguments, stdin=stdin) == (0, output, "")


def test_an_answer_as_json(target: str) -> None:
    code, output, errors = run(target, "generate", "paris", "--json", "--stats")
    answer = json.loads(output)
    timing = answer.pop("timing")
    assert answer == {
        "text": "Paris",
        "token_ids": [1, 2, 3],
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1},
        "stop_string": ".",
        "stop_token_id": None,
        "seed": 9,
        "request_id": "r",
        "index": 0,
        "logprobs": [],
        "prompt_logprobs": [],
        "tool_calls": [],
    }
    assert 0 < timing["first_token_s"] <= timing["total_s"]
    assert code == 0
    assert errors.startswith("prompt_tokens=3 cached_tokens=1 completion_tokens=2 first_token_s=")


def test_models_as_json(target: str) -> None:
    [model] = json.loads(run(target, "models", "--json")[1])
    assert model["name"] == "tiny"
    assert model["eos_token_ids"] == [0, 2]


def test_statistics_go_to_standard_error(target: str) -> None:
    code, output, errors = run(target, "chat", "paris", "--stats")
    assert (code, output) == (0, "Paris\n")
    assert re.fullmatch(
        r"prompt_tokens=3 cached_tokens=1 completion_tokens=2 first_token_s=\d+\.\d{3} total_s=\d+\.\d{3} "
        r"finish_reason=stop seed=9\n",
        errors,
    )


def test_every_flag_reaches_the_service(target: str, fake: FakeTokenizerService) -> None:
    flags = [
        "--model",
        "m",
        "--cache-salt",
        "s",
        "--max-tokens",
        "0",
        "--min-tokens",
        "0",
        "--temperature",
        "0",
        "--top-k",
        "0",
        "--top-p",
        "1",
        "--min-p",
        "0",
        "--seed",
        "-5",
        "--stop",
        "x",
        "--stop",
        "y",
        "--stop-token-id",
        "7",
        "--stop-token-id",
        "8",
        "--heed-eos",
        "--include-stop",
        "--keep-special-tokens",
        "--timeout",
        "50",
    ]
    for command, name in (("generate", "flags of generate"), ("chat", "flags of chat")):
        assert run(target, command, name, *flags)[0] == 0
        [call] = fake.calls(name)
        options, sampling = call.request.options, call.request.options.sampling
        assert call.request.model == "m"
        assert call.remaining_s == pytest.approx(50, abs=5)
        assert {field.name: value for field, value in sampling.ListFields()} == {
            "max_tokens": 0,
            "min_tokens": 0,
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "seed": -5,
            "stop_token_ids": [7, 8],
            "ignore_eos": False,
        }
        assert (list(options.stop), options.cache_salt) == (["x", "y"], "s")
        assert (options.include_stop_str_in_output, options.skip_special_tokens) == (True, False)


def test_no_flags_leave_every_knob_unset_b091(target: str, fake: FakeTokenizerService) -> None:
    run(target, "generate", "no flags")
    run(target, "chat", "no flags", "--system", "be brief")
    generated, chatted = (call.request for call in fake.calls("no flags"))
    for request in (generated, chatted):
        assert [field.name for field, _ in request.options.ListFields()] in ([], ["sampling"])
        assert request.options.sampling.ListFields() == []
    assert [(m.role, m.content) for m in chatted.messages] == [("system", "be brief"), ("user", "no flags")]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["chat", "refused"], 2, "tokenwire: invalid argument: top_p is wrong\n  seed: x\n"),
        (["generate", "full"], 1, "tokenwire: resource exhausted: queue of 8 is full\n  try again in 1.5 s\n"),
        (["generate", "no model"], 1, "tokenwire: not found: no model of that name\n"),
        (["chat", "slow", "--timeout", "0.2"], 1, "tokenwire: deadline exceeded: "),
        (["chat", "broken"], 1, "tokenwire: incomplete stream: the stream ended after 1 tokens without"),
        (["generate", "x", "--seed", str(2**64)], 2, "tokenwire: invalid argument: options.sampling.seed: must"),
        (["chat", "\ud800"], 2, "tokenwire: invalid argument: messages[0].content: must be text without"),
        (["generate", "x", "--timeout", "-1"], 2, "tokenwire: invalid argument: timeout: must be in"),
        (["generate", "x", "--target", "127.0.0.1:1", "--timeout", "9"], 1, "tokenwire: unavailable: "),
        (["generate", "x", "--temperature", "hot"], 2, "Usage: "),
        (["generate", "x", "--no-such-flag"], 2, "Usage: "),
        (["generate", "x", "--token-ids", "1"], 2, "Usage: "),
        (["generate", "--token-ids", "one"], 2, "Usage: "),
        (["sing"], 2, "Usage: "),
        (["health", "draining"], 1, ""),
        (["health", "no.such.Service"], 1, "tokenwire: not found: "),
    ],
)
def test_failures_have_their_exit_codes(target: str, arguments: list[str], code: int, message: str) -> None:
    exit_code, _, errors = run(target, *arguments)
    assert exit_code == code
    assert errors.startswith(message)
    assert "Traceback" not in errors


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_ctrl_c_cancels_the_stream_and_exits_130(target: str, fake: FakeTokenizerService, flags: list[str]) -> None:
    before = len(fake.calls("held"))
    process = start_command(target, "chat", "held", *flags, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    call = fake.wait_for_calls("held", before + 1)[-1]
    if not flags:
        assert process.stdout.read(5) == b"begun"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert errors.strip() == b""
    assert call.cancelled.wait(1.0)


def test_a_reader_that_left_is_no_traceback(target: str, fake: FakeTokenizerService) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = start_command(target, "chat", "paris", stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    _, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, errors) == (1, b"")


def test_text_cannot_steer_the_terminal(target: str) -> None:
    with Terminal(target, "chat", "esc") as terminal:
        output = terminal.read_to_end()
        assert terminal.process.returncode == 0
        assert "\N{SYMBOL FOR ESCAPE}[31mred\N{REPLACEMENT CHARACTER}0m" in output
        assert "tab é\r\n" in output
        assert "\x1b[31mred" not in output


def test_a_conversation_remembers_its_turns(target: str, fake: FakeTokenizerService) -> None:
    with Terminal(target, "chat", "--system", "sys") as terminal:
        terminal.read_until("you> ")
        terminal.type("paris\n")
        terminal.read_until("Paris")
        terminal.read_until("you> ")
        terminal.type("refused\n")
        terminal.read_until("top_p is wrong")
        terminal.read_until("you> ")
        terminal.type("second turn\n")
        terminal.read_until("<second turn:4>")
        terminal.read_until("you> ")
        terminal.type("\x04")
        terminal.read_to_end()
        assert terminal.process.returncode == 0
    [call] = fake.calls("second turn")
    assert [(m.role, m.content) for m in call.request.messages] == [
        ("system", "sys"),
        ("user", "paris"),
        ("assistant", "Paris"),
        ("user", "second turn"),
    ]


def test_ctrl_c_in_a_conversation_ends_the_answer_and_then_the_command(target: str, fake: FakeTokenizerService) -> None:
    before = len(fake.calls("held"))
    with Terminal(target, "chat") as terminal:
        terminal.read_until("you> ")
        terminal.type("held\n")
        terminal.read_until("begun")
        call = fake.wait_for_calls("held", before + 1)[-1]
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_until("(stopped)")
        assert call.cancelled.wait(1.0)
        terminal.read_until("you> ")
        terminal.process.send_signal(signal.SIGINT)
        # Readline looks at signals only when it wakes up; one that came just before it waits needs a key.
        terminal.type("\n")
        terminal.read_to_end()
        assert terminal.process.returncode == 130
