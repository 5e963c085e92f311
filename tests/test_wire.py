"""The kernel's count of bytes on TCP connections: each byte once, no other file, and nothing left open."""

import os
import socket

import pytest

from labs.parts.data_parallel.wire import tcp_sent_bytes

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
