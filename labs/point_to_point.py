"""One all_reduce, or many send and recv?

    python -m labs.point_to_point                               # launches its own ranks
    torchrun --nproc-per-node 2 -m labs.point_to_point --sizes 4096 134217728

About 6 s on 2 CPU cores. Three ways to give every rank the sum of all ranks' vectors:
  all_reduce   torch's collective
  root         each rank sends its vector to rank 0, which adds them and sends the sum to each
  hand ring    each rank has one neighbour to send to and one to receive from, 1/n of the vector at a time
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.parts.communication.ring import ring_all_reduce
from labs.parts.communication.wire import in_turn
from labs.parts.data_parallel.scaling import ring_all_reduce_bytes
from labs.parts.sharding.link import as_in_training, require_messages, timed
from labs.parts.sharding.traffic import traffic_of
from labs.parts.timing.collectives import LatencyBandwidth, fit


@dataclass(frozen=True)
class Config:
    """Which messages to try, how often."""

    sizes: tuple[int, ...] = (2**12, 2**16, 2**20, 2**23, 2**25)
    """Bytes of the vector that each rank has."""
    seconds: float = 1.2
    """Time for all rounds, in s. A slower machine takes fewer rounds and has wider intervals."""
    rounds: int | None = None
    """Times that the three ways take turns, per size; by default as many as fit into `seconds`, at least 6."""
    smoke: bool = False
    """Small messages, few rounds."""

    def __post_init__(self) -> None:
        require(
            len(set(self.sizes)) >= 2,
            "sizes must hold two different sizes at least: latency and bandwidth are fitted to them",
        )
        require(all(s >= 4 and s % 4 == 0 for s in self.sizes), f"sizes must be multiples of 4 bytes, not {self.sizes}")
        measure.require_budget(self.seconds, self.rounds)


def check_layout(config: Config, world_size: int) -> None:
    """BadInput for one rank, which has nobody to send to."""
    require(world_size >= 2, "one rank has nobody to send to: use nproc=2")


def through_root(x: Tensor) -> None:
    """Sum over ranks, in place, through rank 0: it receives and sends everything, one message after the other."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        received = torch.empty_like(x)
        for other in range(1, ranks):
            dist.recv(received, other)
            x += received
        for other in range(1, ranks):
            dist.send(x, other)
    else:
        dist.send(x, 0)
        dist.recv(x, 0)


WAYS: dict[str, Callable[[Tensor], object]] = {
    "all_reduce": dist.all_reduce,
    "root": through_root,
    "hand ring": ring_all_reduce,
}


