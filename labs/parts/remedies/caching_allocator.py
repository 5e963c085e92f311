"""CUDA's caching allocator as torch 2.13 has it, simulated: which bytes it takes from the driver, and when that fails.

Source: c10/cuda/CUDACachingAllocator.cpp of pytorch/pytorch; the docstrings name its functions. One stream and one
thread; without CUDA graphs, garbage_collection_threshold and roundup_power2_divisions, which are off by default. The
driver is modelled as a number of bytes: cudaMalloc works while there are enough, wherever they are, since the driver
maps memory by pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from labs.parts.remedies.blocks import (
    MIB,
    MIN_BLOCK,
    NON_SPLIT_ROUNDING,
    SMALL,
    Block,
    Pool,
    round_size,
    round_up,
    segment_size,
)


class OutOfMemory(RuntimeError):
    """The driver has not enough for a request, although every free segment was given back to it."""


@dataclass
class Stats:
    """Bytes and calls since the start, named as in torch.cuda.memory_stats."""

    allocated_bytes: int = 0
    """In blocks that are in use: what torch.cuda.memory_allocated says."""
    reserved_bytes: int = 0
    """Taken from the driver: memory_reserved, and what nvidia-smi sees of it."""
    requested_bytes: int = 0
    """Asked for and in use, before rounding."""
    allocated_peak_bytes: int = 0
    reserved_peak_bytes: int = 0
    num_device_alloc: int = 0
    """Calls of cudaMalloc; with expandable segments, ranges of pages mapped."""
    num_device_free: int = 0
    num_alloc_retries: int = 0
    """Times that cudaMalloc failed, and all free segments were given back before it was tried again."""
    num_ooms: int = 0
    num_sync_all_streams: int = 0
    """Times that segments were given back: the device has to finish its queue first."""


class CachingAllocator:
    """malloc, free and empty_cache of a device of `capacity_bytes`.

    `max_split_bytes`: blocks from this size on are never split, as PYTORCH_ALLOC_CONF=max_split_size_mb says.
    """

    def __init__(self, capacity_bytes: float = math.inf, max_split_bytes: float = math.inf) -> None:
        self.capacity_bytes, self.max_split_bytes, self.stats = capacity_bytes, max_split_bytes, Stats()
        self.pools = {small: Pool(small) for small in (False, True)}
        self._used: dict[int, Block] = {}
        self._address = 0

    def malloc(self, requested: int) -> Block:
        """A block of at least `requested` bytes (malloc). OutOfMemory if there is no room, ValueError for 0 bytes."""
        size = round_size(requested)
        pool = self.pools[size <= SMALL]
        block = self._cached(pool, size) or self._new(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._new(pool, size)
        if block is None:
            self.empty_cache()
            self.stats.num_alloc_retries += 1
            block = self._new(pool, size)
        if block is None:
            self.stats.num_ooms += 1
            raise OutOfMemory(self._words(size))
        if self._should_split(block, size):
            pool.add(block.cut(size))
        return self._use(block, requested)

    def free(self, block: Block) -> None:
        """Back into the cache, merged with its free neighbours (free_block). ValueError if it is not in use."""
        if self._used.get(block.address) is not block:
            raise ValueError(f"the block at {block.address} is not in use")
        del self._used[block.address]
        self.stats.allocated_bytes -= block.size
        self.stats.requested_bytes -= block.requested
        block.allocated, block.requested = False, 0
        block.merge()
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Give back what is free as a whole (release_cached_blocks): a segment with one byte in use stays.

        The allocator does the same by itself when cudaMalloc fails.
        """
        self.stats.num_sync_all_streams += 1
        for pool in self.pools.values():
            for _, _, block in list(pool.free):
                self._release(block)

    def blocks(self) -> Iterator[Block]:
        """All blocks with memory behind them, in use or free."""
        yield from self._used.values()
        for pool in self.pools.values():
            yield from (block for _, _, block in pool.free)

    def _use(self, block: Block, requested: int) -> Block:
        block.allocated, block.requested = True, requested
        self._used[block.address] = block
        s = self.stats
        s.allocated_bytes += block.size
        s.requested_bytes += requested
        s.allocated_peak_bytes = max(s.allocated_peak_bytes, s.allocated_bytes)
        return block

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """The best fit among the free blocks, out of its pool (get_free_block)."""
        at, limit = self._choose(pool, size), self.max_split_bytes
        if at == len(pool.free):
            return None
        block = pool.free[at][2]
        if size < limit <= block.size or (size >= limit and block.size >= size + NON_SPLIT_ROUNDING):
            return None
        del pool.free[at]
        return block

    def _choose(self, pool: Pool, size: int) -> int:
        return pool.best_fit(size)

    def _new(self, pool: Pool, size: int) -> Block | None:
        """A whole segment from the driver (alloc_block); None if it has not enough."""
        segment = segment_size(size)
        return Block(self._addresses(segment), segment, pool) if self._reserve(segment) else None

    def _should_split(self, block: Block, size: int) -> bool:
        rest = block.size - size
        return rest >= MIN_BLOCK if block.pool.small else size < self.max_split_bytes and rest > SMALL

    def _release(self, block: Block) -> None:
        """Give a free block back, if it is a whole segment (release_blocks)."""
        if block.whole:
            block.pool.remove(block)
            self._give_back(block.size)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """With max_split_bytes: give back just enough of what may not be split (release_available_cached_blocks)."""
        if self.max_split_bytes == math.inf:
            return False
        wanted, released = max(size, self.max_split_bytes), 0
        if (at := pool.best_fit(wanted)) < len(pool.free):
            self._release(pool.free[at][2])
            return True
        while released < wanted and pool.free and pool.free[-1][0] >= self.max_split_bytes:
            released += pool.free[-1][0]
            self._release(pool.free[-1][2])
        return released >= wanted

    def _reserve(self, size: int) -> bool:
        """Take `size` bytes from the driver, if it has as many."""
        s = self.stats
        if s.reserved_bytes + size > self.capacity_bytes:
            return False
        s.reserved_bytes += size
        s.reserved_peak_bytes = max(s.reserved_peak_bytes, s.reserved_bytes)
        s.num_device_alloc += 1
        return True

    def _give_back(self, size: int) -> None:
        self.stats.reserved_bytes -= size
        self.stats.num_device_free += 1

    def _addresses(self, size: int, alignment: int = MIN_BLOCK) -> int:
        """Where a new segment lies: never where one was before, and a gap away from its neighbours."""
        start = round_up(self._address, alignment)
        self._address = start + size + MIN_BLOCK
        return start

    def _words(self, size: int) -> str:
        s = self.stats
        used, held = s.allocated_bytes / MIB, (s.reserved_bytes - s.allocated_bytes) / MIB
        return (
            f"tried to allocate {size / MIB:.1f} MiB on a device of {self.capacity_bytes / MIB:.1f} MiB: "
            f"{used:.1f} MiB are in use, {held:.1f} MiB are reserved but unallocated"
        )
