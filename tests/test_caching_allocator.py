"""The simulated caching allocator: torch's rules by hand, and what holds after any sequence of requests."""

import itertools
import random

import pytest
import torch

from labs.parts.remedies.blocks import MIB, round_size, segment_size
from labs.parts.remedies.caching_allocator import CachingAllocator, OutOfMemory
from labs.parts.remedies.expandable_segments import ExpandableSegments

BOTH = pytest.mark.parametrize("kind", [CachingAllocator, ExpandableSegments])


def check(allocator):
    """What must be true of any allocator at any time."""
    blocks, stats = sorted(allocator.blocks(), key=lambda b: b.address), allocator.stats
    assert all(a.end <= b.address for a, b in itertools.pairwise(blocks)), "blocks overlap"
    assert all(b.size > 0 and b.size % 512 == 0 and b.size >= b.requested for b in blocks)
    assert sum(b.size for b in blocks) == stats.reserved_bytes, "bytes were lost or made"
    assert sum(b.size for b in blocks if b.allocated) == stats.allocated_bytes
    assert sum(b.requested for b in blocks if b.allocated) == stats.requested_bytes
    assert stats.requested_bytes <= stats.allocated_bytes <= stats.reserved_bytes <= allocator.capacity_bytes
    for block in blocks:
        for neighbour in (block.prev, block.next):
            assert neighbour is None or block in (neighbour.prev, neighbour.next)
            if neighbour and neighbour.mapped and not block.allocated:
                assert neighbour.allocated, "two free blocks in a row are one block"
    for pool in allocator.pools.values():
        assert pool.free == sorted(pool.free, key=lambda row: row[:2])
        assert all((size, at) == (b.size, b.address) and b.mapped and not b.allocated for size, at, b in pool.free)
        assert all((at, size) == (b.address, b.size) and not b.mapped for at, size, b in pool.unmapped)
    assert stats.reserved_bytes % (2 * MIB) == 0


# -- sizes, by the rules of c10/cuda/CUDACachingAllocator.cpp


def test_sizes_by_hand():
    assert [round_size(n) for n in (1, 512, 513, MIB)] == [512, 512, 1024, MIB]
    wanted = {512: 2, MIB: 2, MIB + 512: 20, 10 * MIB - 512: 20, 10 * MIB: 10, 11 * MIB: 12}
    assert {size: segment_size(size) / MIB for size in wanted} == wanted
    with pytest.raises(ValueError, match="at least one byte, not 0"):
        round_size(0)


