"""The names of a prompt's blocks, as engines use them in WatchKvEvents (engine.proto says how they are made).

Must not know: which blocks an engine has.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256

DIGEST_BYTES = 16
_TOKEN_BYTES = 8


# A lone surrogate: in no valid text, so no client's salt can imitate an adapter's.
_ADAPTER_MARK = "\ud800"


def salt_of(cache_salt: str | None, adapter_fingerprint: str) -> str:
    """What an engine salts the blocks of a request with; no fingerprint: it has no adapter."""
    salt = cache_salt or ""
    return f"{_ADAPTER_MARK}{adapter_fingerprint}{_ADAPTER_MARK}{salt}" if adapter_fingerprint else salt


def block_digests(token_ids: Sequence[int], block_size: int, salt: str) -> list[bytes]:
    """Digests of all full blocks that an engine can find again: it always computes the last token itself.

    About 1 microsecond a block.
    """
    num_blocks = (len(token_ids) - 1) // block_size
    if num_blocks < 1:
        return []
    packed = array("q", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    data, width = packed.tobytes(), block_size * _TOKEN_BYTES
    encoded = salt.encode("utf-8", "surrogatepass")
    key = sha256(b"salt" + len(encoded).to_bytes(8, "little") + encoded + data[:width]).digest()
    digests = [key[:DIGEST_BYTES]]
    for start in range(width, num_blocks * width, width):
        key = sha256(b"next" + key + data[start : start + width]).digest()
        digests.append(key[:DIGEST_BYTES])
    return digests
