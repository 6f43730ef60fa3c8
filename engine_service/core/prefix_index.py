"""Which full blocks of computed tokens can be reused: a salted hash chain, checked token by token.

Must not know: requests, reference counts, the free list, torch.
"""

from array import array
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Protocol

from engine_service.core.kv_events import DIGEST_BYTES, BlocksRemoved, BlockStored, CacheSnapshot, KvEventLog

HashFunction = Callable[[bytes], bytes]


def sha256_digest(data: bytes) -> bytes:
    return sha256(data).digest()


class CachedBlock:
    """A block in the index. Its identity stands for the whole prefix up to the end of this block."""

    __slots__ = ("block", "children", "indexed", "key", "parent", "salt", "token_ids")

    def __init__(
        self, key: bytes, block: int, parent: "CachedBlock | None", token_ids: tuple[int, ...], salt: str
    ) -> None:
        self.key = key
        self.block = block
        self.parent = parent
        self.token_ids = token_ids
        self.salt = salt
        self.indexed = True
        self.children: set[CachedBlock] = set()

    @property
    def digest(self) -> bytes:
        """Stands for the prefix outside of this engine."""
        return self.key[:DIGEST_BYTES]

    def stored(self, with_tokens: bool) -> BlockStored:
        """What is told of this block; the tokens of salted ones are nobody's business."""
        parent = None if self.parent is None else self.parent.digest
        tokens = self.token_ids if with_tokens and not self.salt else ()
        return BlockStored(self.digest, parent, tokens, bool(self.salt))

    def holds(self, parent: "CachedBlock | None", token_ids: tuple[int, ...], salt: str) -> bool:
        """Whether this is exactly that block of that prefix: all is compared, but not the hash."""
        return self.parent is parent and self.token_ids == token_ids and self.salt == salt


class BlockIndex(Protocol):
    """What the KV manager asks of a prefix index. `keys` are a request's chain keys, extended as needed."""

    def match(self, token_ids: Sequence[int], salt: str, keys: list[bytes], limit: int) -> list[CachedBlock]:
        """The longest indexed chain of leading full blocks, at most `limit` of them."""

    def publish(
        self,
        token_ids: Sequence[int],
        salt: str,
        keys: list[bytes],
        number: int,
        parent: CachedBlock | None,
        block: int,
    ) -> CachedBlock | None:
        """Indexes `block`, which holds full block `number` of `token_ids`, as the child of `parent`.

        Returns the entry of that prefix. The first writer wins: it may be another block. None when the
        prefix cannot be indexed, because its parent is gone or the hash collides.
        """

    def has_key(self, key: bytes) -> bool: ...

    def has_block(self, block: int) -> bool: ...

    def remove(self, block: int) -> list[int]:
        """Forgets the block and all that follow it in a prefix; returns every block forgotten."""

    def blocks(self) -> list[int]:
        """All indexed blocks. For checks, not for steps."""

    def watch(self, log: KvEventLog | None, with_tokens: bool = True) -> None:
        """Tells `log` from now on, beginning with what is there; None: nobody."""


class PrefixIndex:
    """Hash chain over (parent key, block tokens, salt).

    A key only finds a candidate: parent, tokens and salt are compared on every hit, so that a weak or
    hostile hash costs hits, never correctness. Every entry's parent is indexed, so every entry can be found.
    """

    def __init__(self, block_size: int, hash_function: HashFunction = sha256_digest) -> None:
        self._block_size = block_size
        self._hash = hash_function
        self._by_key: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._log: KvEventLog | None = None
        self._tells_tokens = False

    def match(self, token_ids: Sequence[int], salt: str, keys: list[bytes], limit: int) -> list[CachedBlock]:
        found: list[CachedBlock] = []
        parent: CachedBlock | None = None
        for number in range(limit):
            tokens = self._tokens(token_ids, number)
            entry = self._by_key.get(self._key(keys, number, tokens, salt))
            if entry is None or not entry.holds(parent, tokens, salt):
                break
            found.append(entry)
            parent = entry
        return found

    def publish(
        self,
        token_ids: Sequence[int],
        salt: str,
        keys: list[bytes],
        number: int,
        parent: CachedBlock | None,
        block: int,
    ) -> CachedBlock | None:
        if parent is not None and not parent.indexed:
            return None
        tokens = self._tokens(token_ids, number)
        key = self._key(keys, number, tokens, salt)
        existing = self._by_key.get(key)
        if existing is not None:
            return existing if existing.holds(parent, tokens, salt) else None
        entry = CachedBlock(key, block, parent, tokens, salt)
        self._by_key[key] = self._by_block[block] = entry
        if parent is not None:
            parent.children.add(entry)
        if self._log is not None:
            self._log.add((entry.stored(self._tells_tokens),))
        return entry

    def has_key(self, key: bytes) -> bool:
        return key in self._by_key

    def has_block(self, block: int) -> bool:
        return block in self._by_block

    def remove(self, block: int) -> list[int]:
        first = self._by_block[block]
        if first.parent is not None:
            first.parent.children.discard(first)
        forgotten = [first]
        for entry in forgotten:
            forgotten.extend(entry.children)
            entry.indexed = False
            del self._by_key[entry.key], self._by_block[entry.block]
        if self._log is not None:
            self._log.add((BlocksRemoved(tuple([entry.digest for entry in forgotten]), bool(first.salt)),))
        return [entry.block for entry in forgotten]

    def blocks(self) -> list[int]:
        return list(self._by_block)

    def watch(self, log: KvEventLog | None, with_tokens: bool = True) -> None:
        self._log = log
        self._tells_tokens = with_tokens
        if log is not None:
            # In the order of publication: a parent is there before its children.
            digests = b"".join([key[:DIGEST_BYTES] for key in self._by_key])
            public = [entry.stored(True) for entry in self._by_key.values() if not entry.salt] if with_tokens else []
            log.add((CacheSnapshot(digests, tuple(public)),))

    def _tokens(self, token_ids: Sequence[int], number: int) -> tuple[int, ...]:
        return tuple(token_ids[number * self._block_size : (number + 1) * self._block_size])

    def _key(self, keys: list[bytes], number: int, tokens: tuple[int, ...], salt: str) -> bytes:
        """Key of full block `number`; each is computed once per request, from the key before it."""
        if number == len(keys):
            # Root and parent are tagged and the salt is length-prefixed: no salt can imitate another chain.
            if number == 0:
                encoded = salt.encode("utf-8", "surrogatepass")
                start = b"salt" + len(encoded).to_bytes(8, "little") + encoded
            else:
                start = b"next" + keys[-1]
            keys.append(self._hash(start + array("q", tokens).tobytes()))
        return keys[number]


class NullPrefixIndex:
    """The prefix index of an engine that runs without one: finds nothing, keeps nothing."""

    def match(self, token_ids: Sequence[int], salt: str, keys: list[bytes], limit: int) -> list[CachedBlock]:
        return []

    def publish(
        self,
        token_ids: Sequence[int],
        salt: str,
        keys: list[bytes],
        number: int,
        parent: CachedBlock | None,
        block: int,
    ) -> CachedBlock | None:
        return None

    def has_key(self, key: bytes) -> bool:
        return False

    def has_block(self, block: int) -> bool:
        return False

    def remove(self, block: int) -> list[int]:
        return []

    def blocks(self) -> list[int]:
        return []

    def watch(self, log: KvEventLog | None, with_tokens: bool = True) -> None:
        if log is not None:
            log.add((CacheSnapshot(b""),))
