"""Bytes that this process has sent over TCP, as the kernel counts them, socket by socket.

gloo's ranks talk over TCP, on one machine too. The kernel knows nothing of rings or formulas, so its count can test
one. Ranks that exchange otherwise (NCCL over NVLink, PCIe or shared memory) leave no trace here.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterable

from labs.kit.rank import Rank

QUEUED, SENT, SENT_AGAIN = 144, 200, 208
"""Offsets in struct tcp_info of tcpi_notsent_bytes (u32), tcpi_bytes_sent and tcpi_bytes_retrans (u64): linux/tcp.h."""


def tcp_sent_bytes() -> int | None:
    """Bytes that this process has written to the TCP connections that are open now, each counted once.

    Also those that still wait in the kernel. None where the kernel does not tell (it needs Linux 4.19), where /proc is
    missing, or where nothing was sent. The group's own book-keeping is in it, some hundred bytes for each collective.
    """
    if not hasattr(socket, "TCP_INFO") or not os.path.isdir("/proc/self/fd"):
        return None
    return sum(_sent(int(fd)) for fd in os.listdir("/proc/self/fd")) or None


def sent_by(call: Callable[[], object], rank: Rank, calls: int = 1) -> list[int] | None:
    """Bytes that each rank's connections sent during `calls` calls; None where a kernel does not tell. Collective.

    gloo's headers are among them: some 48 bytes a message.
    """
    rank.barrier()
    before = tcp_sent_bytes()
    for _ in range(calls):
        call()
    after = tcp_sent_bytes()
    # Gathered after the count, by every rank: this exchange sends bytes, too.
    sent = rank.gather(None if before is None or after is None else after - before)
    return None if None in sent else sent


def _sent(fd: int) -> int:
    """Bytes sent through the TCP connection `fd`; 0 if it is none."""
    try:
        if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
            return 0  # a duplicate of a file, made below, would stay open
        with socket.socket(fileno=os.dup(fd)) as s:  # its own descriptor: closing it leaves the connection open
            info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:  # closed meanwhile, or not TCP
        return 0
    if len(info) < SENT_AGAIN + 8:
        return 0
    queued, sent, again = (
        struct.unpack_from(f, info, at)[0] for f, at in (("I", QUEUED), ("Q", SENT), ("Q", SENT_AGAIN))
    )
    return queued + sent - again


def sent_through(fds: Iterable[int]) -> int:
    """Bytes that this process has written to these connections, as `tcp_sent_bytes` counts; 0 where nobody tells."""
    return sum(map(_sent, fds))
