"""Counter-based random numbers: the uniform number of (seed, position), the same on every machine.

Must not know: torch, requests, what the numbers are used for.

Philox4x32-10 of J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011. Key = the 64 bits of the seed, counter = (position, 0). There is no state to advance: batching,
chunks, preemption and restart cannot change a number.
"""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Four random 32-bit words per element; every array holds 32-bit values in uint64, all of one shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> _HALF) ^ c1 ^ k0,
            product_1 & _MASK,
            (product_0 >> _HALF) ^ c3 ^ k1,
            product_0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def uniforms(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per pair of int64 seed and position (>= 0), shape [N].

    48 random bits: `number * total` then stays below `total` in float64, whatever the rounding.
    """
    key = seeds.view(np.uint64)
    place = positions.view(np.uint64)
    zero = np.zeros_like(place)
    counter = (place & _MASK, place >> _HALF, zero, zero)
    word_0, word_1, _, _ = philox4x32(counter, (key & _MASK, key >> _HALF))
    bits = (word_0 << np.uint64(16)) | (word_1 >> np.uint64(16))
    return bits.astype(np.float64) * 2.0**-48
