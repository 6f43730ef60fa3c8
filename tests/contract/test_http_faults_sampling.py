"""Area 6 of the known faults over HTTP, on HIST: what is drawn is what a slow plain loop draws, alone and in company.

The model's own defaults are not neutral, so every request that sets a neutral value shows that it is used as given.
"""

import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine_service.core.sampling import SamplingParams
from tests.fixtures.checkpoints import HIST_VOCAB
from tests.fixtures.http_calls import COMPLETIONS
from tests.fixtures.http_stack import HIST_DEFAULTS, HttpStack, together
from tests.fixtures.reference_sampling import generate
from tokenizer_service.sessions.prompt_text import PromptEncoder
from tokenizer_service.text.prompt import ChatLimits

Logits = Callable[[list[int]], list[float]]
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
NEUTRAL |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
DRAW = random.Random(6)
SHORT = [3, 5, 2, *DRAW.choices(range(1, HIST_VOCAB), k=9)]
LONG = [*DRAW.choices(range(1, 9), k=20), *DRAW.choices(range(1, HIST_VOCAB), k=130)]
# Among few tokens a history repeats itself, and penalties have something to do.
FEW = list(range(1, 9))


def ask(prompt: list[int], **fields: Any) -> dict[str, Any]:
    """A request with every sampling field set to its neutral value but for `fields`."""
    return {"prompt": prompt, "max_tokens": 30, "seed": 5, "ignore_eos": True} | NEUTRAL | fields


