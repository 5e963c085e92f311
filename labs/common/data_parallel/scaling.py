"""The bytes of a ring all-reduce."""


def ring_all_reduce_bytes(size: int, ranks: int) -> float:
    """Return the bytes that each rank sends in a ring all-reduce of `size` bytes: 2 (n-1)/n S.

    Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms"; also NVIDIA/nccl-tests doc/PERFORMANCE.md,
    where the same factor turns algbw into busbw.
    """
    return 2 * (ranks - 1) / ranks * size
