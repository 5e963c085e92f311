"""How long does a step take on many GPUs? Computing, two levels of links, overlap, stragglers, input, failures.

Every term is theory and has a unit; no number was fitted to a training on many GPUs.
`labs.common.planning.blind_test` says how far off it is on published ones. What a node's GPUs have among them is
"inside", what joins nodes is "between".

  arithmetic   FLOPs over the FLOP/s that one GPU reaches; this one number is what a calibration gives
  overhead     what does not shrink with the batch: a gap per kernel, and the optimizer's reading and writing of states
  bubble       stages of a pipeline that wait for each other
  exposed      communication that no computing hides, each collective by the faster of two ways through both levels
  waiting      the slowest of n ranks sets the pace: expected maximum of n normal step times
  starved      the input pipeline of a node delivers fewer samples than its GPUs take
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

from labs.common.planning.parallel_cost import BUCKET_BYTES, COPY_BYTES, GRADIENT_BYTES, Cost, Job, Plan
from labs.kit import hardware
from labs.kit.errors import require

REACHED = 0.8
"""Of a link's datasheet bandwidth, by large messages: "at best 80 to 90 %" in stas00/ml-engineering, network/README.md,
whose NCCL sweeps reach 78 and 82 % inside a node. For those sweeps it is therefore no blind prediction."""
HOP_S = {"NVLink": 3.4e-6, "PCIe": 5.7e-6, "network": 9.6e-6}
"""From one GPU of a ring to the next, in s, as NCCL itself reckons for Simple, its protocol of large messages: hwLat in
NVIDIA/nccl at 01afd20a, src/graph/tuning.cc. Not the call's own start, which is there once however long the ring."""
GAP_S = 4e-6
"""Between the end of one kernel and the work of the next, in s: our round number."""
SPREAD = 0.01
"""Standard deviation of a rank's step time over its mean: our round number for equal GPUs without neighbours."""


@dataclass(frozen=True)
class Link:
    """What one GPU can send in one direction, reached rather than promised."""

    bytes_s: float
    latency_s: float = 10e-6
    """Of one message."""

    def __post_init__(self) -> None:
        require(self.bytes_s > 0, f"a link carries more than {self.bytes_s:g} bytes/s")
        require(self.latency_s >= 0, f"latency must not be negative: {self.latency_s:g} s")