def expected(logits: Logits, body: dict[str, Any]) -> tuple[int, ...]:
    """What the slow loop answers to a request in which all that matters is set."""
    names = ("max_tokens", "seed", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    fields = {name: body[name] for name in (*names, "presence_penalty", "frequency_penalty") if name in body}
    params = SamplingParams(
        **fields,
        logit_bias=tuple((int(token), bias) for token, bias in body.get("logit_bias", {}).items()),
        banned_token_ids=frozenset(body.get("banned_token_ids", ())),
        allowed_token_ids=frozenset(body["allowed_token_ids"]) if "allowed_token_ids" in body else None,
    )
    return tuple(generate(logits, body["prompt"], params))


PENALTIES = [
    pytest.param({"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 1.0}, id="B076"),
    pytest.param({"temperature": 0.0, "repetition_penalty": 1.5}, id="repetition"),
    pytest.param({"temperature": 0.0, "presence_penalty": 1.5}, id="presence"),
    pytest.param({"temperature": 0.0, "frequency_penalty": 0.8}, id="frequency"),
    pytest.param({"repetition_penalty": 1.4, "presence_penalty": -0.5, "frequency_penalty": 0.3}, id="drawn"),
]


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["short", "chunked"])
@pytest.mark.parametrize("fields", PENALTIES)
def test_penalties_count_what_they_should(
    hist_http: HttpStack, hist_logits: Logits, prompt: list[int], fields: dict[str, Any]
) -> None:
    """B076, B090: repetition counts prompt and completion, the others the completion, with the prompt cached or not."""
    body = ask(prompt, allowed_token_ids=FEW, cache_salt=f"penalties {fields}", **fields)
    answer = expected(hist_logits, body)
    if prompt == SHORT:  # the long one holds every allowed token, so that repetition changes all of them
        assert answer != expected(hist_logits, body | NEUTRAL | {"temperature": fields.get("temperature", 1.0)})
    for cached in (0, 144 if prompt == LONG else 0):
        assert hist_http.answer(COMPLETIONS, body)["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
        assert hist_http.choice(body).token_ids == answer


def test_a_short_row_does_not_see_its_long_neighbours(hist_http: HttpStack, hist_logits: Logits) -> None:
    """B077."""
    body = ask(SHORT, temperature=0.0, frequency_penalty=1.0, allowed_token_ids=FEW, max_tokens=60)
    long = body | {"prompt": [*LONG, *LONG, *LONG, *DRAW.choices(FEW, k=50)], "max_tokens": 30}
    alone = hist_http.choice(body).token_ids
    answers = together([lambda b=b: hist_http.choice(b).token_ids for b in [body, long, body]])  # type: ignore[misc]
    assert alone == answers[0] == answers[2] == expected(hist_logits, body)
    assert answers[1] == expected(hist_logits, long)


def test_a_seed_gives_another_number_for_each_token(hist_http: HttpStack) -> None:
    """B079: nearly even logits; 200 tokens of one request are many and their counts are not absurd."""
    ids = hist_http.choice(ask(SHORT, temperature=100.0, max_tokens=200)).token_ids
    assert len(set(ids)) >= 60
    counts = [sum(token_id // 32 == part for token_id in ids) for part in range(16)]
    assert sum((count - 12.5) ** 2 / 12.5 for count in counts) < 57  # chi-square, 15 degrees: p > 1e-6


@pytest.mark.parametrize("stream", [False, True])
def test_samples_of_a_seed_differ_and_come_again(hist_http: HttpStack, stream: bool) -> None:
    """B080."""
    body = ask(SHORT, n=4, seed=1)
    first, second = ([choice.text for choice in hist_http.choices(body, stream=stream)] for _ in range(2))
    assert first == second
    assert len(set(first)) == 4


def test_a_banned_token_never_comes_in_a_mixed_batch(hist_http: HttpStack, hist_logits: Logits) -> None:
    """B083: greedy rows with bans beside drawn rows, each as it is alone."""
    favourites = list(dict.fromkeys(expected(hist_logits, ask(SHORT, temperature=0.0))))[:12]
    bias = {str(token_id): -100 for token_id in favourites}
    bodies = [
        ask(SHORT, temperature=0.0, logit_bias=bias),
        ask(SHORT, temperature=0.0, banned_token_ids=favourites),
        ask(SHORT, temperature=0.0, banned_token_ids=favourites, logit_bias={str(favourites[0]): 100}),
        *(ask(SHORT, seed=seed, top_k=20) for seed in range(4)),
        ask(SHORT, banned_token_ids=favourites, seed=77),
    ]
    found = together([lambda b=b: hist_http.choice(b).token_ids for b in bodies])  # type: ignore[misc]
    assert found == [expected(hist_logits, body) for body in bodies]
    for token_ids in (*found[:3], found[-1]):
        assert not set(favourites) & set(token_ids)


def test_a_value_that_is_set_is_used_and_what_is_unset_is_the_models(hist_http: HttpStack, hist_logits: Logits) -> None:
    """B091: 0 is not unset; `max_tokens` of completions is 16."""
    unset = {"prompt": SHORT, "seed": 5, "ignore_eos": True}
    for given in ({}, {"temperature": 0.0}, {"repetition_penalty": 1.0}, {"temperature": 1.0}, {"temperature": None}):
        used = {"max_tokens": 16} | HIST_DEFAULTS | {name: x for name, x in given.items() if x is not None}
        assert hist_http.choice(unset | given).token_ids == expected(hist_logits, unset | used), given


def key_of(token: bytes) -> str:
    """How completions write a token."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def reference_top(logits: Logits, tokens: list[int], came: int, count: int, texts: list[bytes]) -> dict[str, float]:
    """What stands under `top_logprobs` after `tokens`: of tokens with the same bytes the likelier, and what came."""
    row = logits(tokens)
    total = max(row) + math.log(sum(math.exp(value - max(row)) for value in row))
    ranked = sorted(range(len(row)), key=lambda token: (-row[token], token))[:count]
    found: dict[str, float] = {}
    for token in ranked:
        found.setdefault(key_of(texts[token]), row[token] - total)
    return found | {key_of(texts[came]): row[came] - total}


@pytest.fixture(scope="module")
def token_texts(hist_folder: Path) -> list[bytes]:
    """The bytes of each token of HIST, which has all 256 bytes and pairs of them."""
    encoder = PromptEncoder.load(hist_folder, ChatLimits(10, 1000))
    return [encoder.token_bytes(token) for token in range(HIST_VOCAB)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_mixed_batch_of_log_probabilities(
    hist_http: HttpStack, hist_logits: Logits, token_texts: list[bytes], stream: bool
) -> None:
    """B092: none, 0, 1, 20 and echo side by side; each has what it asked for, parts of characters told apart."""
    wanted = [None, 0, 1, 20, 20]
    bodies = [
        ask([*SHORT, place], max_tokens=6, temperature=2.0, seed=place) | ({} if count is None else {"logprobs": count})
        for place, count in enumerate(wanted, 1)
    ]
    bodies[-1]["echo"] = True
    choices = together([partial(hist_http.choice, body, stream=stream) for body in bodies])
    num_parts = 0
    for body, count, choice in zip(bodies, wanted, choices, strict=True):
        if count is None:
            assert choice.logprobs == ()
            continue
        tokens = [*body["prompt"], *choice.token_ids]
        first = 1 if body.get("echo") else len(body["prompt"])
        entries = choice.logprobs[1:] if body.get("echo") else choice.logprobs
        assert len(entries) == len(tokens) - first
        for place, (text, logprob, top) in enumerate(entries, first):
            assert text == key_of(token_texts[tokens[place]])
            expected = reference_top(hist_logits, tokens[:place], tokens[place], count, token_texts)
            assert top == pytest.approx(expected, abs=1e-3)
            assert top[text] == logprob
            num_parts += sum(key.startswith("bytes:") for key in top)
    assert num_parts > 50, "the case has tokens that look alike"
