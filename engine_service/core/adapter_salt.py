"""The cache salt of a request with an adapter: what the adapter computed is never shared with anything else.

Must not know: what an adapter is made of, requests.
"""

# A lone surrogate, in no valid UTF-8 text and so in no salt of a client: no salt can imitate an adapter's (B048).
_MARK = "\ud800"


def salt_with_adapter(cache_salt: str, fingerprint: str) -> str:
    """The salt as it is without an adapter (no `fingerprint`); else one for this adapter's content and this salt."""
    return f"{_MARK}{fingerprint}{_MARK}{cache_salt}" if fingerprint else cache_salt
