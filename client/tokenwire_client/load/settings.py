"""What a load test does, as checked data; and the same in words for the report.

Must not know: the command line, how it is done.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tokenwire_client.load.arrivals import ArrivalKind, Pace, scaled
from tokenwire_client.load.generator import Limits
from tokenwire_client.load.recorder import Targets
from tokenwire_client.load.workload import Shape, TraceEntry
from tokenwire_client.tls import Tls

MAX_ROUNDS = 100
MAX_WARMUP_S = 1e6
_MAX_TENANTS = 64


class TargetKind(Enum):
    """How the server is spoken to."""

    GRPC = "grpc"
    HTTP = "http"


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks; `key` is a secret and goes into no report."""

    name: str
    weight: float
    key: str | None


@dataclass(frozen=True, slots=True)
class Server:
    """The target. `address`: host:port for gRPC, a base URL (without /v1) for HTTP; `model` "" is the first served."""

    kind: TargetKind
    address: str
    model: str = ""
    chat: bool = False
    ignore_eos: bool = True
    tls: Tls | None = None
    extra: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        is_url = self.address.startswith(("http://", "https://"))
        if (self.kind is TargetKind.HTTP) != is_url:
            wanted = "a URL that begins with http:// or https://" if self.kind is TargetKind.HTTP else "host:port"
            raise ValueError(f"the target of kind {self.kind.value} must be {wanted}, got {self.address!r}")
        if "@" in self.address:
            raise ValueError("the target must hold no credentials: give keys as --api-key or --tenant")
        if is_url and self.address.rstrip("/").endswith("/v1"):
            raise ValueError(f"the target must be a URL without /v1, got {self.address!r}")
        if self.tls is not None and self.address.startswith("http://"):
            raise ValueError("flags of TLS need a target that begins with https://")
        if self.extra and self.kind is TargetKind.GRPC:
            raise ValueError("an extra body is for targets of kind http")


@dataclass(frozen=True, slots=True)
class RunSettings:
    """One load. `pace` for drawn arrivals, `clients` for a closed loop, `entries` and `time_scale` for a trace (entries
    may also give the requests of the other two)."""

    server: Server
    arrivals: ArrivalKind
    shape: Shape
    limits: Limits
    targets: Targets
    tenants: tuple[Tenant, ...]
    seed: int = 0
    warmup_s: float = 0.0
    rounds: int = 1
    pace: Pace | None = None
    clients: int = 0
    entries: tuple[TraceEntry, ...] = ()
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.rounds <= MAX_ROUNDS:
            raise ValueError(f"{self.rounds} rounds: outside [1, {MAX_ROUNDS}]")
        if self.limits.seconds is not None and not 0 <= self.warmup_s < self.limits.seconds:
            raise ValueError(f"a warm-up of {self.warmup_s:g} s in a run of {self.limits.seconds:g} s: nothing is left")
        if not 0 <= self.warmup_s <= MAX_WARMUP_S:
            raise ValueError(f"a warm-up of {self.warmup_s:g} s is outside [0, {MAX_WARMUP_S:g}]")
        if not 1 <= len(self.tenants) <= _MAX_TENANTS:
            raise ValueError(f"{len(self.tenants)} tenants: outside [1, {_MAX_TENANTS}]")
        if self.arrivals is ArrivalKind.CLOSED and not 1 <= self.clients <= self.limits.in_flight:
            raise ValueError(f"{self.clients} clients: outside 1 to the in-flight limit of {self.limits.in_flight}")
        if self.entries and self.shape.prefixes:
            raise ValueError("recorded requests have the prefixes that were recorded, and no others")
        scaled((), self.time_scale)


def described(settings: RunSettings, words: Mapping[str, str]) -> dict[str, str]:
    """For the report: `words` are the flags as given, without secrets."""
    server = settings.server
    return {
        "target": f"{server.kind.value} {server.address}",
        "model": server.model or "the first served",
        "endpoint": "chat" if server.chat else "completions",
        "arrivals": _arrivals(settings),
        **words,
    }


def machine() -> dict[str, str]:
    """Where the generator runs."""
    import platform

    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
    }


def _arrivals(settings: RunSettings) -> str:
    if settings.arrivals is ArrivalKind.CLOSED:
        return f"closed loop, {settings.clients} clients (latency counts from sending)"
    if settings.arrivals is ArrivalKind.TRACE:
        return f"open loop, {len(settings.entries)} recorded requests, time scale {settings.time_scale:g}"
    pace = settings.pace
    assert pace is not None
    more = f", gaps with a coefficient of variation of {pace.burstiness:g}" if pace.kind is ArrivalKind.BURSTY else ""
    return f"open loop, {pace.kind.value}, {pace.rate:g} requests/s{more} (latency counts from intended starts)"
