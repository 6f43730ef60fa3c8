"""The tokenizer service's map, fed over the wire's messages, finds exactly what the engines' own indexes find.

Whatever is published and removed, lost on the way, left unread too long, restarted or gone.
"""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.api import kv_mirror
from engine_service.api.engine_handle import Connection
from engine_service.api.kv_changes import change_messages
from engine_service.api.kv_feed import KvFeed
from engine_service.api.kv_mirror import KvWatcher, KvWatchers
from engine_service.core.kv_events import EventsLost, KvEventLog
from engine_service.core.prefix_index import CachedBlock, PrefixIndex
from engine_service.loop.messages import WatchKvEvents
from tokenizer_service.engines.block_digests import block_digests
from tokenizer_service.engines.kv_watch import apply_changes
from tokenizer_service.engines.prefix_map import PrefixMap
from tokenwire.engine.v1 import engine_pb2

BLOCK = 2
MAX_UNREAD = 2
Prompt = tuple[list[int], str]
PROMPTS: st.SearchStrategy[Prompt] = st.tuples(
    st.lists(st.integers(0, 2), min_size=BLOCK, max_size=6 * BLOCK), st.sampled_from(["", "tenant", "ten\ud800ant"])
)
ENGINES = st.integers(0, 1)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), ENGINES, PROMPTS),
        st.tuples(st.just("remove"), ENGINES, st.integers(0, 99)),
        st.tuples(st.sampled_from(["read", "read", "lose"]), ENGINES, st.none()),
        st.tuples(st.sampled_from(["restart", "rewatch"]), ENGINES, st.none()),
    ),
    min_size=15,
    max_size=60,
)


