"""Reference solutions of notebook 07.

DDP refuses hooks whose annotations are strings, so there is no `from __future__ import annotations` here.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce_small(x: Tensor) -> None:
    """Sum of `x` over all ranks, in place, the same bits on all. Few rounds, each with the whole vector.

    Recursive doubling: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
    International Journal of High Performance Computing Applications 19 (2005).
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    core = 1 << (ranks.bit_length() - 1)  # the largest power of two
    if rank >= core:  # one too many: hands its numbers over, and gets the sum in the end
        dist.send(x, rank - core)
        dist.recv(x, rank - core)
        return
    other, has_guest = torch.empty_like(x), rank + core < ranks
    if has_guest:
        dist.recv(other, rank + core)
        x += other
    step = 1
    while step < core:  # after each round the sum of twice as many ranks
        partner = rank ^ step
        sending = dist.isend(x, partner)
        dist.recv(other, partner)
        sending.wait()  # before x changes
        x += other  # a + b here, b + a there: the same bits
        step *= 2
    if has_guest:
        dist.send(x, rank + core)


def eight_bits(state: dict, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Send a bucket as int8 with one scale; `state` keeps what that left out, for the next step. Returns the mean."""
    ranks = dist.get_world_size()
    name = tuple(map(id, bucket.parameters()))  # an index may be another bucket's after the first step
    wanted = bucket.buffer() + state.get(name, 0.0)
    scale = wanted.abs().max().clamp(min=1e-30) / 127  # not 0, where all gradients are
    code = (wanted / scale).round().to(torch.int8)
    state[name] = wanted - code * scale
    scales = [torch.empty_like(scale) for _ in range(ranks)]
    codes = [torch.empty_like(code) for _ in range(ranks)]
    dist.all_gather(scales, scale)  # 4 bytes to each other rank
    dist.all_gather(codes, code)  # 1 byte for each gradient to each other rank
    done = torch.futures.Future[Tensor]()
    done.set_result(sum(c * s for c, s in zip(codes, scales, strict=True)) / ranks)  # in the same order on all ranks
    return done


def diagnose(timeline: list, latency_ms: float) -> tuple[float, int, str]:
    """Largest exposed share of a rank's communication, that rank, and the remedy that helps most."""
    shares = []
    for rank in timeline:
        late = sum(max(0.0, b.end - max(b.start, rank.backward[1])) for b in rank.buckets)
        shares.append(late / sum(b.end - b.start for b in rank.buckets))
    share, worst = max(shares), shares.index(max(shares))
    if share < 0.1:
        return share, worst, "nothing"
    ends = sorted(rank.backward[1] for rank in timeline)
    step_end = timeline[0].buckets[-1].end
    if ends[-1] - ends[0] > (step_end - ends[0]) / 2:  # most of the waiting is for a rank that still computes
        return share, worst, "mend the straggler"
    # A bucket moves from when the last rank has joined; before that the others wait for it
    moves = sum(same[0].end - max(b.start for b in same) for same in zip(*(r.buckets for r in timeline), strict=True))
    latencies = latency_ms * len(timeline[0].buckets)
    if moves < timeline[0].backward[1] - timeline[0].backward[0] and latencies < moves / 2:
        return share, worst, "smaller buckets"  # all of it could be hidden, if it began earlier
    return share, worst, "larger buckets" if latencies > moves / 2 else "faster wire"
