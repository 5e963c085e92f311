"""How long a step takes: arithmetic, two levels of links, overlap, the pipeline's bubble, and the slowest rank.

Every term is theory and has a unit; no number was fitted to multi-GPU training runs. `published` says how far off the
sum is. "Inside" links join the GPUs of a node, "between" links join nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from labs.common.cost_model import waiting
from labs.common.cost_model.jobs import Job, Plan
from labs.common.cost_model.memory import COPY_BYTES, GRADIENT_BYTES
from labs.kit.errors import require

BUCKET_BYTES = 25 * 2**20  # DDP's; the last one has no backward left to hide behind
GAP_S = 4e-6  # between the end of one kernel and the work of the next: our round number
SPREAD = 0.01  # standard deviation of a rank's step time over its mean: our round number for equal, quiet GPUs
KERNELS = 45  # per transformer layer, forward and backward: our count


@dataclass(frozen=True)
class Link:
    """What one GPU reaches in one direction."""

    bytes_s: float
    latency_s: float = 0.0
    """Per message."""


INFINITE = Link(math.inf)


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal GPUs."""

    gpus: int
    gpus_per_node: int
    flop_s: float
    """Reached by one GPU while multiplying: the number that one timed step gives (`calibrated`)."""
    inside: Link
    """From one GPU to the others in its node."""
    between: Link = INFINITE
    """From one GPU to other nodes: its node's network bandwidth over its node's GPUs."""
    memory_bytes_s: float = math.inf
    """Of one GPU's memory: limits the optimizer's update."""
    memory_bytes: float = math.inf
    """Of one GPU."""
    pcie: bool = False
    """The links inside are PCIe, not NVLink."""
    gap_s: float = GAP_S
    spread: float = SPREAD


@dataclass(frozen=True)
class Work:
    """The work of one optimizer step, over all GPUs."""

    parameters: float
    flop: float
    """FLOPs of one sample, forward and backward, without recomputation."""
    batch: float
    """Samples per step."""
    kernels: float = 0.0
    """Kernels that one micro-batch launches on one GPU, forward and backward."""
    layers: int = 1
    width_bytes: float = 0.0
    """Bytes of one sample's activations between two layers: what tensor and pipeline parallel send."""
    gradient_bytes: float = GRADIENT_BYTES
    """Per parameter, in the format in which gradients travel."""
    weight_bytes: float = COPY_BYTES
    """Per parameter, in the format in which FSDP2 gathers weights."""
    update_bytes: float = 30.0
    """Per parameter, read and written by the optimizer: Adam reads 4 and writes 3 FP32 numbers and a 16-bit copy."""
    overlap: bool = True
    """Whether gradients travel during backward (DDP, FSDP2) or after it."""

    @classmethod
    def of(cls, job: Job) -> Work:
        """Return a transformer's work; a sample is a sequence."""
        width = 2.0 * job.hidden * job.seq
        return cls(job.parameters, job.flop / job.batch, job.batch, KERNELS * job.layers, job.layers, width)


@dataclass(frozen=True)
class Step:
    """Seconds of one optimizer step, by cause."""

    arithmetic_s: float
    overhead_s: float
    """Gaps between kernels and the optimizer's update, which don't shrink with the batch."""
    bubble_s: float
    """Pipeline stages waiting for each other."""
    exposed_s: float
    """Communication that no computation hides."""
    waiting_s: float
    """Waiting for the slowest rank."""

    @property
    def step_s(self) -> float:
        """Seconds per optimizer step."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Return {cause: seconds}; they add up to the step."""
        return {
            "arithmetic": self.arithmetic_s,
            "overhead": self.overhead_s,
            "bubble": self.bubble_s,
            "exposed communication": self.exposed_s,
            "waiting for the slowest": self.waiting_s,
        }

    def limit(self) -> str:
        """Return the name of the largest part."""
        parts = self.parts()
        return max(parts, key=lambda name: parts[name])


def all_reduce_s(size: float, n: int, per_node: int, inside: Link, between: Link) -> float:
    """Return seconds of an all-reduce of `size` bytes over n ranks, `per_node` in a node: the faster of two ways.

    Flat ring: 2 (n-1) messages and 2 (n-1)/n of the bytes pass every link, at the slower level's pace (Patarasuk & Yuan
    2009). Two levels: reduce-scatter inside, all-reduce of each GPU's part between nodes, all-gather inside (Jia et al.
    2018, arXiv 1807.11205; NCCL's trees send as much between nodes). All GPUs of a node use the network at once: one
    ring per network card.
    """
    nodes = math.ceil(n / per_node)
    g = min(per_node, n)
    if nodes == 1:
        return 2 * (n - 1) * inside.latency_s + 2 * (n - 1) / n * size / inside.bytes_s
    flat_in = 2 * (n - nodes) * inside.latency_s + 2 * (n - 1) / n * size / inside.bytes_s
    flat_out = 2 * nodes * between.latency_s + 2 * (n - 1) / n * size / (g * between.bytes_s)
    two_in = 2 * (g - 1) * inside.latency_s + 2 * (g - 1) / g * size / inside.bytes_s
    hops = 2 * math.ceil(math.log2(nodes))  # up a tree of nodes and down again
    two_out = hops * between.latency_s + 2 * (nodes - 1) / nodes * size / (g * between.bytes_s)
    return min(max(flat_in, flat_out), two_in + two_out)


