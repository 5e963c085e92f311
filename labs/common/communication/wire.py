"""The connections between ranks: find gloo's TCP connections, and limit their bandwidth.

    links = wire.links(rank)                             # {peer: [file descriptor, ...]}
    with wire.paced(rank, 100e6):                        # every connection between ranks: 100 MB/s in each direction
        dist.all_reduce(x)

The kernel sends each packet no earlier than the rate allows (socket option SO_MAX_PACING_RATE of socket(7), Linux 4.13
or later, no root needed). Bytes really are held back, so waiting for them is as on a slow network. It doesn't imitate a
real network's latency, packet loss, or competing traffic. This is for gloo, because NCCL doesn't use TCP connections
within a machine. If the kernel can't pace, `slowed` makes hooks wait instead (labs.common.communication.delay), and the
records say so.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from labs.common.communication import delay
from labs.kit import measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

SO_MAX_PACING_RATE = 47  # asm-generic/socket.h
NO_LIMIT = 2**64 - 1  # byte/s
LEAST_B_S = 1e5  # below this, one 64 KB loopback packet takes most of a second
NO_PACE = 0.0
"""Bandwidth in records, in MB/s, of a connection that isn't slowed."""

Ends = tuple[tuple[str, int], tuple[str, int]]
"""((own address, own port), (peer's address, port)) of a connection."""


def can_pace() -> bool:
    """Return whether this system can limit what a process sends."""
    return sys.platform == "linux" and os.path.isdir("/proc/self/fd")


def connections() -> dict[int, Ends]:
    """Return this process's established TCP connections: {file descriptor: ends}."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed in the meantime, not a socket, or without a peer
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as s:
                if s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM:
                    found[int(name)] = (_end(s.getsockname()), _end(s.getpeername()))
    return found


def _end(name: tuple) -> tuple[str, int]:
    """Return address and port; converts an IPv4 address written as IPv6."""
    address = ipaddress.ip_address(name[0].partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address), name[1]


def links(rank: Rank) -> dict[int, list[int]]:
    """Return file descriptors of this rank's connections by peer rank. Collective.

    A connection belongs to rank r if rank r has the same two ends, swapped. Connections to the store (MASTER_PORT) are
    excluded. Groups created later open new connections, so call this again.
    """
    store = int(os.environ.get("MASTER_PORT", 0))
    own = {fd: ends for fd, ends in connections().items() if store not in (ends[0][1], ends[1][1])}
    found: dict[int, list[int]] = {}
    for peer, theirs in enumerate(rank.gather([(far, near) for near, far in own.values()])):
        if peer != rank.rank and (fds := [fd for fd, ends in own.items() if ends in theirs]):
            found[peer] = fds
    return found


@contextmanager
def paced(
    rank: Rank, b_s: float | None, between: Callable[[int, int], bool] = lambda one, other: True
) -> Iterator[int]:
    """Limit each connection between ranks for which `between` is true to `b_s` byte/s in each direction.

    None changes nothing. Yields the number of this rank's paced connections. Collective at the start; always removes
    every limit at the end. BadInput if this system can't pace, ranks are GPUs or have no connection, or `b_s` is too
    small. A killed process leaves no limits, because its connections end with it.
    """
    if b_s is None:
        yield 0
        return
    require_rate(b_s)
    require_tcp(rank)
    require_wire(rank.world_size)
    require(can_pace(), "this system cannot pace a connection: use Linux")
    chosen = [fd for peer, fds in links(rank).items() if between(rank.rank, peer) for fd in fds]
    wired = sum(rank.gather(len(chosen)))
    require(wired > 0, "no TCP connection between these ranks was found: is the backend gloo?")
    try:
        for fd in chosen:
            limit(fd, b_s)
        rank.barrier()  # no rank sends before the other end is paced as well
        yield len(chosen)
    finally:
        for fd in chosen:
            with contextlib.suppress(OSError):  # closed in the meantime: nothing left to pace
                limit(fd, NO_LIMIT)


@contextmanager
def slowed(rank: Rank, mb_s: float, delayed: bool = False) -> Iterator[None]:
    """Slow the network to `mb_s` (10^6 byte/s; NO_PACE: unchanged): paced, or emulated by hooks if `delayed` or needed.

    BadInput as in `paced`. Collective.
    """
    require_tcp(rank)
    b_s = None if mb_s == NO_PACE else 1e6 * mb_s
    acted = b_s is not None and (delayed or not can_pace())
    with delay.acted_out(b_s if acted else math.inf), paced(rank, None if acted else b_s):
        yield


def in_turn(
    steps: Mapping[Any, Callable[[], object]],
    config: Any,
    rank: Rank,
    part: float = 1.0,
    mb_s: float = NO_PACE,
    between: Callable[[], object] | None = None,
    delayed: bool = False,
) -> dict[Any, list[float]]:
    """Return the slowest rank's seconds of each step, interleaved, at `mb_s` (10^6 byte/s); see `slowed`.

    Runs as many rounds as `config` says, in `part` of its seconds. `between` runs before each step; by default a
    barrier.
    """
    rounds = measure.rounds_of(config, rank.slowest, part)
    slow = mb_s != NO_PACE  # other labs interleave on GPUs, with an unchanged network
    with slowed(rank, mb_s, delayed) if slow else nullcontext():
        seconds = measure.interleave(steps, rounds, rank.device, between=between or rank.barrier)
    return {name: rank.slowest(samples) for name, samples in seconds.items()}


def require_tcp(rank: Rank) -> None:
    """Raise BadInput if ranks are GPUs.

    NCCL's ranks also have TCP connections, to find each other, but pacing those wouldn't slow any gradient.
    """
    require(rank.device.type == "cpu", 'NCCL does not use TCP within a machine: use device="cpu"')


def require_wire(world_size: int, otherwise: str = "") -> None:
    """Raise BadInput for a single rank; `otherwise` says what else to do about it."""
    require(world_size >= 2, f"slowing the network needs at least two ranks: use nproc=2{otherwise}")


def how(rank: Rank, delayed: bool = False) -> Iterator[Record]:
    """Yield a record if the slow network is emulated, none if the kernel paces it."""
    if delayed or not can_pace():
        yield rank.record("acted_out", "1", 1.0)


def label(run: Records) -> list[str]:
    """Return the sentence that introduces a run over an emulated network."""
    return [delay.EMULATED] if run.where("acted_out") else []


def require_rates(mb_s: Sequence[float]) -> None:
    """Raise BadInput unless these are distinct, valid bandwidths in 10^6 byte/s."""
    require(len(set(mb_s)) == len(mb_s) > 0, f"take different bandwidths, one at least, not {mb_s}")
    for each in mb_s:
        require_rate(1e6 * each)


def require_rate(b_s: float) -> None:
    """Raise BadInput if the rate is too low or too high for a connection."""
    least = LEAST_B_S / 1e6
    require(LEAST_B_S <= b_s < NO_LIMIT, f"a bandwidth must be at least {least:g} MB/s, not {b_s / 1e6:g}")


def limit(fd: int, b_s: float) -> None:
    """Limit the connection `fd` to `b_s` byte/s. OSError if the kernel refuses."""
    with socket.socket(fileno=os.dup(fd)) as s:
        s.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("Q", int(b_s)))


def limit_of(fd: int) -> int:
    """Return the limit of the connection `fd` in byte/s; NO_LIMIT if it has none."""
    with socket.socket(fileno=os.dup(fd)) as s:
        return struct.unpack("Q", s.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8))[0]
