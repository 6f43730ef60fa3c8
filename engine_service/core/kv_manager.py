"""The KV blocks of requests: admission with cached prefixes, growth, publication, return.

Must not know: the order of requests, budgets, sampling, torch. Memory changes hands only here: a block
belongs to the pool's free list, or to the block tables of the requests that reference it.
"""

from engine_service.core.block_pool import BlockPool
from engine_service.core.prefix_index import BlockIndex
from engine_service.core.request import NEVER, Request


def blocks_for(positions: int, block_size: int) -> int:
    """Blocks that hold so many token positions."""
    return -(-positions // block_size)


class KvManager:
    """Joins the pool with the prefix index, and the samples of a prompt with each other.

    `cached_tokens`, `looked_up_tokens`, `evictions` only grow; shared prompts of samples are not in them.
    """

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
        hits = self.index.match(
            request.token_ids, request.cache_salt, request.block_keys, self._readable_blocks(request)
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
        for hit in hits:  # before any block is taken, which may evict
            self.pool.share(hit.block)
        self._hand_out(request, [hit.block for hit in hits], len(hits) * self._block_size)
        request.num_published = len(hits)
        request.last_published = hits[-1] if hits else None
        request.publish_at = request.num_computed + self._block_size
        return True

    def cached_prefix(self, request: Request) -> int:
        """Prompt tokens that need not be computed if the request is admitted now. Costs a hash of the prompt."""
        hits = self.index.match(
            request.token_ids, request.cache_salt, request.block_keys, self._readable_blocks(request)
        )
        return min(len(hits) * self._block_size, request.prompt_length)

    def fork(self, request: Request, donor: Request, reserve: int) -> tuple[tuple[int, int], ...] | None:
        """Gives the request blocks like `admit`; those before its last prompt token hold the donor's KV.

        The donor, which holds the KV of the same prompt, keeps its blocks. Full ones get one more reference: both
        write behind them. Of the block that both would write to, the request gets a copy of its own: returned as
        pairs (source block, destination block), to be executed before the request's first chunk. None: no room.
        """
        shared, rest = divmod(request.prompt_length - 1, self._block_size)
        if self._blocks_wanted(request) - shared + reserve > self.pool.num_free:
            return None
        table = donor.block_table[:shared]
        for block in table:
            self.pool.share(block)
        self._hand_out(request, table, request.prompt_length - 1)
        request.block_keys = request.block_keys or donor.block_keys[:shared]
        # The index knows the shared blocks, if at all: the first call of `publish` walks past them.
        request.publish_at = self._block_size
        if not request.was_admitted:
            request.was_admitted = True
            request.cached_tokens = donor.cached_tokens
        return ((donor.block_table[shared], request.block_table[shared]),) if rest else ()

    def holds_more(self, request: Request) -> bool:
        """Whether the index holds KV of the request's own completion, which no other sample has."""
        keys, shared = request.block_keys, (request.prompt_length - 1) // self._block_size
        return request.num_completion > 0 and len(keys) > shared and self.index.has_key(keys[shared])

    def grow(self, request: Request) -> tuple[int, ...]:
        """One more block for the request, or nothing when none is free."""
        if self.pool.num_free == 0:
            return ()
        block = self._take()
        request.block_table.append(block)
        request.num_slots += self._block_size
        return (block,)

    def give_back(self, request: Request) -> None:
        """The blocks behind the one of the request's next token, which a draft had needed."""
        keep = request.num_scheduled // self._block_size + 1
        while len(request.block_table) > keep:
            self.pool.release(request.block_table.pop(), False)
            request.num_slots -= self._block_size

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

    def _readable_blocks(self, request: Request) -> int:
        """Leading blocks that may come from the index. The last known token is always computed; so is every prompt
        token whose successor still lacks log probabilities that were asked for."""
        needed = len(request.token_ids) - 1
        if request.sampling.prompt_logprobs is not None:
            needed = min(needed, request.known_prompt_logprobs - 1)
        return needed // self._block_size

    def _blocks_wanted(self, request: Request) -> int:
        """For the known tokens and the next one, so that it is not preempted at once (B065)."""
        return blocks_for(min(len(request.token_ids) + 1, request.length_limit - 1), self._block_size)

    def _count_lookup(self, request: Request, cached: int) -> None:
        # Tokens found again after a preemption were computed for this very request: not a hit (B055).
        if not request.was_admitted:
            request.was_admitted = True
            request.cached_tokens = cached = min(cached, request.prompt_length)  # the rest of a resumed one
            self.cached_tokens += cached
            self.looked_up_tokens += request.prompt_length

    def _hand_out(self, request: Request, referenced: list[int], computed: int) -> None:
        """The block table: blocks that are referenced for the request already, then fresh ones."""
        needed = blocks_for(len(request.token_ids), self._block_size)
        request.block_table = referenced + [self._take() for _ in range(needed - len(referenced))]
        request.num_slots = needed * self._block_size
        request.num_computed = request.num_scheduled = computed
        request.free_blocks_wanted = 0
        request.first_missing_key = None

    def _take(self) -> int:
        block, had_content = self.pool.take()
        if had_content:
            for forgotten in self.index.remove(block):
                self.evictions += 1
                self.pool.forget_content(forgotten)
        return block
