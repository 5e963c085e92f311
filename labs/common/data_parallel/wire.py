"""Bytes that this process has sent over TCP, counted by the kernel, socket by socket.

gloo's ranks use TCP, even on one machine. The kernel knows no rings or formulas, so its count can test them. Other
transports (NCCL over NVLink, PCIe or shared memory) leave no trace here.
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
    """Return the bytes that this process has written to its open TCP connections, each byte counted once.

    Includes bytes still queued in the kernel, and the process group's book-keeping, some hundred bytes per collective.
    None if the kernel doesn't count (needs Linux 4.19), /proc is missing, or nothing was sent.
    """
    if not hasattr(socket, "TCP_INFO") or not os.path.isdir("/proc/self/fd"):
        return None
    return sum(_sent(int(fd)) for fd in os.listdir("/proc/self/fd")) or None


def sent_by(call: Callable[[], object], rank: Rank, calls: int = 1) -> list[int] | None:
    """Return the bytes that each rank sent during `calls` calls; None if a kernel doesn't count. Collective.

    Includes gloo's headers: some 48 bytes per message.
    """
    rank.barrier()
    before = tcp_sent_bytes()
    for _ in range(calls):
        call()
    after = tcp_sent_bytes()
    # Every rank gathers only after counting, because this exchange sends bytes as well.
    sent = rank.gather(None if before is None or after is None else after - before)
    return None if None in sent else sent


def _sent(fd: int) -> int:
    """Return bytes sent through the TCP connection `fd`; 0 if it isn't one."""
    try:
        if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
            return 0  # the duplicate of a file, made below, would stay open
        with socket.socket(fileno=os.dup(fd)) as s:  # a duplicate: closing it leaves the connection open
            info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:  # closed in the meantime, or not TCP
        return 0
    if len(info) < SENT_AGAIN + 8:
        return 0
    queued, sent, again = (
        struct.unpack_from(f, info, at)[0] for f, at in (("I", QUEUED), ("Q", SENT), ("Q", SENT_AGAIN))
    )
    return queued + sent - again


def sent_through(fds: Iterable[int]) -> int:
    """Return bytes that this process has written to these connections, as `tcp_sent_bytes`; 0 if not counted."""
    return sum(map(_sent, fds))