def predict(way: str, numbers: int, rank: int, ranks: int) -> float:
    """Bytes that `rank` sends to sum vectors of `numbers` FP32 numbers."""
    if way == "all_reduce":
        return ring_all_reduce_bytes(4 * numbers, ranks)
    if way == "root":
        return 4 * numbers * (ranks - 1 if rank == 0 else 1)
    length = [numbers // ranks + (part < numbers % ranks) for part in range(ranks)]
    return 4 * sum(length[(rank - step) % ranks] for step in range(2 * (ranks - 1)))


def predict_s(way: str, size: int, ranks: int, message: LatencyBandwidth) -> float:
    """Seconds of `root` and `hand ring`, from the time of one message; additions not counted."""
    if way == "root":
        return 2 * (ranks - 1) * message.seconds(size)
    return 2 * (ranks - 1) * message.seconds(size / ranks)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Messages between two ranks first, then the three ways for every size: results, bytes, seconds."""
    require_messages(rank)
    sizes = sorted(set(config.sizes))[: 2 if config.smoke else None]
    message: dict[int, float] = {}
    for size in sizes:
        seconds = ping_pong(size, 4 if config.smoke else 12, rank)
        message[size] = statistics.median(seconds)
        yield rank.record("message_s", "s", seconds, size=size)
    link = fit(list(message), list(message.values()))
    collective: dict[int, float] = {}
    for done, size in enumerate(sizes, start=1):
        yield from sums(size, rank)
        for way, seconds in times(size, config, rank, 1 / len(sizes)).items():
            if way == "all_reduce":
                collective[size] = statistics.median(seconds)
            else:
                modelled = predict_s(way, size, rank.world_size, link)
                yield rank.record("seconds", "s", modelled, kind="modelled", way=way, size=size)
            yield rank.record("seconds", "s", seconds, way=way, size=size)
        rank.progress(done, len(sizes), f"{size} bytes")
    for of, found in (("message", link), ("all_reduce", fit(list(collective), list(collective.values())))):
        yield rank.record("latency_s", "s", found.latency_s, kind="modelled", of=of)
        yield rank.record("bandwidth_b_s", "B/s", min(found.b_s, 1e15), kind="modelled", of=of)


def ping_pong(size: int, n: int, rank: Rank) -> list[float]:
    """Seconds of one message of `size` bytes, one way: half of the time there and back between ranks 0 and 1."""
    x = torch.zeros(size // 4, device=rank.device)

    def there_and_back() -> None:
        if rank.rank < 2:
            calls = (dist.send, dist.recv) if rank.rank == 0 else (dist.recv, dist.send)
            for call in calls:
                call(x, 1 - rank.rank)

    return [s / 2 for s in timed(there_and_back, n, rank)]


def sums(size: int, rank: Rank) -> Iterator[Record]:
    """Is the sum right, and what does each rank send (one sample each): counted, by closed form, by TCP's counters?"""
    n = rank.world_size
    for way, reduce in WAYS.items():
        x = torch.arange(size // 4, device=rank.device).remainder(1000).float() * (rank.rank + 1)
        expected = x / (rank.rank + 1) * (n * (n + 1) / 2)
        traffic, carried = traffic_of(partial(reduce, x), rank)
        case = {"way": way, "size": size}
        yield rank.record("max_error", "1", rank.slowest([(x - expected).abs().max().item()]), **case)
        yield rank.record("sent_bytes", "B", rank.gather(traffic.sent().total()), **case)
        modelled = [predict(way, size // 4, r, n) for r in range(n)]
        yield rank.record("sent_bytes", "B", modelled, kind="modelled", **case)
        if carried is not None:
            yield rank.record("tcp_sent_bytes", "B", carried, **case)


def times(size: int, config: Config, rank: Rank, part: float) -> dict[str, list[float]]:
    """Seconds of each way on the slowest rank, within `part` of the time, in turn, each after a millisecond of work."""
    x = torch.zeros(size // 4, device=rank.device)
    steps = {way: partial(reduce, x) for way, reduce in WAYS.items()}
    for step in steps.values():
        measure.time_steps(step, 2, rank.device)
    return in_turn(steps, config, rank, part, between=as_in_training(rank))


def answer(run: Records) -> Iterator[str]:
    """What the busiest rank sends in each way, and how long each takes for the smallest and the largest vector."""
    n, sizes = run[0].layout["world_size"], sorted({r.case["size"] for r in run.where("sent_bytes")})
    counted = {w: _lengths(run, w, "measured") for w in WAYS}
    forms = {w: _lengths(run, w, "modelled") for w in WAYS}
    word = "as the closed forms say" if counted == forms else "NOT what the closed forms say"
    said = ", ".join(f"{w} {lengths:.2f}" for w, lengths in counted.items())
    yield f"{n} ranks: the busiest one sends, in lengths of the vector: {said}; {word}."
    if n == 2:
        yield "On two ranks all ways send as much: --nproc 4 --oversubscribe tells them apart."
    for size in (sizes[0], sizes[-1]):
        seconds = {r.case["way"]: r.samples for r in run.where("seconds", size=size) if r.kind == "measured"}
        ratios = {w: measure.paired_ratio(s, seconds["all_reduce"]) for w, s in seconds.items() if w != "all_reduce"}
        words = ", ".join(f"{w} {r} ({_word(r)})" for w, r in ratios.items())
        yield f"{size:,} bytes, time over that of all_reduce: {words}."


def _lengths(run: Records, way: str, kind: str) -> float:
    """Of the vector: the most that a rank sends."""
    found = [r for r in run.where("sent_bytes", way=way) if r.kind == kind]
    return max(max(r.samples) / r.case["size"] for r in found)


def _word(ratio: measure.Estimate) -> str:
    return "slower" if ratio.low > 1 else "faster" if ratio.high < 1 else "cannot be told"


if __name__ == "__main__":
    cli.main()
