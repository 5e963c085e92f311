"""Blocks of CUDA's caching allocator: what sizes are rounded to, and how free blocks are kept and found.

Constants: c10/core/AllocatorConfig.h of torch 2.13. Rules: c10/cuda/CUDACachingAllocator.cpp, the function named.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

MIB = 2**20
MIN_BLOCK = 512  # kMinBlockSize: every size is a multiple of it
SMALL = 1 * MIB  # kSmallSize: up to this a request is small
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer: small requests share such segments
LARGE_SEGMENT = 20 * MIB  # large_segment_size: requests below MIN_LARGE share such segments
MIN_LARGE = 10 * MIB  # kMinLargeAlloc: from here on a request gets a segment of its own
ROUND_LARGE = 2 * MIB  # kRoundLarge: rounded up to a multiple of this
NON_SPLIT_ROUNDING = 20 * MIB  # max_non_split_rounding_size: what a block that may not be split may waste


def round_up(size: int, unit: int) -> int:
    """The smallest multiple of `unit` that is no less than `size`."""
    return -(-size // unit) * unit


def round_size(size: int) -> int:
    """Bytes of a block for a request of `size` (round_size). ValueError for an empty one: torch allocates nothing."""
    if size <= 0:
        raise ValueError(f"a request needs at least one byte, not {size}")
    return round_up(size, MIN_BLOCK)


def segment_size(size: int) -> int:
    """Bytes that cudaMalloc is asked for when a block of `size` is needed (get_allocation_size)."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < MIN_LARGE else round_up(size, ROUND_LARGE)


@dataclass(eq=False, slots=True)
class Block:
    """A range of addresses, in use or free. `prev` and `next` are its neighbours in the same segment."""

    address: int
    size: int
    pool: Pool
    page: int = 0
    """Bytes that are mapped at once, in an expandable segment; 0 in one of cudaMalloc."""
    mapped: bool = True
    """Whether there is memory behind these addresses."""
    allocated: bool = False
    requested: int = 0
    """What was asked for, before rounding."""
    prev: Block | None = None
    next: Block | None = None

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.address + self.size

    @property
    def whole(self) -> bool:
        """Whether it is all of its segment."""
        return self.prev is None and self.next is None

    def put_between(self, before: Block | None, after: Block | None) -> None:
        """Take the place between two neighbours (splice)."""
        self.prev, self.next = before, after
        if before:
            before.next = self
        if after:
            after.prev = self

    def cut(self, size: int) -> Block:
        """Keep the first `size` bytes; the rest is returned as a free block behind it, in no pool."""
        rest = Block(self.address + size, self.size - size, self.pool, self.page, self.mapped)
        rest.put_between(self, self.next)
        self.size = size
        return rest

    def merge(self) -> None:
        """Take in neighbours that are free and, like this block, mapped or not (try_merge_blocks)."""
        for other in (self.prev, self.next):
            if other is None or other.allocated or other.mapped != self.mapped:
                continue
            other.pool.remove(other)
            if other is self.prev:
                self.address = other.address
                self.put_between(other.prev, self.next)
            else:
                self.put_between(self.prev, other.next)
            self.size += other.size


@dataclass(eq=False)
class Pool:
    """Free blocks for small or for large requests."""

    small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    """(size, address, block), in order: a best fit is found by bisection."""
    unmapped: list[tuple[int, int, Block]] = field(default_factory=list)
    """(address, size, block) of addresses without memory, in order."""

    def add(self, block: Block) -> None:
        """Put it where it belongs."""
        bisect.insort(*self._place(block))

    def remove(self, block: Block) -> None:
        """Take it out; ValueError if it is not there."""
        blocks, key = self._place(block)
        at = bisect.bisect_left(blocks, key[:2])
        if at == len(blocks) or blocks[at][2] is not block:
            raise ValueError(f"no free block of {block.size} bytes at {block.address}")
        del blocks[at]

    def _place(self, block: Block) -> tuple[list, tuple[int, int, Block]]:
        if block.mapped:
            return self.free, (block.size, block.address, block)
        return self.unmapped, (block.address, block.size, block)

    def best_fit(self, size: int) -> int:
        """Index in `free` of the smallest block of at least `size` bytes; its length if there is none."""
        return bisect.bisect_left(self.free, (size,))
