"""Changes of the prefix cache as messages of bounded size.

Must not know: watchers, gRPC calls.
"""

from collections.abc import Iterator

from engine_service.api.kv_mirror import KvNews
from engine_service.core.kv_events import DIGEST_BYTES
from tokenwire.engine.v1 import engine_pb2

BLOCKS_PER_MESSAGE = 4096


def change_messages(news: KvNews) -> Iterator[list[engine_pb2.KvChange]]:
    """The changes of each message, in order; changes of one kind that follow each other are joined."""
    changes: list[engine_pb2.KvChange] = []
    if news.is_reset:
        changes.append(engine_pb2.KvChange(cleared=engine_pb2.KvCleared()))
    room = BLOCKS_PER_MESSAGE
    for is_stored, digests in _joined(news.changes):
        place = 0
        while place < len(digests):
            part = digests[place : place + room * DIGEST_BYTES]
            changes.append(engine_pb2.KvChange(stored=part) if is_stored else engine_pb2.KvChange(removed=part))
            place += len(part)
            room -= len(part) // DIGEST_BYTES
            if room == 0:
                yield changes
                changes, room = [], BLOCKS_PER_MESSAGE
    if changes:
        yield changes


def _joined(changes: list[tuple[bool, bytes]]) -> Iterator[tuple[bool, bytes]]:
    start = 0
    for place in range(1, len(changes) + 1):
        if place == len(changes) or changes[place][0] != changes[start][0]:
            yield changes[start][0], b"".join([digests for _, digests in changes[start:place]])
            start = place
