"""The `tokenwire` command's penalties, samples, log probabilities and structured output, against a scripted service."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.fixtures.fake_tokenizer_service import End, FakeTokenizerService, Say, completion, serving_in_thread
from tokenwire.common.v1.sampling_pb2 import StructuredOutput
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb
from tokenwire_client.cli_app import app

LOGPROBS = [
    pb.TextPositionLogprobs(
        token=pb.TextLogprob(token_id=1, token=b"Par\xe9", logprob=-0.5),
        rank=2,
        top=[pb.TextLogprob(token_id=7, token=b"Lon", logprob=-0.25)],
    )
]
SCRIPTS: dict[str, Any] = {
    "two": [
        [
            Say("b", (2,), {"index": 1}),
            Say("a", (1,)),
            End(completion(seed=9)),
            Say("B", (3,), {"index": 1}),
            End(completion(seed=10), index=1),
        ]
    ],
    "paris": [[Say("Par", (1,), {"logprobs": LOGPROBS}), End(completion())]],
}


@pytest.fixture(scope="module")
def fake() -> FakeTokenizerService:
    return FakeTokenizerService(SCRIPTS)


@pytest.fixture(scope="module")
def target(fake: FakeTokenizerService) -> Iterator[str]:
    with serving_in_thread(fake) as address:
        yield address


def run(target: str, *arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), env={"TOKENWIRE_TARGET": target})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_samples_are_shown_one_after_the_other(target: str, command: str) -> None:
    code, output, errors = run(target, command, "two", "--n", "2", "--stats")
    assert (code, output) == (0, "--- 1 of 2\na\n--- 2 of 2\nbB\n")
    assert [line.rpartition(" ")[2] for line in errors.splitlines()] == ["seed=9", "seed=10"]


def test_samples_as_json(target: str) -> None:
    code, output, _ = run(target, "generate", "two", "--n", "2", "--json")
    answer = json.loads(output)
    assert code == 0
    assert [(each["index"], each["text"], each["seed"]) for each in answer["completions"]] == [
        (0, "a", 9),
        (1, "bB", 10),
    ]
    assert answer["timing"]["total_s"] > 0


def test_log_probabilities_go_to_standard_error_or_into_json(target: str) -> None:
    code, output, errors = run(target, "chat", "paris", "--logprobs", "1")
    assert (code, output) == (0, "Par\n")
    assert errors.split() == ["-0.5000", "2", "'Par\ufffd'", "'Lon'=-0.2500"]
    code, output, _ = run(target, "chat", "paris", "--logprobs", "1", "--json")
    assert json.loads(output)["logprobs"] == [
        {
            "token": {"token_id": 1, "token": "Par\ufffd", "logprob": -0.5},
            "rank": 2,
            "top": [{"token_id": 7, "token": "Lon", "logprob": -0.25}],
        }
    ]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_numbers_reach_the_service(target: str, fake: FakeTokenizerService, command: str) -> None:
    numbers = {
        "--repetition-penalty": 0.5,
        "--presence-penalty": 0.0,
        "--frequency-penalty": -1.5,
        "--logprobs": 0,
        "--n": 1,
    }
    name = f"numbers of {command}"
    flags = [word for flag, value in numbers.items() for word in (flag, str(value))]
    assert run(target, command, name, *flags, "--priority", "-3")[0] == 0
    [call] = fake.calls(name)
    sampling = call.request.options.sampling
    assert {field.name for field, _ in sampling.ListFields()} == {flag[2:].replace("-", "_") for flag in numbers}
    assert [getattr(sampling, flag[2:].replace("-", "_")) for flag in numbers] == list(numbers.values())
    assert call.request.options.priority == -3


def test_structured_output_reaches_the_service(target: str, fake: FakeTokenizerService, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text('{"é": 1}\n', encoding="utf-8")
    cases = [
        (["--json-schema", str(file)], StructuredOutput(json_schema='{"é": 1}\n')),
        (["--json-object"], StructuredOutput(json_object=True)),
        (["--regex", "a|b"], StructuredOutput(regex="a|b")),
        (["--grammar", str(file)], StructuredOutput(grammar='{"é": 1}\n')),
        (["--choice", "yes", "--choice", "no"], StructuredOutput(choice={"values": ["yes", "no"]})),
    ]
    for place, (flags, expected) in enumerate(cases):
        assert run(target, "generate", f"structure {place}", *flags)[0] == 0
        [call] = fake.calls(f"structure {place}")
        assert call.request.options.sampling.structured_output == expected


def test_wrong_flags_are_usage_errors(target: str, tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff")
    for flags, words in (
        (["--regex", "a", "--json-object"], "give one of"),
        (["--json-schema", str(tmp_path / "none")], "No such file"),
        (["--grammar", str(binary)], "not UTF-8"),
    ):
        code, _, errors = run(target, "generate", "x", *flags)
        assert code == 2
        assert words in " ".join(errors.replace("│", " ").split())
