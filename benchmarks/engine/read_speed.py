"""How fast this machine reads memory: the floor of a decode step, which has to read all weights.

Must not know: models.
"""

import ctypes
import threading
import time

_BYTES = 512 * 2**20
_FILL, _ABSENT = 1, 2


def read_bytes_per_s(threads: int, repeats: int = 5) -> float:
    """The best of `repeats` passes over 512 MiB, each thread reading its part with the C library's memchr."""
    libc = ctypes.CDLL(None)
    libc.memchr.restype = ctypes.c_void_p
    libc.memchr.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    memory = ctypes.create_string_buffer(_BYTES)
    # Written once: pages that never were would all be one page of zeros.
    ctypes.memset(memory, _FILL, _BYTES)
    address, part = ctypes.addressof(memory), _BYTES // threads
    best = min(_pass(libc, address, part, threads) for _ in range(repeats))
    return part * threads / best


def _pass(libc: ctypes.CDLL, address: int, part: int, threads: int) -> float:
    readers = [
        threading.Thread(target=libc.memchr, args=(address + place * part, _ABSENT, part)) for place in range(threads)
    ]
    started = time.perf_counter()
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return time.perf_counter() - started
