"""What the simulated model says: a pure function of seed and position, as the real sampler's random numbers are.

Must not know: requests, logits.
"""

_MASK = (1 << 64) - 1


def token_at(seed: int, position: int, vocab_size: int, forbidden: frozenset[int]) -> int:
    """The token id at a position of prompt + completion; none of `forbidden` (the ids that would end the request).

    Mixed by the finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators).
    """
    value = (seed * 0x9E3779B97F4A7C15 + position) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    token = (value ^ (value >> 31)) % vocab_size
    while token in forbidden:
        token = (token + 1) % vocab_size
    return token
