"""Reads tenants.toml: every value is checked, and no value that may be a secret is ever shown.

Must not know: who uses the table.
"""

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from service_runtime.reloaded import Reloaded
from tokenizer_service.tenants.tenant import LEAST_INT32, MOST_INT32, Tenant, TenantLimits, TenantTable

MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_TENANTS = 1000
MAX_KEYS = 4096
MAX_WEIGHT = 1000
_MOST_TOKENS = 10**12

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$")]
Priority = Annotated[int, Field(ge=LEAST_INT32, le=MOST_INT32)]


class BadTenants(Exception):
    """The file cannot be used; the message is for the operator and holds no key."""


class _Entry(BaseModel):
    """One [[tenant]]. By default a client may lower the urgency of its requests, not raise it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Name
    weight: int = Field(1, ge=1, le=MAX_WEIGHT)
    priority: Priority = 0
    min_priority: Priority | None = None
    max_priority: Priority = MOST_INT32
    key_sha256: list[Digest] = Field(default_factory=list, max_length=64)
    certificate_names: list[Annotated[str, StringConstraints(min_length=1, max_length=512)]] = Field(
        default_factory=list, max_length=64
    )
    share_prefix_cache: bool = False
    max_requests: int | None = Field(None, ge=1, le=1_000_000)
    max_tokens_in_flight: int | None = Field(None, ge=1, le=_MOST_TOKENS)
    tokens_per_minute: int | None = Field(None, ge=1, le=_MOST_TOKENS)

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        least = self.priority if self.min_priority is None else self.min_priority
        if not least <= self.priority <= self.max_priority:
            raise ValueError(f"priority {self.priority:,} is not in {least:,}..{self.max_priority:,}")
        if not self.key_sha256 and not self.certificate_names:
            raise ValueError("neither key_sha256 nor certificate_names are given: nobody could be this tenant")
        return self

    def tenant(self) -> Tenant:
        return Tenant(
            self.name,
            self.weight,
            self.priority,
            self.priority if self.min_priority is None else self.min_priority,
            self.max_priority,
            self.share_prefix_cache,
            TenantLimits(self.max_requests, self.max_tokens_in_flight, self.tokens_per_minute),
        )


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    tenant: list[_Entry] = Field(min_length=1, max_length=MAX_TENANTS)


def table_source(file: Path | None, keys: Sequence[bytes]) -> Callable[[], TenantTable]:
    """Gives the table that counts now: of the file, read again when it changes, and of `keys`, which are no tenant's.

    A bad change is logged, and the table before stays. Raises BadTenants.
    """
    if file is None:
        table = TenantTable().with_keys(keys)
        return lambda: table
    return Reloaded("tenants", [file], lambda: read_tenants(file).with_keys(keys), BadTenants).current


def read_tenants(path: Path) -> TenantTable:
    """Raises BadTenants."""
    try:
        entries = _File.model_validate(tomllib.loads(_text(path))).tenant
    except tomllib.TOMLDecodeError as error:
        # Its words may hold a piece of a line; where it is says enough.
        where = str(error).rpartition("(")[2].rstrip(")")
        raise BadTenants(f"{path} is not valid TOML ({where})") from None
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise BadTenants(f"{path}: {place}: {first['msg']}") from None
    return _table(path, entries)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadTenants(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise BadTenants(f"{path} exceeds the limit of {MAX_FILE_BYTES:,} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BadTenants(f"{path} is not UTF-8 text") from None


def _table(path: Path, entries: list[_Entry]) -> TenantTable:
    names: set[str] = set()
    keys: dict[bytes, Tenant] = {}
    certificates: dict[str, Tenant] = {}
    for entry in entries:
        tenant = entry.tenant()
        if tenant.name in names:
            raise BadTenants(f"{path}: two tenants are called {tenant.name}")
        names.add(tenant.name)
        for digest in entry.key_sha256:
            other = keys.setdefault(bytes.fromhex(digest), tenant)
            if other is not tenant:
                raise BadTenants(f"{path}: {other.name} and {tenant.name} have the same key")
        for name in entry.certificate_names:
            other = certificates.setdefault(name, tenant)
            if other is not tenant:
                raise BadTenants(f"{path}: {other.name} and {tenant.name} have the same certificate name {name}")
    if len(keys) > MAX_KEYS:
        raise BadTenants(f"{path}: {len(keys):,} keys exceed the limit of {MAX_KEYS:,}")
    return TenantTable(tuple(keys.items()), certificates)
