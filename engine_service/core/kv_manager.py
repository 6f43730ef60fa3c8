"""The KV blocks of requests: admission with cached prefixes, growth, publication, return.

Must not know: the order of requests, budgets, sampling, torch. Memory changes hands only here: a block
belongs to the pool's free list, or to the block tables of the requests that reference it.
"""

from engine_service.core.block_pool import BlockPool
from engine_service.core.prefix_index import BlockIndex, CachedBlock
from engine_service.core.request import NEVER, Request


def blocks_for(positions: int, block_size: int) -> int:
    """Blocks that hold so many token positions."""
    return -(-positions // block_size)


class KvManager:
    """Joins the pool with the prefix index. `cached_tokens`, `looked_up_tokens`, `evictions` only grow."""

    def __init__(self, pool: BlockPool, index: BlockIndex, block_size: int) -> None:
        self.pool = pool
        self.index = index
        self._block_size = block_size
        self.cached_tokens = 0
        self.looked_up_tokens = 0
        self.evictions = 0

    def admit(self, request: Request, reserve: int) -> bool:
        """Gives the request blocks for all its known tokens, cached ones first, or changes nothing.

        False when, after that, fewer than `reserve` blocks (and the one for its next token) would be free.
        At least the last known token is left to compute. On True its counters stand behind the cached part.
        """
        if self._must_wait(request, reserve):
            return False
        known = len(request.token_ids)
        hits = self.index.match(
            request.token_ids, request.cache_salt, request.block_keys, (known - 1) // self._block_size
        )
        # A hit in the free list costs a free block like any other; only a block in use is for nothing (B050).
        in_use = sum(self.pool.references(hit.block) > 0 for hit in hits)
        wanted = self._blocks_wanted(request) - in_use
        if wanted + reserve > self.pool.num_free:
            request.free_blocks_wanted = wanted
            keys = request.block_keys
            request.first_missing_key = keys[len(hits)] if len(keys) > len(hits) else None
            return False
        self._count_lookup(request, len(hits) * self._block_size)
        self._hand_out(request, hits)
        return True

    def grow(self, request: Request) -> tuple[int, ...]:
        """One more block for the request, or nothing when none is free."""
        if self.pool.num_free == 0:
            return ()
        block = self._take()
        request.block_table.append(block)
        request.num_slots += self._block_size
        return (block,)

    def publish(self, request: Request) -> None:
        """Indexes the blocks that `num_computed` has filled since the last call."""
        for number in range(request.num_published, request.num_computed // self._block_size):
            entry = self.index.publish(
                request.token_ids,
                request.cache_salt,
                request.block_keys,
                number,
                request.last_published,
                request.block_table[number],
            )
            if entry is None:
                request.publish_at = NEVER
                return
            request.num_published = number + 1
            request.last_published = entry
        request.publish_at = (request.num_published + 1) * self._block_size

    def release(self, request: Request) -> None:
        """Gives all blocks back, last first: tails are evicted before heads."""
        for block in reversed(request.block_table):
            self.pool.release(block, self.index.has_block(block))
        request.clear_progress()

    def _must_wait(self, request: Request, reserve: int) -> bool:
        """O(1) answer for a request that has been refused before; a lookup costs its whole prompt."""
        if request.free_blocks_wanted + reserve <= self.pool.num_free:
            return False
        return request.first_missing_key is None or not self.index.has_key(request.first_missing_key)

    def _blocks_wanted(self, request: Request) -> int:
        """For the known tokens and the next one, so that it is not preempted at once (B065)."""
        return blocks_for(min(len(request.token_ids) + 1, request.length_limit - 1), self._block_size)

    def _count_lookup(self, request: Request, cached: int) -> None:
        # Tokens found again after a preemption were computed for this very request: not a hit (B055).
        if not request.was_admitted:
            request.was_admitted = True
            request.cached_tokens = cached
            self.cached_tokens += cached
            self.looked_up_tokens += request.prompt_length

    def _hand_out(self, request: Request, hits: list[CachedBlock]) -> None:
        for hit in hits:  # before any block is taken, which may evict
            self.pool.share(hit.block)
        table = [hit.block for hit in hits]
        needed = blocks_for(len(request.token_ids), self._block_size)
        table.extend(self._take() for _ in range(needed - len(hits)))
        request.block_table = table
        request.num_slots = needed * self._block_size
        request.num_computed = request.num_scheduled = len(hits) * self._block_size
        request.num_published = len(hits)
        request.last_published = hits[-1] if hits else None
        request.publish_at = request.num_computed + self._block_size
        request.free_blocks_wanted = 0
        request.first_missing_key = None

    def _take(self) -> int:
        block, had_content = self.pool.take()
        if had_content:
            for forgotten in self.index.remove(block):
                self.evictions += 1
                self.pool.forget_content(forgotten)
        return block
