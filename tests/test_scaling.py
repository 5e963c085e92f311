"""The bytes of a ring all-reduce, against numbers worked out by hand and the kernel's count."""

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from labs.common.data_parallel.scaling import ring_all_reduce_bytes
from labs.common.data_parallel.wire import tcp_sent_bytes
from labs.kit.launch import run_on_ranks


@pytest.mark.parametrize(("ranks", "sent"), [(1, 0), (2, 100), (4, 150), (5, 160)])
def test_ring_bytes_of_100_bytes(ranks, sent):
    assert ring_all_reduce_bytes(100, ranks) == pytest.approx(sent)


def sent_in_an_all_reduce(size):
    before = tcp_sent_bytes()
    dist.all_reduce(torch.zeros(size // 4))
    return tcp_sent_bytes() - before


@pytest.mark.skipif(not (hasattr(socket, "TCP_INFO") and Path("/proc/self/fd").is_dir()), reason="needs Linux")
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_kernel_counts_what_a_ring_sends(ranks):
    size, ring = 6_000_000, ring_all_reduce_bytes(6_000_000, ranks)
    assert all(ring <= sent < 1.01 * ring for sent in run_on_ranks(sent_in_an_all_reduce, ranks, size))
