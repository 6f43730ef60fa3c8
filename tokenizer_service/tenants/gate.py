"""Who is it? From a bearer key or the names in a certificate to a tenant.

Must not know: HTTP, gRPC, what tenants may do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizer_service.engines.refusal import Refusal, RefusalCode
from tokenizer_service.tenants.quota import Quotas
from tokenizer_service.tenants.tenant import ANONYMOUS, Tenant, TenantTable

MISSING_KEY = Refusal(
    RefusalCode.UNAUTHENTICATED, "an API key is needed: send it as the header 'Authorization: Bearer KEY'"
)
BAD_KEY = Refusal(RefusalCode.UNAUTHENTICATED, "the API key is not valid")


@dataclass(frozen=True, slots=True)
class Gate:
    """`table` gives the one that counts now."""

    table: Callable[[], TenantTable]
    quotas: Quotas

    def identify(self, authorization: Sequence[str], certificate_names: Sequence[str]) -> Tenant | Refusal:
        """By the key of the one authorization header, else by the client's certificate. MISSING_KEY or BAD_KEY."""
        table = self.table()
        if table.is_open:
            return ANONYMOUS
        if not authorization:
            return table.by_certificate(certificate_names) or MISSING_KEY
        kind, _, key = authorization[0].partition(" ")
        if kind.lower() != "bearer" or not key:
            return MISSING_KEY
        tenant = table.by_key(key.strip()) if len(authorization) == 1 else None
        return tenant or BAD_KEY
