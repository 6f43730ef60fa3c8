"""Area 6 of the known faults over HTTP, on HIST: values at and beyond the ends of their ranges, alone and together."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.fixtures.http_calls import COMPLETIONS, error_of
from tests.fixtures.http_stack import HttpStack, together

PROMPT = [7, 99, 300, 21, 450]
GREEDY = {"temperature": 0.0, "repetition_penalty": 1.0}
TOP_K_OFF: list[Any] = [0, -1, None, 512, 513, 9_999_999, 2**31 - 1, 2**31]
TOP_K_REFUSED: list[Any] = [-2, 1.5, "5", 2**63, True]
JSON = {"content-type": "application/json"}


def ask(**fields: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 6, "seed": 3, "ignore_eos": True, "repetition_penalty": 1.0} | fields


def ids(stack: HttpStack, body: dict[str, Any]) -> tuple[int, ...]:
    return stack.choice(body).token_ids


def beside(stack: HttpStack, bodies: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    """All at once."""
    calls: list[Callable[[], tuple[int, ...]]] = [lambda body=body: ids(stack, body) for body in bodies]  # type: ignore[misc]
    return together(calls)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [1, 0.5, 1e-9])
def test_top_k_off_in_every_way(hist_http: HttpStack, temperature: float, top_p: float) -> None:
    """B084, B085: 0, -1, null and all from the vocabulary's size on are off; 1 is greedy; neighbours do not notice."""
    fields = {"temperature": temperature, "top_p": top_p}
    absent, greedy = ids(hist_http, ask(**fields)), ids(hist_http, ask(**GREEDY))
    if temperature == 0 or top_p == 1e-9:
        assert absent == greedy
    bodies = [ask(top_k=top_k, **fields) for top_k in TOP_K_OFF]
    for body in bodies:
        assert ids(hist_http, body) == absent, body
    nearly = ids(hist_http, ask(top_k=511, **fields))
    mixed = [*bodies, ask(top_k=1, **fields), ask(top_k=511, **fields), ask(**GREEDY), ask(**GREEDY)]
    assert beside(hist_http, mixed) == [absent] * len(TOP_K_OFF) + [greedy, nearly, greedy, greedy]


REFUSED: list[tuple[str, list[Any]]] = [
    ("top_k", TOP_K_REFUSED),
    ("top_p", [0, -0.1, 1.5, "1", True]),  # B084: top_p 0 is refused
    ("min_p", [-0.1, 1.1, "0"]),
    ("temperature", [-1, "1", True, 1e400]),
    ("repetition_penalty", [0, -1, 2.5, "1"]),  # B087
    ("presence_penalty", [-2.1, 2.1]),
    ("frequency_penalty", [-2.1, 2.1]),
    ("seed", [2**63, 2**64 - 1, 2**64, -(2**63) - 1, "7", 1.5, True]),  # B088
    ("logprobs", [-1, 21, 2**63, True]),
    ("n", [0, -1, 65, 2**63, "2"]),
    ("max_tokens", [0, -1, 2**63, 1.5, "5"]),
    ("logit_bias", [{"512": 1}, {"-1": 1}, {"x": 1}, {"5": 101}, {"5": None}, [], 3]),
    ("banned_token_ids", [[512], [-1], ["5"], 5]),
    ("allowed_token_ids", [[512], [-1], [2**63]]),
    ("stop_token_ids", [[512], [-1], [1.5], 5]),
]


@pytest.mark.parametrize(("field", "values"), REFUSED, ids=[field for field, _ in REFUSED])
def test_a_value_that_is_refused_is_named(hist_http: HttpStack, field: str, values: list[Any]) -> None:
    """B084, B087, B088: 400 that names the field, streamed or not, beside a request that is answered exactly."""
    greedy = ids(hist_http, ask(**GREEDY))
    for value in values:
        for stream in (False, True):
            if value == 1e400:
                continue  # json.dumps would write Infinity: the next test sends that
            error = error_of(hist_http.post(COMPLETIONS, ask(stream=stream, **{field: value})), 400)
            assert str(error["param"]).split("[")[0].split(".")[0] == field, (value, error)
    assert beside(hist_http, [ask(**GREEDY)] * 2) == [greedy] * 2


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "seed"])
def test_numbers_that_are_none(hist_http: HttpStack, field: str) -> None:
    """B087: NaN and the infinities, written as Python's json does, and a number that overflows."""
    for text in ("NaN", "Infinity", "-Infinity", "1e999"):
        content = f'{{"prompt": [5], "max_tokens": 1, "{field}": {text}}}'
        error_of(hist_http.client.post(COMPLETIONS, content=content, headers=JSON), 400)


def test_a_repetition_penalty_of_one_does_nothing(hist_http: HttpStack) -> None:
    """B087: and the ends of the range are taken."""
    few = {"allowed_token_ids": [1, 2, 3, 7], "max_tokens": 12}
    plain = ids(hist_http, ask(temperature=0.0, repetition_penalty=1.0, **few))
    ends = beside(hist_http, [ask(temperature=0.0, repetition_penalty=x, **few) for x in (1.0, 1e-3, 2.0)])
    assert ends[0] == plain
    for penalty, found in zip((1e-3, 2.0), ends[1:], strict=True):
        assert ids(hist_http, ask(temperature=0.0, repetition_penalty=penalty, **few)) == found
        assert len(found) == 12


def test_every_seed_of_64_bits_comes_again(hist_http: HttpStack) -> None:
    """B088: alone, again, beside each other; no two are the same number."""
    seeds = [-1, 0, 7, 2**31, 2**63 - 1, -(2**63)]
    bodies = [ask(seed=seed, temperature=3.0, max_tokens=12) for seed in seeds]
    alone = [ids(hist_http, body) for body in bodies]
    assert beside(hist_http, bodies) == alone
    assert len(set(alone)) == len(seeds)
    assert [hist_http.answer(COMPLETIONS, body)["choices"][0]["seed"] for body in bodies] == seeds
