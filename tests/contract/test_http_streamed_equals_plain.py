"""A streamed answer is the plain one, character by character and log probability by log probability."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.fixtures.checkpoints import HIST_VOCAB, write_hist
from tests.fixtures.http_calls import CHAT, COMPLETIONS
from tests.fixtures.http_stack import HttpStack, http_stack, together

NUM_REQUESTS = 500
AT_ONCE = 16


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpStack]:
    """HIST in few blocks: answers are any bytes, cut characters among them, and requests are preempted."""
    flags = (
        "--num-blocks",
        "32",
        "--block-size",
        "16",
        "--dtype",
        "float32",
        "--max-num-requests",
        "16",
        "--prefill-chunk-size",
        "64",
    )
    folder = write_hist(tmp_path_factory.mktemp("hist"))
    with http_stack(folder, tmp_path_factory.mktemp("logs"), engine_flags=flags) as stack:
        yield stack


def random_prompt(dice: random.Random) -> list[int]:
    return [dice.randrange(3, HIST_VOCAB) for _ in range(dice.randint(1, 90))]


def random_request(dice: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body with some of the knobs that change the text or what is told of it."""
    is_chat = dice.random() < 0.4
    body: dict[str, Any] = {
        "max_tokens": dice.randint(1, 32),
        "temperature": dice.choice([0, 0.7, 1, 2]),
        "seed": dice.getrandbits(40),
        "top_p": dice.choice([1, 0.8]),
        "top_k": dice.choice([0, 20]),
        "n": dice.choice([1, 1, 1, 2, 3]),
        "stop": dice.choice([None, ["a"], ["th", "é", " e"]]),
        "include_stop_str_in_output": dice.choice([False, True]),
        "skip_special_tokens": dice.choice([False, True]),
        "ignore_eos": dice.choice([False, True]),
        "repetition_penalty": dice.choice([1, 1.2]),
        "frequency_penalty": dice.choice([0, 0.5]),
        "logit_bias": dice.choice([None, {"70": 8, "300": -100}]),
    }
    if is_chat:
        wants = dice.choice([None, 0, 5])
        content = "".join(dice.choices("abc déf🌶한 ", k=dice.randint(1, 40)))
        body |= {"messages": [{"role": "user", "content": content}]}
        body |= {} if wants is None else {"logprobs": True, "top_logprobs": wants}
        return CHAT, body
    wants = dice.choice([None, 0, 5])
    return COMPLETIONS, body | {"prompt": random_prompt(dice)} | ({} if wants is None else {"logprobs": wants})


def check(stack: HttpStack, path: str, body: dict[str, Any]) -> int:
    """Both ways at any moment, among whatever else runs; returns how many choices were compared."""
    plain = stack.choices(body, path)
    streamed = [replace(choice, chunks=()) for choice in stack.choices(body, path, stream=True)]
    assert streamed == [replace(choice, chunks=()) for choice in plain], body
    return len(plain)


def test_five_hundred_random_requests(stack: HttpStack) -> None:
    dice = random.Random(4)
    requests = [random_request(dice) for _ in range(NUM_REQUESTS)]
    compared = 0
    for first in range(0, NUM_REQUESTS, AT_ONCE):
        batch = requests[first : first + AT_ONCE]
        compared += sum(together([partial(check, stack, path, body) for path, body in batch]))
    assert compared >= NUM_REQUESTS
    assert stack.metric("preemptions_total") > 0
    stack.until_idle()
