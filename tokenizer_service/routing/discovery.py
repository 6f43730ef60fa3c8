"""Engine replicas behind one DNS name, such as a headless service: asked again and again.

Must not know: connections, how a replica is chosen.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import structlog

MAX_ADDRESSES = 256

Resolve: TypeAlias = Callable[[str, int], Awaitable[Iterable[str]]]
"""IP addresses of a name; OSError when it cannot be resolved."""

_log = structlog.get_logger()


async def resolve_host(name: str, port: int) -> set[str]:
    """A and AAAA records, as the system's resolver gives them."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return {str(address[0]) for *_, address in found}


@dataclass(slots=True)
class DnsDiscovery:
    """Tells `found` the addresses (IP:PORT) of `name`, every `interval_s` seconds.

    A name that cannot be resolved, or has no address, changes nothing: what was found before stays.
    """

    name: str
    port: int
    interval_s: float
    resolve: Resolve
    found: Callable[[str, Iterable[str]], None]
    _is_failing: bool = False

    @classmethod
    def of(
        cls, name_and_port: str, interval_s: float, resolve: Resolve, found: Callable[[str, Iterable[str]], None]
    ) -> "DnsDiscovery":
        """`name_and_port`: NAME:PORT."""
        name, _, port = name_and_port.rpartition(":")
        return cls(name, int(port), interval_s, resolve, found)

    @property
    def source(self) -> str:
        return f"dns:{self.name}:{self.port}"

    async def run(self) -> None:
        """Until cancelled. One question at a time, so that a slow resolver is not asked faster than it answers."""
        while True:
            await self.refresh()
            await asyncio.sleep(self.interval_s)

    async def refresh(self) -> None:
        """One question; never raises."""
        try:
            addresses = sorted(await self.resolve(self.name, self.port))
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that is none
            self._complain(str(error))
            return
        if not addresses:
            self._complain("no addresses")
            return
        self._is_failing = False
        if len(addresses) > MAX_ADDRESSES:
            _log.warning("dns_addresses_left_out", name=self.name, found=len(addresses), used=MAX_ADDRESSES)
        self.found(self.source, [_target(address, self.port) for address in addresses[:MAX_ADDRESSES]])

    def _complain(self, reason: str) -> None:
        """Once in a row of failures."""
        if not self._is_failing:
            _log.warning("dns_failed", name=self.name, reason=reason)
        self._is_failing = True


def _target(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