INFINITE = Link(math.inf, 0.0)


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal GPUs."""

    gpus: int
    gpus_per_node: int
    flop_s: float
    """Of one GPU while it multiplies, reached: the number that one measured step gives (`calibrated`)."""
    inside: Link
    """Of one GPU to the others of its node."""
    between: Link
    """Of one GPU to other nodes: its node's network cards over its node's GPUs."""
    memory_bytes_s: float = math.inf
    """Of one GPU's memory: what the optimizer's update is limited by."""
    gap_s: float = GAP_S
    spread: float = SPREAD
    feed_samples_s: float = math.inf
    """Samples per second that the input pipeline of one node delivers."""
    startup_s: float = 0.0
    """From the start of the job to its first step."""
    gpu_mtbf_s: float = math.inf
    """Mean time between failures of one GPU with its share of the node; a job of n fails n times as often."""
    save_s: float = 0.0
    """Training stops for so long to write a checkpoint."""
    restart_s: float = 0.0
    """From a failure until training goes on."""

    def __post_init__(self) -> None:
        require(self.gpus >= 1 and self.gpus_per_node >= 1, "a cluster has at least one GPU, and one GPU in a node")
        require(self.flop_s > 0, f"flop_s must be positive, not {self.flop_s:g}")
        require(self.spread >= 0, f"spread must not be negative: {self.spread:g}")
        require(self.feed_samples_s > 0, f"an input pipeline delivers more than {self.feed_samples_s:g} samples/s")
        require(self.memory_bytes_s > 0, f"memory_bytes_s must be positive, not {self.memory_bytes_s:g}")
        require(self.gpu_mtbf_s > 0, f"gpu_mtbf_s must be positive, inf if none fails, not {self.gpu_mtbf_s:g}")
        for name in ("gap_s", "startup_s", "save_s", "restart_s"):
            require(getattr(self, name) >= 0, f"{name} must not be negative: {getattr(self, name):g}")

    @property
    def nodes(self) -> int:
        """Nodes in use; the last one may be partly filled."""
        return math.ceil(self.gpus / self.gpus_per_node)


@dataclass(frozen=True)
class Work:
    """What one optimizer step has to do, over all GPUs."""

    parameters: float
    flop: float
    """FLOPs of one sample, forward and backward, nothing recomputed."""
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
    """Per parameter, in the format in which FSDP gathers weights."""
    update_bytes: float = 30.0
    """Per parameter, read and written by the optimizer: Adam reads 4 and writes 3 FP32 numbers and a 16-bit copy."""
    overlap: bool = True
    """Gradients travel during backward (DDP, FSDP); if not, after it."""

    @classmethod
    def of(cls, job: Job) -> Work:
        """A transformer of `parallel_cost`; a sample is a sequence. We count 45 kernels a layer, backward too."""
        return cls(
            job.parameters, job.flop / job.batch, job.batch, 45.0 * job.layers, job.layers, 2.0 * job.hidden * job.seq
        )


@dataclass(frozen=True)
class Group:
    """Ranks that exchange with each other, and how many of them share a node."""

    ranks: int
    per_node: int

    @property
    def nodes(self) -> int:
        """Nodes that the group spans."""
        return math.ceil(self.ranks / self.per_node)


@dataclass(frozen=True)
class Step:
    """One optimizer step in seconds, by what they are spent on."""

    arithmetic_s: float
    overhead_s: float
    bubble_s: float
    exposed_s: float
    waiting_s: float
    starved_s: float
    inside_s: float
    """Of all collectives over links inside nodes, hidden or not."""
    between_s: float
    """Of all collectives over links between nodes, hidden or not."""

    @property
    def step_s(self) -> float:
        """Seconds per optimizer step."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """{what the time is spent on: seconds}; they add up to the step."""
        return {
            "arithmetic": self.arithmetic_s,
            "overhead": self.overhead_s,
            "bubble": self.bubble_s,
            "exposed communication": self.exposed_s,
            "waiting for the slowest": self.waiting_s,
            "starved of input": self.starved_s,
        }

    def limit(self) -> str:
        """What takes most of the step; of exposed communication, the level that it waits for."""
        parts = self.parts()
        name = max(parts, key=lambda n: parts[n])
        if name != "exposed communication":
            return name
        return "links between nodes" if self.between_s > self.inside_s else "links inside a node"


def expected_maximum(n: int) -> float:
    """Of n independent standard normal numbers, in standard deviations: Blom 1958, Phi^-1((n - 3/8) / (n + 1/4))."""
    require(n >= 1, f"of at least one number, not {n}")
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25))


def all_reduce_s(size: float, group: Group, inside: Link, between: Link) -> tuple[float, float]:
    """(seconds inside nodes, seconds between them) of an all-reduce of `size` bytes: the faster of two ways.

    Flat ring: 2 (n-1) messages and 2 (n-1)/n of the bytes pass every link of the ring, at the pace of the slower
    level (Patarasuk & Yuan 2009). Two levels: reduce-scatter inside, all-reduce between the nodes of each GPU's part,
    all-gather inside (Jia et al. 2018, arXiv 1807.11205; NCCL's trees send as much between nodes). All GPUs of a node
    use the network at once: a ring per network card. NCCL, too, takes the faster one by a model of its own.
    """
    n, g, nodes = group.ranks, min(group.per_node, group.ranks), group.nodes
    if n == 1:
        return 0.0, 0.0
    if nodes == 1:
        return 2 * (n - 1) * inside.latency_s + 2 * (n - 1) / n * size / inside.bytes_s, 0.0
    flat_in = 2 * (n - nodes) * inside.latency_s + 2 * (n - 1) / n * size / inside.bytes_s
    flat_out = 2 * nodes * between.latency_s + 2 * (n - 1) / n * size / (g * between.bytes_s)
    flat = (0.0, flat_out) if flat_out > flat_in else (flat_in, 0.0)  # one stream of chunks, at the slower level's pace
    two_in = 2 * (g - 1) * inside.latency_s + 2 * (g - 1) / g * size / inside.bytes_s
    hops = 2 * math.ceil(math.log2(nodes))  # up a tree of nodes and down again
    two_out = hops * between.latency_s + 2 * (nodes - 1) / nodes * size / (g * between.bytes_s)
    return min(flat, (two_in, two_out), key=sum)


def gather_s(size: float, group: Group, inside: Link, between: Link) -> tuple[float, float]:
    """(seconds inside nodes, seconds between them) of an all-gather to, or reduce-scatter of, `size` bytes.

    A ring: (n-1)/n of the bytes pass every GPU, (N-1)/N of them enter each of N nodes; both levels work at once.
    """
    n, g, nodes = group.ranks, min(group.per_node, group.ranks), group.nodes
    if n == 1:
        return 0.0, 0.0
    own = (n - nodes) * inside.latency_s + (n - 1) / n * size / inside.bytes_s
    if nodes == 1:
        return own, 0.0
    out = nodes * between.latency_s + (nodes - 1) / nodes * size / (g * between.bytes_s)
    return (0.0, out) if out > own else (own, 0.0)


def groups(cluster: Cluster, plan: Plan) -> tuple[Group, Group]:
    """(tensor group, data group): tensor ranks sit next to each other, then data ranks, stages are farthest apart."""
    tensor = Group(plan.tensor, min(plan.tensor, cluster.gpus_per_node))
    return tensor, Group(plan.data, max(1, min(plan.data, cluster.gpus_per_node // plan.tensor)))


def step(work: Work, cluster: Cluster, plan: Plan | None = None) -> Step:
    """The model: one step of `work` on `cluster`. Without a `plan`: DDP over all its GPUs."""
    plan = plan or Plan(data=cluster.gpus)
    layers = math.ceil(work.layers / plan.pipeline)  # of the largest stage
    share = layers / work.layers
    again = 4 / 3 if plan.recompute else 1.0
    arithmetic = again * share * work.batch * work.flop / (plan.data * plan.tensor * cluster.flop_s)
    own = work.parameters * share / plan.tensor
    shards = plan.data if plan.sharded else 1
    update = own / shards * work.update_bytes / cluster.memory_bytes_s
    gaps = again * share * plan.micro_batches * work.kernels * cluster.gap_s
    busy = arithmetic + gaps
    tensor = _tensor(work, cluster, plan, layers)
    bubble = (busy + sum(tensor)) * (plan.pipeline - 1) / plan.micro_batches
    data, exposed = _data(work, cluster, plan, own, busy)
    stages = _stages(work, cluster, plan)
    own_pace = busy + update + bubble + exposed + sum(tensor) + stages
    waiting = cluster.spread * expected_maximum(plan.ranks) * (busy + update)
    fed = work.batch / cluster.nodes / cluster.feed_samples_s
    return Step(
        arithmetic,
        gaps + update,
        bubble,
        exposed + sum(tensor) + stages,
        waiting,
        max(0.0, fed - own_pace - waiting),
        data[0] + tensor[0],
        data[1] + tensor[1] + stages,
    )


def _tensor(work: Work, cluster: Cluster, plan: Plan, layers: int) -> tuple[float, float]:
    """Two all-reduces of the activations per layer forward, two backward, two more if forward is repeated."""
    if plan.tensor == 1:
        return 0.0, 0.0
    size = work.width_bytes * work.batch / (plan.data * plan.micro_batches)
    times = (6 if plan.recompute else 4) * layers * plan.micro_batches
    inside, between = all_reduce_s(size, groups(cluster, plan)[0], cluster.inside, cluster.between)
    return times * inside, times * between


def _stages(work: Work, cluster: Cluster, plan: Plan) -> float:
    """Messages between stages, there and back: over the network if a stage fills its node, else inside."""
    if plan.pipeline == 1:
        return 0.0
    link = cluster.between if plan.tensor * plan.data >= cluster.gpus_per_node else cluster.inside
    size = work.width_bytes * work.batch / (plan.data * plan.micro_batches * plan.tensor)
    return 2 * (plan.micro_batches + plan.pipeline - 2) * (link.latency_s + size / link.bytes_s)


def _data(work: Work, cluster: Cluster, plan: Plan, own: float, busy: float) -> tuple[tuple[float, float], float]:
    """((inside, between) seconds of the data-parallel collectives, what of them no computing hides).

    DDP: one all-reduce of gradients; all but its last bucket can hide behind backward. FSDP: weights are gathered in
    forward and in backward of each micro-batch, gradients scattered in backward.
    """
    if plan.data == 1:
        return (0.0, 0.0), 0.0
    group, m = groups(cluster, plan)[1], plan.micro_batches
    parts = 4 if plan.recompute else 3  # forward is one, backward two, recomputing one more
    forward, backward = busy / parts, busy * (parts - 1) / parts
    if not plan.sharded:
        size = work.gradient_bytes * own
        whole = all_reduce_s(size, group, cluster.inside, cluster.between)
        if not work.overlap:
            return whole, sum(whole)
        last = sum(all_reduce_s(min(size, BUCKET_BYTES), group, cluster.inside, cluster.between))
        return whole, max(last, sum(whole) - backward / m)
    gather = gather_s(work.weight_bytes * own, group, cluster.inside, cluster.between)
    scatter = gather_s(work.gradient_bytes * own, group, cluster.inside, cluster.between)
    whole = tuple(m * (2 * a + b) for a, b in zip(gather, scatter, strict=True))
    if not work.overlap:
        return whole, sum(whole)
    first = sum(gather) / max(1, work.layers)  # of the first layer, which nothing hides
    return whole, max(first, m * sum(gather) - forward) + max(0.0, m * (sum(gather) + sum(scatter)) - backward)


def timed(cost: Cost, work: Work, cluster: Cluster) -> Cost:
    """`cost`, whose bytes stay, with this model's seconds."""
    found = step(work, cluster, cost.plan)
    return replace(
        cost,
        compute_s=found.arithmetic_s + found.overhead_s,
        bubble_s=found.bubble_s,
        exposed_s=found.exposed_s,
        waiting_s=found.waiting_s + found.starved_s,
    )


def alone(work: Work, cluster: Cluster, samples: float) -> Step:
    """A step of `samples` on one GPU of `cluster`, with memory without limit."""
    return step(replace(work, batch=samples), replace(cluster, gpus=1), Plan())


def efficiency(work: Work, cluster: Cluster, plan: Plan | None = None) -> float:
    """Samples per second of each GPU over those of one alone that takes an equal share of the batch (weak scaling).

    The one updates as many states as each of the many: that FSDP divides them is no gain of scaling.
    """
    plan = plan or Plan(data=cluster.gpus)
    shards = plan.tensor * plan.pipeline * (plan.data if plan.sharded else 1)
    own = replace(work, update_bytes=work.update_bytes / shards)
    return alone(own, cluster, work.batch / cluster.gpus).step_s / step(work, cluster, plan).step_s


def calibrated(work: Work, cluster: Cluster, plan: Plan | None, measured_s: float) -> Cluster:
    """`cluster` with the flop_s that makes `work` take `measured_s` seconds per step, by bisection.

    BadInput if the other terms alone take longer: then no FLOP/s explains the measurement, and a link or gap is wrong.
    """
    floor = step(work, replace(cluster, flop_s=1e24), plan).step_s
    require(
        floor < measured_s,
        f"{measured_s:.3g} s per step cannot be: without any arithmetic the model has "
        f"{floor:.3g} s; give faster links or shorter gaps",
    )
    low, high = 1e3, 1e24
    for _ in range(120):
        middle = math.sqrt(low * high)
        slow = step(work, replace(cluster, flop_s=middle), plan).step_s > measured_s
        low, high = (middle, high) if slow else (low, middle)
    return replace(cluster, flop_s=high)


@dataclass(frozen=True)
class Training:
    """A whole training: seconds from submission to the last step, expected values."""

    step_s: float
    steps: float
    startup_s: float
    lost_share: float
    """Of the wall clock after start-up: saving, work that failures throw away, restarts."""

    @property
    def total_s(self) -> float:
        """Start-up, steps, saving, failures."""
        return self.startup_s + self.step_s * self.steps / (1 - self.lost_share)


def training(work: Work, cluster: Cluster, steps: float, plan: Plan | None = None) -> Training:
    """`steps` optimizer steps with checkpoints at the best interval (labs.common.checkpoints.checkpoint_interval)."""
    share = lost_share(cluster)
    require(
        share < 1 - 1e-9,
        f"{cluster.gpus:,} GPUs fail every {cluster.gpu_mtbf_s / cluster.gpus:.3g} s, so with "
        f"{cluster.save_s:g} s to save and {cluster.restart_s:g} s to restart nothing is ever finished: take fewer "
        "GPUs, or shorten these",
    )
    return Training(step(work, cluster, plan).step_s, steps, cluster.startup_s, share)


def lost_share(cluster: Cluster) -> float:
    """Share of the wall clock that saving and failures take, at the best interval between checkpoints."""
    from labs.common.checkpoints import checkpoint_interval

    if math.isinf(cluster.gpu_mtbf_s):
        return 0.0
    mtbf = cluster.gpu_mtbf_s / cluster.gpus
    save = max(cluster.save_s, 1e-6 * mtbf)  # an interval of zero is no interval
    interval = checkpoint_interval.optimum(save, mtbf)
    return checkpoint_interval.lost_share(interval, save, mtbf, cluster.restart_s)


def without_peer_to_peer(card: str) -> str:
    """What to know of the links of a card whose driver joins no two of them; "" of every other card."""
    if card not in ("RTX 3090", "RTX 4090"):
        return ""
    return (
        f"NVIDIA's driver gives cards such as the {card} no peer-to-peer (seen on the RTX 3090: "
        "github.com/NVIDIA/nccl/issues/1127, and the RTX 4090: cortwave.github.io/posts/multi-gpu): messages go "
        "through the host's memory, and get less than PCIe promises. Over a changed driver, 4 RTX 4090 "
        "reach 26 GB/s (github.com/tinygrad/open-gpu-kernel-modules/issues/36): the best case. So time it: "
        "all_reduce_perf of nccl-tests prints busbw."
    )


def of_card(card: str, gpus: int, gpus_per_node: int = 8, network_gb_s: float = 25.0, reached: float = 0.5) -> Cluster:
    """Nodes of a card of labs/kit/gpus.toml; `reached`: of its dense 16-bit peak, `network_gb_s` of one GPU.

    BadInput for a card without a sourced peak or link.
    """
    row = hardware.require_spec(card)
    peak = row.tflops("bf16") or row.tflops("fp16")
    require(bool(peak and row.link_gb_s), f"{card} has no sourced 16-bit peak, or no link, in labs/kit/gpus.toml")
    link = row.link_among(min(gpus, gpus_per_node))
    inside = Link(REACHED * link / 2 * 1e9)  # datasheets add both directions
    memory = REACHED * row.bandwidth_gb_s * 1e9 if row.bandwidth_gb_s else math.inf
    return Cluster(gpus, gpus_per_node, reached * peak * 1e12, inside, Link(REACHED * network_gb_s * 1e9), memory)
