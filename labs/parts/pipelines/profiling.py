"""What each layer and each message of a chain costs on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from labs.kit import measure
from labs.kit.rank import Rank
from labs.parts.pipelines.chains import Chain
from labs.parts.pipelines.partition import Costs

MESSAGES = (2**12, 2**16, 2**18, 2**20)  # bytes: from latency-bound to bandwidth-bound


@dataclass(frozen=True)
class Layer:
    """What was measured of one layer: seconds per repeat, and bytes of what it passes on per micro-batch."""

    forward_s: list[float]
    backward_s: list[float]
    output_bytes: int


def profile(model: Chain, x: Tensor, y: Tensor, repeats: int, device: torch.device) -> list[Layer]:
    """Time forward and backward of every layer on one micro-batch, and of the loss, which comes last.

    Each layer starts from a detached copy of its input, as the first layer of a stage does; a first repeat warms up.
    """
    module = model.module().to(device)
    runs = [_profiled(model, x.to(device), y.to(device), device) for _ in range(repeats + 1)][1:]
    module.zero_grad()
    return [Layer([r[k][0] for r in runs], [r[k][1] for r in runs], runs[0][k][2]) for k in range(len(runs[0]))]


def _profiled(model: Chain, x: Tensor, y: Tensor, device: torch.device) -> list[tuple[float, float, int]]:
    """(forward s, backward s, output bytes) of each layer and of the loss. Gradients add up, as with micro-batches."""
    kept, h = [], x
    parts: list[Callable[[Tensor], Tensor]] = [*model.layers, lambda output: model.loss(output, y)]
    for k, part in enumerate(parts):
        h = h.detach().requires_grad_(k > 0)
        seconds, out = _timed(lambda part=part, h=h: part(h), device)
        kept.append((seconds, h, out))
        h = out
    gradient, found = None, []
    for seconds, entered, out in reversed(kept):
        back, _ = _timed(lambda out=out, g=gradient: out.backward(g), device)
        gradient = entered.grad
        found.append((seconds, back, out.nbytes))
    return found[::-1]


def _timed(call: Callable[[], Tensor | None], device: torch.device) -> tuple[float, Tensor | None]:
    measure.sync(device)
    start = time.perf_counter()
    out = call()
    measure.sync(device)
    return time.perf_counter() - start, out


def message_times(repeats: int, rank: Rank) -> dict[int, list[float]]:
    """Seconds of each rank's time that one message takes, by size in bytes; all 0 for a rank without a partner.

    Ranks 0 and 1, 2 and 3 and so on swap two messages: each sends one and receives one, half of the time for each.
    """
    partner = rank.rank ^ 1
    place = rank.device if "nccl" in rank.backend else torch.device("cpu")
    found: dict[int, list[float]] = {}
    for size in MESSAGES:
        out, into = (torch.zeros(size, dtype=torch.uint8, device=place) for _ in range(2))

        def swap(out: Tensor = out, into: Tensor = into) -> None:
            both = [dist.P2POp(dist.isend, out, partner), dist.P2POp(dist.irecv, into, partner)]
            for work in dist.batch_isend_irecv(both):
                work.wait()

        step = swap if partner < rank.world_size else (lambda: None)
        seconds = []
        for _ in range(repeats + 1):
            rank.barrier()
            seconds += measure.time_steps(step, 1, rank.device)
        found[size] = [t / 2 if rank.world_size > 1 else 0.0 for t in rank.slowest(seconds[1:])]
    return found


def link(times: Mapping[int, Sequence[float]]) -> tuple[float, float]:
    """(latency s, seconds per byte) of t = latency + size x per_byte, at the least relative error of the medians.

    Neither comes out negative. (0, 0) if nothing took any time: a single rank sends nothing.
    """
    from scipy.optimize import nnls  # half a second, which a bad option need not wait for

    seconds = np.array([statistics.median(t) for t in times.values()])
    if not seconds.any():
        return 0.0, 0.0
    seconds = np.maximum(seconds, 1e-9)  # a clock may be too coarse for a small message
    design = np.stack([np.ones(len(times)), np.array(list(times), float)], axis=1) / seconds[:, None]
    latency, per_byte = nnls(design, np.ones(len(times)))[0]
    return float(latency), float(per_byte)


def costs(layers: Sequence[Layer], times: Mapping[int, Sequence[float]], rank: Rank) -> Costs:
    """Medians of every layer, averaged over the ranks, which profile at the same time as they would work in a pipeline.

    `times` are those of message_times. The loss counts as part of the last layer.
    """
    medians = [(statistics.median(la.forward_s), statistics.median(la.backward_s)) for la in layers]
    everyone = np.mean(rank.gather(medians), axis=0).T.tolist()
    forward, backward = ((*part[:-2], part[-2] + part[-1]) for part in everyone)
    latency, per_byte = link(times)
    return Costs(forward, backward, (0.0, *(latency + per_byte * la.output_bytes for la in layers[:-2])))
