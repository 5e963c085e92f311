"""The caching allocator with PYTORCH_ALLOC_CONF=expandable_segments:True, simulated.

Source: "Note [Expandable Segments]" and the functions named below, in c10/cuda/CUDACachingAllocator.cpp of
pytorch/pytorch. Addresses are reserved once for more than the whole device; memory is put behind them page by page,
and can be taken away from any page that is free.
"""

from __future__ import annotations

import math

from labs.parts.remedies.blocks import LARGE_SEGMENT, MIN_BLOCK, SMALL_SEGMENT, Block, Pool, round_up
from labs.parts.remedies.caching_allocator import CachingAllocator

UNLIMITED = 2**46  # addresses for a device without a limit


class ExpandableSegments(CachingAllocator):
    """As CachingAllocator, with one segment for each pool in place of one for each cudaMalloc."""

    def _choose(self, pool: Pool, size: int) -> int:
        """Best fit, where a free block counts as large as it can grow (get_free_block)."""
        at = pool.best_fit(size)
        while at + 1 < len(pool.free) and _can_grow_to(pool.free[at + 1][2]) < _can_grow_to(pool.free[at][2]):
            at += 1
        return at

    def _should_split(self, block: Block, size: int) -> bool:
        return block.size - size >= MIN_BLOCK

    def _new(self, pool: Pool, size: int) -> Block | None:
        """Memory behind the lowest free addresses (try_allocate_expandable_block), or None."""
        block = self._room(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            behind = block.next
            if not self._map(behind, min(behind.size, size - block.size)):
                return None
            block = behind  # it took in the block before it
        pool.remove(block)
        return block

    def _room(self, pool: Pool, size: int) -> Block:
        """The lowest free addresses, mapped or not, with room for `size` (find_expandable_block)."""
        for _, _, block in pool.unmapped:
            start = block.prev if block.prev and not block.prev.allocated else block
            if _free_from(start, size) >= size:
                return start
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        space = UNLIMITED if self.capacity_bytes == math.inf else math.ceil(self.capacity_bytes * 9 / 8)
        space = round_up(max(size, space), page)
        block = Block(self._addresses(space, page), space, pool, page, mapped=False)
        pool.add(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Put memory behind the first `size` bytes of an unmapped block, in whole pages (map_block)."""
        mapped = round_up(size, block.page)
        if not self._reserve(mapped):
            return False
        block.pool.remove(block)
        if mapped < block.size:
            block.pool.add(block.cut(mapped))
        block.mapped = True
        block.merge()
        block.pool.add(block)
        return True

    def _release(self, block: Block) -> None:
        """Take the memory away from the whole pages of a free block (unmap_block)."""
        start, end = round_up(block.address, block.page), block.end // block.page * block.page
        if start >= end:
            return
        pool = block.pool
        pool.remove(block)
        if end < block.end:
            pool.add(block.cut(end - block.address))
        if start > block.address:
            before, block = block, block.cut(start - block.address)
            pool.add(before)
        self._give_back(block.size)
        block.mapped = False
        block.merge()
        if not block.whole:
            pool.add(block)  # otherwise nothing of the segment is left: its addresses are given up


def _can_grow_to(block: Block) -> int:
    behind = block.next
    return block.size + (behind.size if behind and not behind.mapped else 0)


def _free_from(block: Block | None, enough: int) -> int:
    """Bytes of free addresses in a row from `block` on, counted until there are `enough`."""
    found = 0
    while block and not block.allocated and found < enough:
        found, block = found + block.size, block.next
    return found
