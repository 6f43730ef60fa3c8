"""The adapters an engine knows by name, and which of them are in the worker's memory: bounded, least recently used out.

Must not know: files, requests' states, torch, the clock.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine_service.loop.messages import AdapterState


class ReadAdapter(Protocol):
    """An adapter's content, which is the worker's business."""

    @property
    def rank(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...


class AdapterWorker(Protocol):
    """What is needed of a worker. Both wait for the plans that were submitted before."""

    def install_adapter(self, number: int, adapter: Any) -> None:
        """MemoryError where there is none for it; nothing of it is kept then."""
        ...

    def drop_adapter(self, number: int) -> None: ...


@dataclass(slots=True, eq=False)
class KnownAdapter:
    """One content under one name. `live`: requests that have it; `last_use` orders adapters by their latest request."""

    number: int
    name: str
    folder: str
    fingerprint: str
    rank: int
    is_resident: bool = False
    live: int = 0
    last_use: int = 0


@dataclass(slots=True)
class AdapterShelf:
    """At most `max_resident` adapters are in the worker; one that requests have is never taken out.

    `loads` and `evictions` only grow.
    """

    worker: AdapterWorker
    max_resident: int
    loads: int = 0
    evictions: int = 0
    _by_name: dict[str, KnownAdapter] = field(default_factory=dict)
    _leaving: set[KnownAdapter] = field(default_factory=set)
    _numbers: int = 0
    _uses: int = 0
    _reserved: int = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str) -> KnownAdapter | None:
        return self._by_name.get(name)

    def add(self, name: str, folder: str, adapter: ReadAdapter) -> KnownAdapter:
        """From now on the name means this content. Requests that have what it meant before keep that."""
        old = self._by_name.get(name)
        if old is not None and old.fingerprint == adapter.fingerprint:
            old.folder = folder
            return old
        if old is not None:
            self.remove(old)
        self._numbers += 1
        known = KnownAdapter(self._numbers, name, folder, adapter.fingerprint, adapter.rank)
        self._by_name[name] = known
        return known

    def remove(self, known: KnownAdapter) -> None:
        """The name means nothing any more; the content goes with its last request."""
        del self._by_name[known.name]
        self._leaving.add(known)
        self._see_off(known)

    def reserve(self, *, may_evict: bool = True) -> bool:
        """Keeps a place for one more in the worker, which `install` or `give_up` ends; False: there is none.

        With `may_evict` an idle adapter makes room.
        """
        is_full = self._num_resident() + self._reserved >= self.max_resident
        if is_full and not (may_evict and self._evict()):
            return False
        self._reserved += 1
        return True

    def install(self, known: KnownAdapter, adapter: ReadAdapter) -> bool:
        """Takes the place that was reserved; False: the worker has no memory for it, and the place is free again.

        Nobody could take out again what has left while its files were read.
        """
        self._reserved -= 1
        if known.is_resident or self._has_left(known):
            return True
        try:
            self.worker.install_adapter(known.number, adapter)
        except MemoryError:
            return False
        known.is_resident = True
        self.loads += 1
        self._use(known)
        return True

    def give_up(self) -> None:
        """The place that was reserved is free again."""
        self._reserved -= 1

    def begin(self, known: KnownAdapter, requests: int) -> None:
        """So many requests have it from now on."""
        known.live += requests
        self._use(known)

    def end(self, known: KnownAdapter) -> None:
        """A request that had it has ended."""
        known.live -= 1
        self._see_off(known)

    def states(self) -> tuple[AdapterState, ...]:
        return tuple(
            AdapterState(known.name, known.fingerprint, known.rank, known.is_resident)
            for known in self._by_name.values()
        )

    def _has_left(self, known: KnownAdapter) -> bool:
        """Neither its name nor a request has it any more."""
        return self._by_name.get(known.name) is not known and known not in self._leaving

    def _use(self, known: KnownAdapter) -> None:
        self._uses += 1
        known.last_use = self._uses

    def _all(self) -> Iterator[KnownAdapter]:
        yield from self._by_name.values()
        yield from self._leaving

    def _num_resident(self) -> int:
        return sum(known.is_resident for known in self._all())

    def _evict(self) -> bool:
        idle = [known for known in self._all() if known.is_resident and not known.live]
        if not idle:
            return False
        self._drop(min(idle, key=lambda known: known.last_use))
        self.evictions += 1
        return True

    def _see_off(self, known: KnownAdapter) -> None:
        if known in self._leaving and not known.live:
            self._leaving.discard(known)
            if known.is_resident:
                self._drop(known)

    def _drop(self, known: KnownAdapter) -> None:
        self.worker.drop_adapter(known.number)
        known.is_resident = False
