"""The pool of KV blocks as integers: reference counts, and a free list that is the LRU list.

Must not know: requests, tokens, what a block contains (only whether it is worth keeping), torch.
"""

from collections import OrderedDict


class BlockPool:
    """Blocks 0 .. num_blocks-1. A block is either referenced (count >= 1) or in the free list.

    The free list is ordered from the next block to be taken to the last. Blocks without reusable content
    stand in front of all blocks with content, and those are in order of release. All operations are O(1).
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, bool] = OrderedDict((block, False) for block in range(num_blocks))
        self._num_cached = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, with or without content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Free blocks that keep reusable content."""
        return self._num_cached

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def references(self, block: int) -> int:
        return self._references[block]

    def take(self) -> tuple[int, bool]:
        """The next free block, now referenced once, and whether it had content (which is lost now)."""
        block, has_content = self._free.popitem(last=False)
        self._references[block] = 1
        self._num_cached -= has_content
        return block, has_content

    def share(self, block: int) -> None:
        """One more reference; a free block is revived with its content."""
        if self._references[block] == 0:
            self._num_cached -= self._free.pop(block)
        self._references[block] += 1

    def release(self, block: int, has_content: bool) -> None:
        """One reference less. The last one frees the block: content goes to the end of the LRU list."""
        if self._references[block] < 1:
            raise ValueError(f"block {block} is released but not referenced")
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free[block] = has_content
            self._num_cached += has_content
            if not has_content:
                self._free.move_to_end(block, last=False)

    def forget_content(self, block: int) -> None:
        """The content can no longer be found: a free block becomes the next to be taken."""
        if self._free.get(block, False):
            self._free[block] = False
            self._num_cached -= 1
            self._free.move_to_end(block, last=False)

    def free_blocks(self) -> dict[int, bool]:
        """Copy of the free list in order: block -> has content. For checks, not for steps."""
        return dict(self._free)
