"""Speculation, on by default, behind HTTP: deltas of several tokens are counted and stopped like single ones."""

from collections.abc import Iterator

import httpx
import pytest

from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder
from tests.fixtures.checkpoints import succ_continuation, write_succ
from tests.fixtures.http_calls import COMPLETIONS
from tests.fixtures.http_stack import HttpStack, http_stack

# The model answers to each token with the one behind it here, so guesses from the prompt are right.
PROMPT = [*range(1000, 1040), 1000]
WANTED = succ_continuation(1000, 36)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpStack]:
    folder = write_succ(tmp_path_factory.mktemp("succ"), resolve_model_folder(DEFAULT_MODEL))
    with http_stack(folder, tmp_path_factory.mktemp("logs"), engine_flags=("--num-blocks", "256")) as made:
        yield made


def counted(stack: HttpStack, name: str) -> float:
    lines = httpx.get(stack.metrics_url).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"tokenwire_engine_{name}_total"))


def test_text_usage_and_metrics(stack: HttpStack) -> None:
    request = {"prompt": PROMPT, "temperature": 0, "max_tokens": 36}
    answer = stack.post(COMPLETIONS, {**request, "logprobs": 1}).json()
    assert answer["usage"]["completion_tokens"] == 36
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 36
    drafted, accepted = (counted(stack, f"speculation_{name}_tokens") for name in ("drafted", "accepted"))
    assert 15 < accepted <= drafted
    assert counted(stack, "generated_tokens") == 36
    assert counted(stack, "steps") < 36
    again = stack.post(COMPLETIONS, {"prompt": WANTED[:1], "temperature": 0, "max_tokens": 35}).json()
    assert answer["choices"][0]["text"].endswith(again["choices"][0]["text"])


def test_a_stop_string_in_the_middle_of_a_draft(stack: HttpStack) -> None:
    request = {"prompt": PROMPT, "temperature": 0, "max_tokens": 36}
    text = stack.post(COMPLETIONS, request).json()["choices"][0]["text"]
    stop = text[len(text) // 2 :][:5]
    choice = stack.post(COMPLETIONS, {**request, "stop": [stop]}).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == text[: text.index(stop)]
