"""How one request is sampled, after validation: plain numbers.

Must not know: torch, protobuf, the clock.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated sampling settings; every field is in range and final.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off.
    `seed` is any int64; the random number of a token is a function of
    (seed, position of the token in prompt + completion) alone.
    """

    max_tokens: int
    seed: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
