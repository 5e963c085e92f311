"""The wire between ranks: which TCP connections gloo has to which rank, and how many bytes per second each may send.

    links = wire.links(rank)                             # {peer: [file descriptor, ...]}
    with wire.paced(rank, 100e6):                        # every connection between ranks: 100 MB/s in each direction
        dist.all_reduce(x)

The kernel paces: it sends each packet no earlier than the rate allows (socket option SO_MAX_PACING_RATE of socket(7),
Linux 4.13 or later; no root needed). Bytes are really held back, so whatever waits for them waits as on a slow network.
What is not imitated: the latency of a real network, its loss, and competition of other traffic. NCCL does not use these
connections within a machine: this is for gloo. Where the kernel cannot pace, `slowed` lets hooks wait instead
(labs.common.communication.delay), and the records say so.
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
LEAST_B_S = 1e5  # below, one packet of 64 KB on the loopback takes most of a second
NO_PACE = 0.0
"""In records, the bandwidth in MB/s of a wire that is left as it is."""

Ends = tuple[tuple[str, int], tuple[str, int]]
"""((own address, own port), (the other's address, port)) of a connection."""


def can_pace() -> bool:
    """Whether this system can hold back what a process sends."""
    return sys.platform == "linux" and os.path.isdir("/proc/self/fd")


def connections() -> dict[int, Ends]:
    """TCP connections of this process that are established: {file descriptor: ends}."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, no socket, or a socket without a peer
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as s:
                if s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM:
                    found[int(name)] = (_end(s.getsockname()), _end(s.getpeername()))
    return found


def _end(name: tuple) -> tuple[str, int]:
    """Address and port; an IPv4 address that is written as an IPv6 one, as IPv4."""
    address = ipaddress.ip_address(name[0].partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address), name[1]


def links(rank: Rank) -> dict[int, list[int]]:
    """File descriptors of this rank's connections to each other rank that it is connected to. Collective.

    A connection to rank r is one whose two ends, turned round, rank r has, too. Connections to the store that ranks
    met at (MASTER_PORT) are left out. Groups that are made later open connections of their own: ask again.
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
    """Each connection between ranks for which `between` is true sends at most `b_s` byte/s, in each direction.

    None leaves the wire as it is. Yields how many connections of this rank are paced. Collective at the start; at the
    end, however it comes, every limit is taken off. BadInput if this system cannot pace, ranks are GPUs or have no
    connection, or `b_s` is small. A process that is killed leaves nothing either: its connections end with it.
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
        rank.barrier()  # nobody sends before the other end is paced as well
        yield len(chosen)
    finally:
        for fd in chosen:
            with contextlib.suppress(OSError):  # closed meanwhile: nothing is left to pace
                limit(fd, NO_LIMIT)


@contextmanager
def slowed(rank: Rank, mb_s: float, delayed: bool = False) -> Iterator[None]:
    """The wire at `mb_s` (10^6 byte/s; NO_PACE: as it is): paced, or acted out by hooks if `delayed` or it must be.

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
    """Seconds of each step on the slowest rank, taken in turn, over a wire of `mb_s` (10^6 byte/s); see `slowed`.

    As many rounds as `config` says, in `part` of its seconds. `between` runs before each step; by default a barrier.
    """
    rounds = measure.rounds_of(config, rank.slowest, part)
    slow = mb_s != NO_PACE  # other labs time GPUs in turn, over a wire that is left alone
    with slowed(rank, mb_s, delayed) if slow else nullcontext():
        seconds = measure.interleave(steps, rounds, rank.device, between=between or rank.barrier)
    return {name: rank.slowest(samples) for name, samples in seconds.items()}


def require_tcp(rank: Rank) -> None:
    """BadInput for ranks that are GPUs.

    NCCL's ranks have TCP connections as well, to find each other: pacing them would hold back no gradient.
    """
    require(rank.device.type == "cpu", 'NCCL does not use TCP within a machine: use device="cpu"')


def require_wire(world_size: int, otherwise: str = "") -> None:
    """BadInput for one rank; `otherwise` is what else can be done about it."""
    require(world_size >= 2, f"one rank has no wire to pace: use nproc=2{otherwise}")


def how(rank: Rank, delayed: bool = False) -> Iterator[Record]:
    """A record that says so where a slow wire is acted out, none where the kernel paces it."""
    if delayed or not can_pace():
        yield rank.record("acted_out", "1", 1.0)


def label(run: Records) -> list[str]:
    """The sentence that a run over a wire that was acted out begins with."""
    return [delay.EMULATED] if run.where("acted_out") else []


def require_rates(mb_s: Sequence[float]) -> None:
    """BadInput unless these are different bandwidths of a wire, in 10^6 byte/s."""
    require(len(set(mb_s)) == len(mb_s) > 0, f"take different bandwidths, one at least, not {mb_s}")
    for each in mb_s:
        require_rate(1e6 * each)


def require_rate(b_s: float) -> None:
    """BadInput for a rate that is no speed of a wire."""
    least = LEAST_B_S / 1e6
    require(LEAST_B_S <= b_s < NO_LIMIT, f"a bandwidth must be at least {least:g} MB/s, not {b_s / 1e6:g}")


def limit(fd: int, b_s: float) -> None:
    """Let the connection `fd` send `b_s` byte/s at most. OSError where the kernel refuses."""
    with socket.socket(fileno=os.dup(fd)) as s:
        s.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("Q", int(b_s)))


def limit_of(fd: int) -> int:
    """Byte/s that the connection `fd` may send; NO_LIMIT if it has no limit."""
    with socket.socket(fileno=os.dup(fd)) as s:
        return struct.unpack("Q", s.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8))[0]
