"""The commands, from flags to files, on our engine in one process."""

import json
from pathlib import Path

import pytest

from benchmarks.serving import checks, compare
from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder
from tests.fixtures.checkpoints import write_succ


@pytest.fixture(scope="module")
def succ(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_succ(tmp_path_factory.mktemp("succ"), resolve_model_folder(DEFAULT_MODEL))


SMALL = (
    "--rounds",
    "2",
    "--requests",
    "1:2",
    "2:4",
    "--concurrency",
    "1",
    "2",
    "--output-tokens",
    "4",
    "--threads",
    "1",
)
LITTLE_MEMORY = ("--engine-flags", "--num-blocks 256 --max-num-requests 8")


def test_a_comparison_writes_json_picture_and_table(
    succ: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "result"
    command = (
        "--targets",
        "inprocess",
        "--model",
        str(succ),
        "--prompt-tokens",
        "20",
        "--out",
        str(out),
        "--seed",
        "3",
    )
    assert compare.main([*command, *SMALL]) == 0
    results = json.loads(out.with_suffix(".json").read_text())
    assert [(turn["round"], turn["concurrency"]) for turn in results["turns"]] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    for turn in results["turns"]:
        requests = 2 * turn["concurrency"]
        assert (turn["measures"]["requests"], turn["measures"]["errors"]) == (requests, 0)
        assert turn["measures"]["tokens"] == 4 * requests
    assert results["settings"]["seed"] == 3
    assert results["machine"]["cores"] >= 1
    assert results["targets"]["inprocess"]["version"].startswith("tokenwire ")
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert out.with_suffix(".md").read_text() in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--targets", "nobody"), "no target nobody"),
        (("--targets", "inprocess", "--baseline", "vllm"), "the baseline vllm is none of the targets"),
        (("--targets", "inprocess", "--rounds", "0"), "must be positive"),
        (("--targets", "inprocess", "--requests", "1"), "is not CONCURRENCY:REQUESTS"),
        (("--targets", "inprocess", "--model", "no/such/model"), "neither a folder"),
    ],
)
def test_what_cannot_be_compared_is_said_in_a_line(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert compare.main([*flags, "--out", str(tmp_path / "x")]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_services_engine_and_process_serve_the_same_workload(succ: Path, tmp_path: Path) -> None:
    out = tmp_path / "result"
    targets = ("--targets", "tokenwire", "tokenwire-engine", "inprocess")
    command = (*targets, "--model", str(succ), "--out", str(out))
    assert compare.main([*command, *SMALL]) == 0
    results = json.loads(out.with_suffix(".json").read_text())
    order = [turn["target"] for turn in results["turns"]]
    assert order[:3] == ["tokenwire", "tokenwire-engine", "inprocess"]
    assert order[6:9] == ["tokenwire-engine", "inprocess", "tokenwire"]
    assert {turn["measures"]["tokens"] for turn in results["turns"]} == {8, 16}


@pytest.mark.slow
def test_checks_find_something(succ: Path, tmp_path: Path) -> None:
    out = tmp_path / "checks.json"
    command = ("cached-prefix", "start", "--model", str(succ), "--threads", "1", "--out", str(out))
    assert checks.main(command) in (0, 1)
    found = json.loads(out.read_text())["checks"]
    assert [len(found[name]) for name in ("cached-prefix", "start")] == [1, 2]
    assert all(isinstance(finding["value"], float) for findings in found.values() for finding in findings)


def test_an_unknown_check_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        checks.main(["no-such-check"])
    assert "no check no-such-check" in capsys.readouterr().err
