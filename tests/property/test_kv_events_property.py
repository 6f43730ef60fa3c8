"""Whatever is published and removed, who applies the events knows exactly the index; of salted blocks the digests."""

from hypothesis import given
from hypothesis import strategies as st

from engine_service.core.kv_events import BlocksRemoved, BlockStored, CacheSnapshot, KvEvent, KvEventLog
from engine_service.core.prefix_index import CachedBlock, PrefixIndex

BLOCK = 2
Prompt = tuple[list[int], str]
PROMPTS: st.SearchStrategy[Prompt] = st.tuples(
    st.lists(st.integers(0, 2), min_size=BLOCK, max_size=5 * BLOCK), st.sampled_from(["", "", "tenant"])
)
# A prompt is published from its first block on; a number removes one of the blocks there are.
OPERATIONS = st.lists(st.one_of(PROMPTS, st.integers(0, 99)), max_size=40)


def apply(events: tuple[KvEvent, ...], known: dict[bytes, tuple[int, ...]]) -> None:
    """`known`: name -> all tokens of the prefix. A parent has to be known before its child."""
    for event in events:
        match event:
            case CacheSnapshot():
                known.clear()
                apply(event.blocks, known)
                digests = [event.digests[place : place + 16] for place in range(0, len(event.digests), 16)]
                assert set(known) <= set(digests)
                known |= dict.fromkeys(set(digests) - set(known), ())
            case BlockStored():
                assert event.digest not in known
                assert not (event.is_salted and event.token_ids)
                before = () if event.parent is None else known[event.parent]
                known[event.digest] = before + event.token_ids
            case BlocksRemoved():
                for name in event.digests:
                    del known[name]


def prefix_of(entry: CachedBlock) -> tuple[int, ...]:
    return (() if entry.parent is None else prefix_of(entry.parent)) + entry.token_ids


@given(OPERATIONS, st.integers(0, 40))
def test_events_mirror_the_index(operations: list[Prompt | int], watched_from: int) -> None:
    index, log = PrefixIndex(BLOCK), KvEventLog()
    present: dict[int, CachedBlock] = {}
    known: dict[bytes, tuple[int, ...]] = {}
    is_watched = False
    for place, operation in enumerate(operations):
        if place == watched_from:
            index.watch(log)
            is_watched = True
        if isinstance(operation, int):
            remove(index, present, operation)
        else:
            publish(index, present, *operation, first_block=place * 100)
        apply(log.take(), known)
        if is_watched:
            wanted = {entry.digest: () if entry.salt else prefix_of(entry) for entry in present.values()}
            assert known == wanted


def publish(
    index: PrefixIndex, present: dict[int, CachedBlock], tokens: list[int], salt: str, *, first_block: int
) -> None:
    parent: CachedBlock | None = None
    keys: list[bytes] = []
    for number in range(len(tokens) // BLOCK):
        parent = index.publish(tokens, salt, keys, number, parent, first_block + number)
        assert parent is not None
        present[parent.block] = parent


def remove(index: PrefixIndex, present: dict[int, CachedBlock], choice: int) -> None:
    if present:
        for block in index.remove(sorted(present)[choice % len(present)]):
            del present[block]
