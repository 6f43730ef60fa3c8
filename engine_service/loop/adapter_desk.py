"""Where requests with an adapter wait until it is in the worker's memory, and where adapters come and go.

Files are read off the loop; the worker takes an adapter in between two steps. Must not know: what is in the files, the
scheduler, torch.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from engine_service.core.adapter_salt import salt_with_adapter
from engine_service.core.outcome import Refusal, RefusalCode
from engine_service.loop.adapter_shelf import AdapterShelf, KnownAdapter, ReadAdapter
from engine_service.loop.grammar_desk import Decided
from engine_service.loop.messages import AdapterNews, LoadAdapter, Submit, UnloadAdapter

MAX_KNOWN = 1000
MAX_WAITING = 256
MAX_WAIT_S = 30.0
_RETRY_AFTER_S = 1.0

Read = Callable[[str], "Future[ReadAdapter]"]
"""Begins to read a folder in another thread. A ValueError says, without the path, why it cannot be served."""


@dataclass(slots=True)
class _Waiting:
    command: Submit
    arrived: float
    known: KnownAdapter
    aborted: dict[int, Refusal] = field(default_factory=dict)

    @property
    def is_given_up(self) -> bool:
        return len(self.aborted) == self.command.samples

    @property
    def deadline(self) -> float:
        timeout_s = self.command.timeout_s
        return self.arrived + (MAX_WAIT_S if timeout_s is None else min(timeout_s, MAX_WAIT_S))


class AdapterDesk:
    """The loop calls it; `wake` is called from another thread. At most MAX_WAITING requests wait."""

    def __init__(self, shelf: AdapterShelf, read: Read, wake: Callable[[], None]) -> None:
        self._shelf = shelf
        self._read = read
        self._wake = wake
        self._waiting: dict[int, _Waiting] = {}
        self._reading: dict[KnownAdapter, Future[ReadAdapter]] = {}
        self._loading: list[tuple[LoadAdapter, Future[ReadAdapter]]] = []
        self._having: dict[int, KnownAdapter] = {}  # request id -> its adapter
        self._answers: list[tuple[int, Refusal | None]] = []
        self._has_changed = False

    def add(self, name: str, folder: str, adapter: ReadAdapter) -> None:
        """Of the start, before there are requests: the first ones are in memory."""
        known = self._shelf.add(name, folder, adapter)
        if not known.is_resident and self._shelf.reserve(may_evict=False):
            self._shelf.install(known, adapter)

    def accept(self, command: Submit, now: float) -> Submit | Refusal | None:
        """The command as it goes on, or why it does not; None: it waits, and comes out of `decided`."""
        known = self._shelf.find(command.adapter)
        if known is None or command.adapter_fingerprint not in ("", known.fingerprint):
            return _unknown(command.adapter, is_other=known is not None)
        if not known.is_resident and len(self._waiting) >= MAX_WAITING:
            message = f"{len(self._waiting):,} requests wait for their adapters, the limit is {MAX_WAITING:,}"
            return Refusal(RefusalCode.QUEUE_FULL, message, retry_after_s=_RETRY_AFTER_S)
        # Counted from now on: what waits for an adapter keeps its content.
        self._shelf.begin(known, command.samples)
        self._having.update((request_id, known) for request_id in _request_ids(command))
        if known.is_resident:
            return _with(command, known)
        self._waiting[command.request_id] = _Waiting(command, now, known)
        self._fetch_waited_for()
        return None

    def ended(self, request_id: int) -> None:
        """A request has ended; nothing happens for one without an adapter."""
        known = self._having.pop(request_id, None)
        if known is not None:
            self._shelf.end(known)

    def abort(self, request_id: int, cause: Refusal) -> None:
        """Nothing happens for an id that does not wait here."""
        for waiting in self._waiting.values():
            if request_id in _request_ids(waiting.command):
                waiting.aborted.setdefault(request_id, cause)
                return

    def load(self, command: LoadAdapter) -> None:
        future = self._read(command.folder)
        self._loading.append((command, future))
        future.add_done_callback(lambda _: self._wake())

    def unload(self, command: UnloadAdapter) -> None:
        known = self._shelf.find(command.name)
        if known is not None:
            self._shelf.remove(known)
            self._has_changed = True
        self._answers.append((command.ticket, None if known is not None else _unknown(command.name)))

    def next_deadline(self) -> float | None:
        return min((waiting.deadline for waiting in self._waiting.values()), default=None)

    def decided(self, now: float) -> Iterator[Decided]:
        """Settles what was read meanwhile; then the requests whose adapter is there, or whose wait is over."""
        if not (self._waiting or self._loading or self._reading):
            return
        self._take_loaded()
        self._take_read()
        self._fetch_waited_for()
        for waiting in list(self._waiting.values()):
            decided = self._decide(waiting, now)
            if decided is not None:
                del self._waiting[waiting.command.request_id]
                yield decided

    def news(self) -> AdapterNews:
        """All adapters there are."""
        return AdapterNews(self._shelf.states(), (), self._shelf.loads, self._shelf.evictions)

    def take_news(self) -> AdapterNews | None:
        """What to tell: answers, and all adapters when something has changed since the last call."""
        if not (self._has_changed or self._answers):
            return None
        answers, self._answers, self._has_changed = tuple(self._answers), [], False
        return replace(self.news(), answers=answers)

    def _take_loaded(self) -> None:
        pending = []
        for command, future in self._loading:
            if future.done():
                self._answers.append((command.ticket, self._loaded(command, future)))
            else:
                pending.append((command, future))
        self._loading = pending

    def _loaded(self, command: LoadAdapter, future: "Future[ReadAdapter]") -> Refusal | None:
        error = future.exception()
        if error is not None:
            message = str(error) if isinstance(error, ValueError) else "its files could not be read"
            return Refusal(RefusalCode.INVALID, f"adapter {command.name!r} cannot be served: {message}", "name")
        if len(self._shelf) >= MAX_KNOWN and self._shelf.find(command.name) is None:
            message = f"{len(self._shelf):,} adapters are loaded, the most there may be; unload one"
            return Refusal(RefusalCode.QUEUE_FULL, message)
        adapter = future.result()
        known = self._shelf.add(command.name, command.folder, adapter)
        if not known.is_resident and known not in self._reading and self._shelf.reserve():
            self._shelf.install(known, adapter)
        self._has_changed = True
        return None

    def _take_read(self) -> None:
        for known, future in list(self._reading.items()):
            if not future.done():
                continue
            del self._reading[known]
            if future.exception() is not None or future.result().fingerprint != known.fingerprint:
                self._shelf.give_up()
                message = (
                    f"the files of adapter {known.name!r} have changed or cannot be read; it has to be loaded again"
                )
                self._refuse_all(known, Refusal(RefusalCode.UNKNOWN_ADAPTER, message, "adapter"))
            elif self._shelf.install(known, future.result()):
                self._has_changed = True
            else:
                message = f"there is no memory for adapter {known.name!r} beside what is loaded"
                self._refuse_all(known, Refusal(RefusalCode.QUEUE_FULL, message, retry_after_s=_RETRY_AFTER_S))

    def _refuse_all(self, known: KnownAdapter, refusal: Refusal) -> None:
        for waiting in self._waiting.values():
            if waiting.known is known:
                for request_id in _request_ids(waiting.command):
                    waiting.aborted.setdefault(request_id, refusal)

    def _fetch_waited_for(self) -> None:
        """In the order of arrival, as far as there is room."""
        for waiting in self._waiting.values():
            known = waiting.known
            if known.is_resident or known in self._reading or waiting.is_given_up:
                continue
            if not self._shelf.reserve():
                return
            future = self._reading[known] = self._read(known.folder)
            future.add_done_callback(lambda _: self._wake())

    def _decide(self, waiting: _Waiting, now: float) -> Decided | None:
        command, arrived, aborted = waiting.command, waiting.arrived, waiting.aborted
        if waiting.is_given_up:
            return Decided(command, arrived, next(iter(aborted.values())), aborted)
        if waiting.known.is_resident:
            return Decided(_with(command, waiting.known), arrived, None, aborted)
        if now < waiting.deadline:
            return None
        if command.timeout_s is not None and now >= arrived + command.timeout_s:
            refusal = Refusal(RefusalCode.DEADLINE, "the deadline passed while the request waited for its adapter")
        else:
            message = f"all {self._shelf.max_resident} places for adapters are in use by other requests"
            refusal = Refusal(RefusalCode.QUEUE_FULL, message, retry_after_s=_RETRY_AFTER_S)
        return Decided(command, arrived, refusal, aborted)


def _request_ids(command: Submit) -> range:
    return range(command.request_id, command.request_id + command.samples)


def _with(command: Submit, known: KnownAdapter) -> Submit:
    salt = salt_with_adapter(command.cache_salt, known.fingerprint)
    return replace(command, adapter_number=known.number, cache_salt=salt)


def _unknown(name: str, *, is_other: bool = False) -> Refusal:
    text = f"adapter {name!r} has another content here" if is_other else f"there is no adapter {name!r}"
    return Refusal(RefusalCode.UNKNOWN_ADAPTER, text, "adapter")