def test_constants_are_those_of_this_torch():
    """torch's own header says the same numbers."""
    import re
    from pathlib import Path

    from labs.parts.remedies import blocks

    header = (Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h").read_text()
    said = {name: int(value) for name, value in re.findall(r"constexpr size_t (k\w+) = (\d+);", header)}
    assert said["kMinBlockSize"] == blocks.MIN_BLOCK and said["kSmallSize"] == blocks.SMALL
    assert said["kSmallBuffer"] == blocks.SMALL_SEGMENT and said["kMinLargeAlloc"] == blocks.MIN_LARGE
    assert said["kRoundLarge"] == blocks.ROUND_LARGE
    assert int(re.search(r"large_segment_size_\{(\d+)\}", header)[1]) == blocks.LARGE_SEGMENT


def test_small_requests_share_a_segment():
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.malloc(MIB // 2)
    assert (allocator.stats.reserved_bytes, allocator.stats.num_device_alloc) == (2 * MIB, 1)
    allocator.malloc(1)
    assert (allocator.stats.reserved_bytes, allocator.stats.num_device_alloc) == (4 * MIB, 2)
    assert allocator.stats.allocated_bytes == 2 * MIB + 512 and allocator.stats.requested_bytes == 2 * MIB + 1
    check(allocator)


def test_a_large_block_is_split_only_if_more_than_1_mib_is_left():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(12 * MIB))
    assert allocator.malloc(11 * MIB).size == 12 * MIB, "1 MiB is left: not split"
    allocator.free(next(b for b in allocator.blocks() if b.allocated))
    assert allocator.malloc(11 * MIB - 512).size == 11 * MIB - 512
    check(allocator)


def test_best_fit_and_merging():
    allocator = CachingAllocator()
    for block in [allocator.malloc(n * MIB) for n in (30, 20, 40)]:
        allocator.free(block)
    assert allocator.malloc(20 * MIB).size == 20 * MIB and allocator.stats.num_device_alloc == 3
    allocator = CachingAllocator()
    first, second, third = (allocator.malloc(5 * MIB) for _ in range(3))
    assert allocator.stats.reserved_bytes == 20 * MIB
    for block in (first, third, second):
        allocator.free(block)
        check(allocator)
    assert [b.size for b in allocator.blocks()] == [20 * MIB], "all neighbours are one block again"
    assert allocator.malloc(20 * MIB).size == 20 * MIB and allocator.stats.num_device_alloc == 1


def test_free_memory_is_given_back_before_the_retry():
    allocator = CachingAllocator(100 * MIB)
    allocator.free(allocator.malloc(60 * MIB))
    assert allocator.malloc(70 * MIB).size == 70 * MIB
    stats = allocator.stats
    assert (stats.num_alloc_retries, stats.num_device_free, stats.num_ooms, stats.num_sync_all_streams) == (1, 1, 0, 1)


def test_slivers_cannot_be_given_back():
    """100 MiB, of which 60 are in use: a request of 40 fails, whoever empties the cache."""
    allocator = CachingAllocator(100 * MIB)
    for block in [allocator.malloc(50 * MIB) for _ in range(2)]:
        allocator.free(block)
    for _ in range(2):
        allocator.malloc(30 * MIB)
    allocator.empty_cache()
    assert (allocator.stats.reserved_bytes, allocator.stats.allocated_bytes) == (100 * MIB, 60 * MIB)
    with pytest.raises(OutOfMemory, match=r"60.0 MiB are in use, 40.0 MiB are reserved but unallocated"):
        allocator.malloc(40 * MIB)
    assert allocator.stats.num_ooms == 1
    check(allocator)


def test_expandable_segments_map_and_unmap_pages():
    allocator = ExpandableSegments(100 * MIB)
    for block in [allocator.malloc(50 * MIB) for _ in range(2)]:
        allocator.free(block)
    held = [allocator.malloc(20 * MIB) for _ in range(2)]
    assert allocator.malloc(60 * MIB).size == 60 * MIB
    assert allocator.stats.reserved_bytes == 100 * MIB and allocator.stats.num_ooms == 0
    allocator.free(held[0])
    allocator.empty_cache()
    assert allocator.stats.reserved_bytes == 80 * MIB, "a free page in the middle is given back"
    assert allocator.malloc(20 * MIB).address == held[0].address, "the lowest free addresses come first"
    check(allocator)


def test_expandable_segments_round_to_pages_of_20_mib():
    allocator = ExpandableSegments()
    allocator.malloc(21 * MIB)
    assert allocator.stats.reserved_bytes == 40 * MIB
    allocator.malloc(19 * MIB)
    assert allocator.stats.reserved_bytes == 40 * MIB and allocator.stats.num_device_alloc == 1
    allocator.malloc(100)
    assert allocator.stats.reserved_bytes == 42 * MIB, "small requests have a segment of their own, in pages of 2 MiB"


def test_max_split_keeps_large_blocks_whole():
    allocator = CachingAllocator(max_split_bytes=64 * MIB)
    big = allocator.malloc(100 * MIB)
    allocator.free(big)
    assert allocator.malloc(10 * MIB) is not big and allocator.stats.reserved_bytes == 110 * MIB
    assert allocator.malloc(90 * MIB).size == 100 * MIB, "as it wastes less than 20 MiB"
    tight = CachingAllocator(100 * MIB, max_split_bytes=64 * MIB)
    tight.free(tight.malloc(100 * MIB))
    tight.malloc(70 * MIB)
    assert (tight.stats.num_device_free, tight.stats.num_alloc_retries) == (1, 0), "just that block was given back"


def test_a_block_is_freed_once():
    allocator = CachingAllocator()
    block = allocator.malloc(100)
    allocator.free(block)
    with pytest.raises(ValueError, match="is not in use"):
        allocator.free(block)


# -- any sequence


def drill(allocator, seed, steps=400):
    """Requests of all sizes, frees and give-backs by lot; everything is checked on the way."""
    draw, held, ooms = random.Random(seed), [], 0
    for step in range(steps):
        what = draw.random()
        if what < 0.03:
            allocator.empty_cache()
        elif what < 0.55 or not held:
            try:
                held.append(allocator.malloc(int(2 ** draw.uniform(0, 27))))
            except OutOfMemory:
                ooms += 1
        else:
            allocator.free(held.pop(draw.randrange(len(held))))
        if step % 7 == 0:
            check(allocator)
    return held, ooms


@BOTH
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("capacity_mib", [600, float("inf")])
def test_any_sequence(kind, seed, capacity_mib):
    allocator = kind(capacity_mib * MIB)
    held, ooms = drill(allocator, seed)
    assert ooms == allocator.stats.num_ooms and (ooms == 0 or capacity_mib < float("inf"))
    for block in held:
        allocator.free(block)
    check(allocator)
    allocator.empty_cache()
    stats = allocator.stats
    assert (stats.allocated_bytes, stats.reserved_bytes, stats.requested_bytes) == (0, 0, 0), "all of it came back"
    assert list(allocator.blocks()) == []
    if kind is CachingAllocator:
        assert stats.num_device_alloc == stats.num_device_free, "pages are given back in other pieces, segments are not"


@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_with_max_split(seed):
    allocator = CachingAllocator(600 * MIB, max_split_bytes=32 * MIB)
    held, _ = drill(allocator, seed)
    for block in held:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.stats.reserved_bytes == 0


@BOTH
def test_a_repeated_step_takes_nothing_from_the_driver(kind):
    """What the cache is for: with equal steps, cudaMalloc is called in the first one only."""
    allocator, draw = kind(), random.Random(0)
    sizes = [int(2 ** draw.uniform(8, 26)) for _ in range(60)]
    calls = []
    for _ in range(4):
        for block in [allocator.malloc(size) for size in sizes]:
            allocator.free(block)
        calls.append(allocator.stats.num_device_alloc)
    assert calls[0] > 0 and calls == [calls[0]] * 4