class Engine:
    """A real index behind the front's real feed, and one watcher of it that feeds the map."""

    def __init__(self, prefixes: PrefixMap) -> None:
        self.holder = prefixes.new_holder()
        self.feed = KvFeed()
        self.watchers = KvWatchers(self.feed)
        self.num_blocks = 0
        self.start()

    def start(self) -> None:
        self.index, self.log = PrefixIndex(BLOCK), KvEventLog()
        self.present: dict[int, CachedBlock] = {}
        self.connection = Connection(None, None, self, None)  # type: ignore[arg-type]
        self.exits = ExitStack()
        self.watcher: KvWatcher = self.exits.enter_context(self.watchers.watching(self.connection))

    def stop(self) -> None:
        self.connection.ended.set()
        self.exits.close()
        self.holder.clear()

    def rewatch(self) -> None:
        """Another watcher comes, then this one leaves."""
        before, self.exits = self.exits, ExitStack()
        self.watcher = self.exits.enter_context(self.watchers.watching(self.connection))
        before.close()
        self.holder.clear()

    def send(self, command: object, *, always: bool = False) -> bool:
        """The mailbox: what the front asks the engine."""
        assert isinstance(command, WatchKvEvents)
        self.index.watch(self.log if command.is_on else None, command.with_tokens)
        return True

    def tell(self) -> None:
        while events := self.log.take():
            self.feed.tell(events)

    def publish(self, tokens: Sequence[int], salt: str) -> None:
        parent: CachedBlock | None = None
        keys: list[bytes] = []
        for number in range(len(tokens) // BLOCK):
            self.num_blocks += 1
            parent = self.index.publish(tokens, salt, keys, number, parent, self.num_blocks)
            assert parent is not None
            self.present[parent.block] = parent

    def remove(self, choice: int) -> None:
        if self.present:
            for block in self.index.remove(sorted(self.present)[choice % len(self.present)]):
                del self.present[block]

    async def read(self) -> None:
        news = await asyncio.wait_for(self.watcher.take(), 1)
        assert news is not None
        for changes in change_messages(news):
            message = engine_pb2.WatchKvEventsResponse(changes=changes)
            apply_changes(engine_pb2.WatchKvEventsResponse.FromString(message.SerializeToString()), self.holder)

    def finds(self, prompt: Prompt) -> int:
        tokens, salt = prompt
        return len(self.index.match(tokens, salt, [], (len(tokens) - 1) // BLOCK))


def check(prefixes: PrefixMap, engines: list[Engine], up_to_date: set[int], prompts: list[Prompt]) -> None:
    for tokens, salt in prompts:
        longest = prefixes.longest(block_digests(tokens, BLOCK, salt))
        for number in up_to_date:
            assert longest.get(engines[number].holder.bit, 0) == engines[number].finds((tokens, salt))
    for number in up_to_date:
        assert engines[number].holder.num_blocks == len(engines[number].present)


async def play(operations: list[tuple[str, int, Any]], prompts: list[Prompt]) -> None:
    prefixes = PrefixMap(max_blocks=10_000)
    engines = [Engine(prefixes), Engine(prefixes)]
    up_to_date: set[int] = set()
    for name, number, detail in operations:
        engine = engines[number]
        up_to_date.discard(number)
        match name:
            case "publish":
                engine.publish(*detail)
            case "remove":
                engine.remove(detail)
            case "lose":
                engine.log.add([EventsLost()])
            case "restart":
                engine.stop()
                engine.start()
            case "rewatch":
                engine.tell()
                engine.rewatch()
        engine.tell()
        if name == "read":
            engine.tell()
            while engine.watcher._has_news.is_set():
                await engine.read()
            up_to_date.add(number)
        check(prefixes, engines, up_to_date, prompts)
    for engine in engines:
        engine.stop()
        engine.holder.close()
    assert prefixes.longest([b"x"]) == {}


@settings(deadline=None)
@given(OPERATIONS, st.lists(PROMPTS, min_size=1, max_size=5))
def test_the_map_equals_the_indexes(operations: list[tuple[str, int, Any]], prompts: list[Prompt]) -> None:
    prompts = prompts + [detail for name, _, detail in operations if name == "publish"]
    with patch.object(kv_mirror, "MAX_UNREAD_BLOCKS", MAX_UNREAD):
        asyncio.run(play(operations, prompts))


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("sraxc"), st.sets(st.integers(0, 30))), max_size=60))
def test_holders_that_come_and_go_leave_nothing_behind(steps: list[tuple[int, str, set[int]]]) -> None:
    """Against a set for each holder; bits are used again, but never while an old block still has them."""
    prefixes = PrefixMap(max_blocks=1000)
    holders = [prefixes.new_holder() for _ in range(4)]
    known: list[set[int]] = [set() for _ in range(4)]
    for number, operation, values in steps:
        digests = [bytes([value]) for value in values]
        match operation:
            case "s" | "a":
                holders[number].store(digests)
                known[number] |= values
            case "r":
                holders[number].remove(digests)
                known[number] -= values
            case "c":
                holders[number].clear()
                known[number] = set()
            case "x":
                holders[number].close()
                left = holders[number]
                holders[number] = prefixes.new_holder()
                # Its watch may have had one more message, and forgets everything at its end.
                left.store(digests)
                left.clear()
                left.close()
                known[number] = set()
        assert [holder.num_blocks for holder in holders] == [len(values) for values in known]
        for value in range(31):
            found = prefixes.longest([bytes([value])])
            assert {holder.bit: found[holder.bit] for holder in holders} == {
                holder.bit: int(value in known[place]) for place, holder in enumerate(holders)
            }
    assert prefixes._num_bits <= 4 + len(steps)


def test_the_map_is_bounded_and_room_is_made_by_those_that_go() -> None:
    prefixes = PrefixMap(max_blocks=1000)
    first, second = prefixes.new_holder(), prefixes.new_holder()
    first.store(number.to_bytes(4, "big") for number in range(3000))
    assert (len(prefixes), first.num_blocks) == (1000, 1000)
    first.close()
    for start in range(0, 3000, 100):
        second.store(number.to_bytes(4, "big") for number in range(5000 + start, 5100 + start))
    assert len(prefixes) == 1000
    assert second.num_blocks > 900
