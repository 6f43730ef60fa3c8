"""Events of the prefix cache as a gateway reads them: numbered batches of bounded size.

Must not know: gRPC calls, where events come from.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from smg_grpc_proto.generated import common_pb2

from engine_service.core.kv_events import BlocksRemoved, BlockStored, CacheSnapshot, EventsLost, KvEvent, short_name

BLOCKS_PER_EVENT = 128
EVENTS_PER_BATCH = 64


class BatchWriter:
    """Numbers the batches of one stream from 1. `clock` is seconds since the epoch."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sequence = 0
        self._num_events = 0

    def batches(self, events: Sequence[KvEvent]) -> "Iterator[common_pb2.KvEventBatch]":
        messages = _messages(events)
        while chosen := list(islice(messages, EVENTS_PER_BATCH)):
            self._sequence += 1
            for message in chosen:
                self._num_events += 1
                message.event_id = self._num_events
            yield common_pb2.KvEventBatch(
                sequence_number=self._sequence, timestamp=self._clock(), events=chosen, dp_rank=0
            )


def has_gap(events: Iterable[KvEvent]) -> bool:
    """Whether some were lost, so that the stream cannot go on."""
    return any(isinstance(event, EventsLost) for event in events)


def _messages(events: Sequence[KvEvent]) -> "Iterator[common_pb2.KvCacheEvent]":
    stored: list[BlockStored] = []
    for event in events:
        if isinstance(event, BlockStored):
            stored.append(event)
            continue
        yield from _stored(stored)
        stored = []
        match event:
            case BlocksRemoved():
                yield common_pb2.KvCacheEvent(
                    removed=common_pb2.KvBlocksRemoved(block_hashes=map(short_name, event.digests))
                )
            case CacheSnapshot():
                yield common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())
                yield from _stored(event.blocks)
    yield from _stored(stored)


def _stored(blocks: Sequence[BlockStored]) -> "Iterator[common_pb2.KvCacheEvent]":
    """Blocks that follow each other in a prefix are one event."""
    start = 0
    for place in range(1, len(blocks) + 1):
        is_chained = place < len(blocks) and blocks[place].parent == blocks[place - 1].digest
        if not is_chained or place - start == BLOCKS_PER_EVENT:
            yield _chain(blocks[start:place])
            start = place


def _chain(blocks: Sequence[BlockStored]) -> "common_pb2.KvCacheEvent":
    message = common_pb2.KvBlocksStored(
        blocks=[
            common_pb2.KvBlock(
                block_hash=short_name(block.digest), token_ids=block.token_ids, block_size=len(block.token_ids)
            )
            for block in blocks
        ]
    )
    if blocks[0].parent is not None:
        message.parent_block_hash = short_name(blocks[0].parent)
    return common_pb2.KvCacheEvent(stored=message)