def gather_s(size: float, n: int, per_node: int, inside: Link, between: Link) -> float:
    """Return seconds of an all-gather to, or reduce-scatter of, `size` bytes.

    A ring: (n-1)/n of the bytes pass every GPU, (N-1)/N of them enter each of N nodes; both levels work at once.
    """
    nodes = math.ceil(n / per_node)
    g = min(per_node, n)
    own = (n - nodes) * inside.latency_s + (n - 1) / n * size / inside.bytes_s
    out = nodes * between.latency_s + (nodes - 1) / nodes * size / (g * between.bytes_s)
    return max(own, out if nodes > 1 else 0.0)


def step(work: Work, cluster: Cluster, plan: Plan) -> Step:
    """Model one step of `work` on `cluster` by `plan`."""
    layers = math.ceil(work.layers / plan.pipeline)  # of the largest stage
    share = layers / work.layers
    again = 4 / 3 if plan.recompute else 1.0
    arithmetic = again * share * work.batch * work.flop / (plan.data * plan.tensor * cluster.flop_s)
    own = work.parameters * share / plan.tensor
    update = own / (plan.data if plan.sharded else 1) * work.update_bytes / cluster.memory_bytes_s
    gaps = again * share * plan.micro_batches * work.kernels * cluster.gap_s
    busy = arithmetic + gaps
    tensor = _tensor(work, cluster, plan, layers)
    bubble = (busy + tensor) * (plan.pipeline - 1) / (1 if plan.naive else plan.micro_batches)
    exposed = tensor + _stages(work, cluster, plan) + _data(work, cluster, plan, own, busy)
    slowest = cluster.spread * waiting.of_normal(plan.ranks) * (busy + update)
    return Step(arithmetic, gaps + update, bubble, exposed, slowest)


def _tensor(work: Work, cluster: Cluster, plan: Plan, layers: int) -> float:
    """Return seconds of the all-reduces of activations: per layer two forward, two backward, two if recomputed."""
    size = work.width_bytes * work.batch / (plan.data * plan.micro_batches)
    times = (6 if plan.recompute else 4) * layers * plan.micro_batches
    per_node = min(plan.tensor, cluster.gpus_per_node)  # tensor ranks are neighbours, then data ranks
    return times * all_reduce_s(size, plan.tensor, per_node, cluster.inside, cluster.between)


def _stages(work: Work, cluster: Cluster, plan: Plan) -> float:
    """Return seconds of messages between stages, both ways; across nodes the slowest hop sets the pace."""
    if plan.pipeline == 1:
        return 0.0
    link = cluster.between if plan.ranks > cluster.gpus_per_node else cluster.inside
    size = work.width_bytes * work.batch / (plan.data * plan.micro_batches * plan.tensor)
    one_way = plan.micro_batches * (plan.pipeline - 1) if plan.naive else plan.micro_batches + plan.pipeline - 2
    return 2 * one_way * (link.latency_s + size / link.bytes_s)


def _data(work: Work, cluster: Cluster, plan: Plan, own: float, busy: float) -> float:
    """Return seconds of data-parallel collectives that no computation hides.

    DDP: one all-reduce of gradients; all but its last bucket can hide behind backward. FSDP2: gathers weights in
    forward and backward of each micro-batch, and scatters gradients in backward.
    """
    if plan.data == 1:
        return 0.0
    per_node = max(1, min(plan.data, cluster.gpus_per_node // plan.tensor))
    links, m = (plan.data, per_node, cluster.inside, cluster.between), plan.micro_batches
    parts = 4 if plan.recompute else 3  # forward is one, backward two, recomputing one more
    forward, backward = busy / parts, busy * (parts - 1) / parts
    if not plan.sharded:
        size = work.gradient_bytes * own
        whole, last = all_reduce_s(size, *links), all_reduce_s(min(size, BUCKET_BYTES), *links)
        return max(last, whole - backward / m) if work.overlap else whole
    gather, scatter = m * gather_s(work.weight_bytes * own, *links), m * gather_s(work.gradient_bytes * own, *links)
    if not work.overlap:
        return 2 * gather + scatter
    first = gather / m / work.layers  # the first layer's gather, which nothing hides
    return max(first, gather - forward) + max(0.0, gather + scatter - backward)


def efficiency(work: Work, cluster: Cluster, plan: Plan) -> float:
    """Return each GPU's samples per second over a single GPU's with an equal share of the batch (weak scaling).

    The single GPU updates as many states as each of the many, because dividing them is FSDP2's gain, not scaling's.
    """
    shards = plan.tensor * plan.pipeline * (plan.data if plan.sharded else 1)
    alone = replace(work, batch=work.batch / plan.ranks, update_bytes=work.update_bytes / shards)
    return step(alone, cluster, Plan()).step_s / step(work, cluster, plan).step_s


def calibrated(work: Work, cluster: Cluster, plan: Plan, measured_s: float) -> Cluster:
    """Return `cluster` with the flop_s that makes `work` take `measured_s` seconds per step, by bisection.

    BadInput if the other terms alone take longer, because then no FLOP/s explains the measurement.
    """
    floor = step(work, replace(cluster, flop_s=1e24), plan).step_s
    require(
        floor < measured_s,
        f"{measured_s:.3g} s per step is too short: without any arithmetic the model needs {floor:.3g} s; check the "
        "step, the links and the number of GPUs",
    )
    low, high = 1e3, 1e24
    for _ in range(120):
        middle = math.sqrt(low * high)
        slow = step(work, replace(cluster, flop_s=middle), plan).step_s > measured_s
        low, high = (middle, high) if slow else (low, middle)
    return replace(cluster, flop_s=high)
