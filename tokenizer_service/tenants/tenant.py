"""Tenants: who shares the service, with which part, limits and priorities, and how each is recognised.

Must not know: files, transports, what is used now.
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tokenizer_service.engines.refusal import Refusal, invalid_field

LEAST_INT32, MOST_INT32 = -(2**31), 2**31 - 1
_PRIVATE, _COMMON = "tenant:", "client:"


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """None is no limit. Tokens are those of the prompt and of max_tokens, all samples together.

    `tokens_per_minute` is a bucket of that size: it is filled in a minute, and what was not generated is given back.
    """

    max_requests: int | None = None
    max_tokens_in_flight: int | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """`weight` is its part of a busy engine. `priority` counts where a request has none; others must be in range.

    Without `share_prefix_cache` its cached prefixes are its own: nobody else can use or probe them.
    """

    name: str = ""
    weight: int = 1
    priority: int = 0
    min_priority: int = LEAST_INT32
    max_priority: int = MOST_INT32
    share_prefix_cache: bool = False
    limits: TenantLimits = field(default_factory=TenantLimits)

    def resolve_priority(self, asked: int | None) -> int | Refusal | None:
        """The priority of a request; None is the engine's own default."""
        if asked is None:
            return self.priority or None
        if self.min_priority <= asked <= self.max_priority:
            return asked
        allowed = f"{self.min_priority:,}..{self.max_priority:,}"
        return invalid_field("options.priority", f"{asked:,} is not in {allowed}, which this tenant may use")

    def cache_salt(self, asked: str | None) -> str | None:
        """The engine's salt for a client's. Two tenants never get the same one, unless both share the common cache.

        Salts are hashed where the tenant's name stands before them, and where they look as if it did.
        """
        if not self.share_prefix_cache:
            return f"{_PRIVATE}{self.name}:{_digest(asked).hex() if asked else ''}"
        if asked is not None and asked.startswith((_PRIVATE, _COMMON)):
            return _COMMON + _digest(asked).hex()
        return asked


ANONYMOUS = Tenant(share_prefix_cache=True)
"""Everybody, where neither keys nor tenants are configured, and whoever has a key that is no tenant's."""


@dataclass(frozen=True, slots=True)
class TenantTable:
    """`keys` are SHA-256 digests; `certificates` the names in certificates (common names and subject alternatives)."""

    keys: tuple[tuple[bytes, Tenant], ...] = ()
    certificates: Mapping[str, Tenant] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Nobody has to say who they are."""
        return not self.keys and not self.certificates

    def by_key(self, key: str) -> Tenant | None:
        """Compares with every key, so that the time tells nothing."""
        given = _digest(key)
        found = None
        for digest, tenant in self.keys:
            if hmac.compare_digest(given, digest):
                found = tenant
        return found

    def by_certificate(self, names: Iterable[str]) -> Tenant | None:
        """Of the first name that is a tenant's."""
        return next((self.certificates[name] for name in names if name in self.certificates), None)

    def with_keys(self, digests: Iterable[bytes]) -> "TenantTable":
        """These tenants, and keys that are no tenant's; one that is both is the tenant's, with its limits."""
        return TenantTable((*((digest, ANONYMOUS) for digest in digests), *self.keys), self.certificates)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()
