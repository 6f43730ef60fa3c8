"""The set of engine replicas while it changes: named at the start, found by DNS, added and removed by an operator.

Must not know: how a replica is chosen or reached, where addresses come from.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import structlog

from tokenizer_service.engines.connection import EngineConnection
from tokenizer_service.engines.refusal import Refusal, RefusalCode, invalid_field

STATIC, OPERATOR = "static", "operator"
MAX_REPLICAS = 1024
_MAX_ADDRESS_CHARS = 300
_MAX_PORT = 65_535
_FORBIDDEN = frozenset("/,@?#%")

_log = structlog.get_logger()


@dataclass(slots=True)
class Replica:
    """One address. `sources` say who wants it; without any it takes no new requests and goes when it is idle."""

    connection: EngineConnection
    sources: set[str]
    task: "asyncio.Task[None] | None" = None
    leaving: "asyncio.Task[None] | None" = None

    @property
    def address(self) -> str:
        return self.connection.address


@dataclass(slots=True)
class Replicas:
    """Owns the connections and their tasks. Lives on the event loop.

    `connections` are those that requests may go to, the same list for ever; `connect` makes a new one.
    """

    connect: Callable[[str], EngineConnection]
    on_change: Callable[[], None]
    max_replicas: int = MAX_REPLICAS
    connections: list[EngineConnection] = field(default_factory=list)
    _replicas: dict[str, Replica] = field(default_factory=dict)
    _is_started: bool = False

    def start(self) -> None:
        """Connects to what was added before, and from now on at once."""
        self._is_started = True
        for replica in self._replicas.values():
            replica.task = replica.task or asyncio.create_task(replica.connection.run())

    async def close(self) -> None:
        """Every connection is left on purpose, as its log then says."""
        for replica in self._replicas.values():
            replica.connection.leave()
        tasks = [task for each in self._replicas.values() for task in (each.task, each.leaving) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def all(self) -> Sequence[Replica]:
        """Those that leave too, in the order in which they were added."""
        return tuple(self._replicas.values())

    def add(self, address: str, source: str) -> Refusal | None:
        """A replica that `source` wants; what is there already gets one more source."""
        replica = self._replicas.get(address)
        if replica is not None:
            self._want(replica, source)
            return None
        refusal = check_address(address) or self._check_room()
        if refusal is None:
            replica = Replica(self.connect(address), {source})
            self._replicas[address] = replica
            self.connections.append(replica.connection)
            if self._is_started:
                replica.task = asyncio.create_task(replica.connection.run())
            _log.info("engine_added", engine=address, source=source)
            self.on_change()
        return refusal

    def add_by_operator(self, address: str) -> Refusal | None:
        """As `add`, but what is there already is refused."""
        replica = self._replicas.get(address)
        if replica is not None and replica.sources:
            sources = ", ".join(sorted(replica.sources))
            return Refusal(RefusalCode.ALREADY_EXISTS, f"{address} is an engine already ({sources})")
        return self.add(address, OPERATOR)

    def remove_by_operator(self, address: str) -> Refusal | None:
        """No new requests; what runs there goes on. Addresses that DNS gives would come back, so they are refused."""
        replica = self._replicas.get(address)
        if replica is None or not replica.sources:
            return Refusal(RefusalCode.NOT_FOUND, f"{address} is no engine of this service")
        names = sorted(replica.sources - {STATIC, OPERATOR})
        if names:
            message = f"{address} comes from {', '.join(names)}: it leaves when DNS gives it no longer"
            return Refusal(RefusalCode.FAILED_PRECONDITION, message)
        for source in tuple(replica.sources):
            self._unwant(replica, source)
        return None

    def replace(self, source: str, addresses: Iterable[str]) -> None:
        """From now on `source` wants exactly these. What cannot be added is logged and left out."""
        wanted = set(addresses)
        for address in sorted(wanted):
            replica = self._replicas.get(address)
            if replica is not None and source in replica.sources:
                continue
            refusal = self.add(address, source)
            if refusal is not None:
                _log.warning("engine_left_out", engine=address, source=source, reason=refusal.message)
        for replica in tuple(self._replicas.values()):
            if source in replica.sources and replica.address not in wanted:
                self._unwant(replica, source)

    def _want(self, replica: Replica, source: str) -> None:
        replica.sources.add(source)
        if replica.leaving is not None:
            replica.leaving.cancel()
            replica.leaving = None
            replica.connection.stay()
            self.connections.append(replica.connection)
            _log.info("engine_added", engine=replica.address, source=source)
            self.on_change()

    def _unwant(self, replica: Replica, source: str) -> None:
        replica.sources.discard(source)
        if replica.sources:
            return
        self.connections.remove(replica.connection)
        replica.connection.leave()
        _log.info("engine_removed", engine=replica.address, live_requests=replica.connection.num_live)
        replica.leaving = asyncio.create_task(self._see_off(replica))
        self.on_change()

    async def _see_off(self, replica: Replica) -> None:
        """Closes the connection when its last request has ended."""
        await replica.connection.wait_left()
        # No await between here and the end: nobody can want it back in the middle.
        del self._replicas[replica.address]
        if replica.connection.blocks is not None:
            replica.connection.blocks.close()
        if replica.task is not None:
            replica.task.cancel()
        _log.info("engine_left", engine=replica.address)

    def _check_room(self) -> Refusal | None:
        if len(self._replicas) < self.max_replicas:
            return None
        return Refusal(
            RefusalCode.RESOURCE_EXHAUSTED, f"there are {self.max_replicas:,} engines, the most there may be"
        )


def check_address(address: str) -> Refusal | None:
    """HOST:PORT, or [IPv6]:PORT; anything else is refused with words."""
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if len(address) > _MAX_ADDRESS_CHARS:
        return invalid_field("address", f"{len(address):,} characters; at most {_MAX_ADDRESS_CHARS} are allowed")
    is_plain = bool(bare) and not any(char.isspace() or char in _FORBIDDEN for char in bare)
    if not colon or not is_plain or (":" in bare and bare == host) or not (port.isascii() and port.isdigit()):
        return invalid_field("address", f"{address!r} is not HOST:PORT or [IPv6]:PORT")
    if not 1 <= int(port[:6]) <= _MAX_PORT:
        return invalid_field("address", f"the port {port[:6]} is not between 1 and {_MAX_PORT:,}")
    return None
