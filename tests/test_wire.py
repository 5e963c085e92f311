"""The kernel's count of bytes on TCP connections: each byte once, no other file, and nothing left open."""

import os
import socket

import pytest
import torch
import torch.distributed as dist

from labs.common.data_parallel import wire
from labs.common.data_parallel.wire import sent_by, tcp_sent_bytes
from labs.kit.launch import run_on_ranks
from labs.kit.rank import Rank

pytestmark = pytest.mark.skipif(
    not (hasattr(socket, "TCP_INFO") and os.path.isdir("/proc/self/fd")), reason="needs Linux"
)


def test_it_counts_what_a_connection_sends_and_what_is_still_queued():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        other, _ = server.accept()
        with other:
            before = tcp_sent_bytes() or 0
            client.sendall(b"x" * 12_345)
            assert tcp_sent_bytes() - before == 12_345
            client.setblocking(False)
            written = 0
            while True:  # nobody reads: the receiver's buffer fills, then the sender's
                try:
                    written += client.send(b"x" * 65_536)
                except BlockingIOError:
                    break
            assert tcp_sent_bytes() - before == 12_345 + written


def test_counting_leaves_no_descriptor_open(tmp_path):
    with open(tmp_path / "file", "w"), socket.socket(socket.AF_UNIX):
        before = len(os.listdir("/proc/self/fd"))
        tcp_sent_bytes()
        assert len(os.listdir("/proc/self/fd")) == before


def test_without_tcp_counters_nothing_is_claimed(monkeypatch):
    monkeypatch.delattr(socket, "TCP_INFO")
    assert tcp_sent_bytes() is None


def counted_by_rank(numbers: int, without: int | None) -> tuple[list[int] | None, list[int] | None]:
    """What one broadcast of rank 0 sends, and three of them; the rank `without` has no counters."""
    if dist.get_rank() == without:
        wire.tcp_sent_bytes = lambda: None
    me = dist.get_rank(), dist.get_world_size()
    rank, x = Rank(*me, *me, torch.device("cpu"), "gloo", ()), torch.zeros(numbers)
    return tuple(sent_by(lambda: dist.broadcast(x, 0), rank, calls) for calls in (1, 3))


def test_every_rank_is_told_what_each_of_them_sent():
    size = 400_000
    found = run_on_ranks(counted_by_rank, 2, size // 4, None)
    assert found[0] == found[1]
    for calls, sent in zip((1, 3), found[0], strict=True):
        assert calls * size <= sent[0] < 1.01 * calls * size and sent[1] < 0.01 * size


def test_one_rank_without_counters_holds_up_nobody_and_nothing_is_claimed():
    assert run_on_ranks(counted_by_rank, 2, 1000, 1) == [(None, None)] * 2
