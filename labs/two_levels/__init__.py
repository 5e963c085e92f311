"""How long does an exchange take over two speeds: fast inside a machine, slow between machines?

    python -m labs.two_levels --nproc 4 --oversubscribe         # 2 "nodes" of 2 ranks on this machine
    python -m labs.two_levels --nproc 4 --oversubscribe --inside-mb-s 400 --across-mb-s 20 --ways flat hierarchical
    torchrun --nproc-per-node 2 --nnodes 2 ... -m labs.two_levels      # paces the real network, too

About 10 s on 2 CPU cores. Ranks 0 and 1 are one node, 2 and 3 the other; the kernel paces connections inside a node to
  one speed and those between nodes to another, much slower one, which all ranks of a node share as they would a card.
  Each way sends the gradients of one model of a few layers once per step. What it sends on each level is counted by the
  kernel, what it should take is a formula of these bytes' closed form and the two speeds, and then a clock is held
  against it. Four ranks share two cores: the arithmetic is kept so small that the wires, not the cores, set the time.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from labs.common.communication import wire
from labs.kit import measure
from labs.kit.errors import naming, require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.two_levels import two_levels as levels
from labs.two_levels.two_levels import Nodes, Phase, hierarchical_all_reduce, ring_in_order

WAYS = {
    "flat": "torch's all-reduce over all ranks",
    "ring, node by node": "a ring by hand that leaves each node once",
    "ring, in turn": "the same ring, with every neighbour on the other node",
    "hierarchical": "reduce-scatter inside, all-reduce across, all-gather inside",
    "ddp": "DistributedDataParallel, a step",
    "ddp, accumulated": "DistributedDataParallel with no_sync, a micro-step",
    "fsdp": "FSDP2 with shards over all ranks, a step",
    "hsdp": "FSDP2 with shards inside a node and copies across, a step",
    "hsdp, by hand": "the collectives of that step, without FSDP2",
}


@dataclass(frozen=True)
class Config:
    """Which nodes, which wires, what is sent."""

    nodes: int = 2
    """Machines that the ranks are shared out among, in order."""
    inside_mb_s: float = 240.0
    """Of each connection inside a node, each direction, in 10^6 byte/s."""
    across_mb_s: float = 30.0
    """Of all connections together that leave a node, each direction, in 10^6 byte/s."""
    width: int = 704
    """Inputs and outputs of a linear layer: its weights, width x width in FP32, are what is summed (2.0 MB)."""
    layers: int = 1
    """How many such layers. FSDP2 sends each by itself: more and smaller messages."""
    every: int = 4
    """Micro-steps per exchange, where gradients are accumulated."""
    ways: tuple[str, ...] = tuple(WAYS)
    """Which of WAYS to try."""
    seconds: float = 8.0
    """Time for all rounds, in s. A slower machine takes fewer rounds and has wider intervals."""
    rounds: int | None = None
    """Times that each way is timed; by default as many as fit into `seconds`, at least 6."""
    seed: int = 0
    """Seed of the model and of the batch."""
    smoke: bool = False
    """Two rounds over wires that are four times as fast."""

    def __post_init__(self) -> None:
        require(self.nodes >= 2, f"nodes must be at least 2, not {self.nodes}: one node has no slow wire")
        for name in ("inside_mb_s", "across_mb_s"):
            with naming(name):
                wire.require_rate(1e6 * getattr(self, name))
        require(min(self.width, self.layers, self.every) >= 1, "width, layers and every must be at least 1")
        unknown = sorted(set(self.ways) - set(WAYS))
        require(not unknown and len(self.ways) > 0, f"ways may hold {'; '.join(WAYS)}, not {'; '.join(unknown)}")
        measure.require_budget(self.seconds, self.rounds)

    @property
    def bytes(self) -> int:
        """Of all gradients."""
        return 4 * self.width**2 * self.layers


def check_layout(config: Config, world_size: int) -> None:
    """BadInput unless the ranks make nodes of two or more, and the system can pace."""
    least = 2 * config.nodes
    require(
        world_size % config.nodes == 0 and world_size >= least,
        f"nproc={world_size} does not make {config.nodes} "
        f"nodes of two ranks or more: use nproc={least}, with oversubscribe=True on few cores",
    )
    require(
        config.width % world_size == 0,
        f"width {config.width} cannot be cut into {world_size} equal parts: take a multiple of {world_size}",
    )
    require(wire.can_pace(), "this system cannot pace a connection: labs.two_levels takes Linux")


def nodes_of(config: Config, world_size: int) -> Nodes:
    """The machines of a run."""
    speed = 4e6 if config.smoke else 1e6
    return Nodes(config.nodes, world_size // config.nodes, speed * config.inside_mb_s, speed * config.across_mb_s)


def predict(way: str, size: float, nodes: Nodes, every: int = 1, gloo: bool = True) -> tuple[float, float, float]:
    """(bytes inside each node, bytes out of each node, seconds) of one step that sums `size` bytes.

    Phases follow each other; in each the slower level sets the time. What is not in it: latency, and arithmetic.
    FSDP gathers each layer twice, forward and backward, and reduce-scatters its gradients.
    """
    once: dict[str, list[Phase]] = {
        "flat": [levels.over_all("all_reduce", size, nodes)],
        "ring, in turn": [levels.in_turn(size, nodes)],
        "hierarchical": levels.hierarchical(size, nodes, gloo),
        "fsdp": [levels.over_all("all_gather", 2 * size, nodes), levels.over_all("reduce_scatter", size, nodes, gloo)],
        "hsdp": [
            levels.within("all_gather", 2 * size, nodes),
            levels.within("reduce_scatter", size, nodes, gloo),
            levels.between(size, nodes),
        ],
    }
    same = {"ring, node by node": "flat", "ddp": "flat", "ddp, accumulated": "flat", "hsdp, by hand": "hsdp"}
    inside, across, seconds = levels.total(once[same.get(way, way)], nodes)
    share = every if way == "ddp, accumulated" else 1
    return inside / share, across / share, seconds / share


def lanes(way: str, nodes: Nodes) -> int:
    """How many of a node's connections send to another node at the same time."""
    return nodes.per_node if way in ("ring, in turn", "hierarchical", "hsdp", "hsdp, by hand") else 1


# -- the ways


def model(config: Config) -> nn.Sequential:
    """Layers with nothing but weights: `config.bytes` of gradients, and little to compute."""
    torch.manual_seed(config.seed)
    return nn.Sequential(*(nn.Linear(config.width, config.width, bias=False) for _ in range(config.layers)))


def with_fsdp(config: Config, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 on each layer: with a mesh of one dimension fully sharded, with two shards inside, copies across."""
    from torch.distributed.fsdp import fully_shard

    module = model(config)
    for layer in module:
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def step(module: nn.Module, x: Tensor) -> None:
    """Forward and backward; gradients are exchanged on the way."""
    module(x).square().mean().backward()


def hsdp_by_hand(parameters: Tensor, shard: Tensor, inside: dist.ProcessGroup, across: dist.ProcessGroup) -> None:
    """What HSDP's ranks send in a step, and nothing else: gathered for forward and for backward, scattered, summed."""
    levels.all_gather(parameters, shard, group=inside)
    levels.all_gather(parameters, shard, group=inside)
    levels.reduce_scatter(shard, parameters, group=inside)
    dist.all_reduce(shard, group=across)


def accumulated(module: DistributedDataParallel, x: Tensor, every: int) -> None:
    """`every` micro-steps, of which the last one exchanges the sum of all their gradients."""
    with module.no_sync():
        for _ in range(every - 1):
            step(module, x)
    step(module, x)


def make_ways(config: Config, nodes: Nodes) -> dict[str, Callable[[], object]]:
    """What to time, by name. Makes every group of ranks; collective."""
    mesh = init_device_mesh("cpu", (nodes.count, nodes.per_node), mesh_dim_names=("across", "inside"))
    inside, across = mesh["inside"].get_group(), mesh["across"].get_group()
    gradients, shard = torch.zeros(config.bytes // 4), torch.zeros(config.bytes // 4 // nodes.per_node)
    x = torch.randn(4, config.width)
    makers: dict[str, Callable[[], Callable[[], object]]] = {
        "flat": lambda: partial(dist.all_reduce, gradients),
        "ring, node by node": lambda: partial(ring_in_order, gradients, nodes.node_by_node()),
        "ring, in turn": lambda: partial(ring_in_order, gradients, nodes.in_turn()),
        "hierarchical": lambda: partial(hierarchical_all_reduce, gradients, inside, across),
        "ddp": lambda: partial(step, DistributedDataParallel(model(config)), x),
        "ddp, accumulated": lambda: partial(accumulated, DistributedDataParallel(model(config)), x, config.every),
        "fsdp": lambda: partial(step, with_fsdp(config, init_device_mesh("cpu", (nodes.ranks,))), x),
        "hsdp": lambda: partial(step, with_fsdp(config, mesh), x),
        "hsdp, by hand": lambda: partial(hsdp_by_hand, gradients, shard, inside, across),
    }
    return {way: makers[way]() for way in config.ways}


# -- the measurement


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Are the sums right, what does each way send on each level, and how long does it take?"""
    require(rank.device.type == "cpu", 'NCCL does not use TCP within a machine: use device="cpu"')
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # nobody here writes into an output
    nodes = nodes_of(config, rank.world_size)
    yield from sums(nodes, rank)
    ways = make_ways(config, nodes)
    for way, call in ways.items():
        for _ in range(3):  # opens every connection; DDP arranges its buckets anew after its first step
            call()
        micro = config.every if way == "ddp, accumulated" else 1
        inside, across, seconds = predict(way, config.bytes, nodes, micro)
        yield rank.record("sent_bytes", "B", inside, kind="modelled", way=way, level="inside")
        yield rank.record("sent_bytes", "B", across, kind="modelled", way=way, level="across")
        yield rank.record("step_s", "s", seconds, kind="modelled", way=way)
        if counted := levels.sent_between(call, rank):
            for level, sent in zip(("inside", "across"), levels.sent_by_level(counted, nodes), strict=True):
                yield rank.record("sent_bytes", "B", [b / micro for b in sent], way=way, level=level)
    yield from times(ways, config, nodes, rank)


def sums(nodes: Nodes, rank: Rank) -> Iterator[Record]:
    """Whether the ways by hand have torch's sum of whole numbers, which no order of additions rounds."""
    mesh = init_device_mesh("cpu", (nodes.count, nodes.per_node), mesh_dim_names=("across", "inside"))
    start = torch.arange(8 * nodes.ranks, dtype=torch.float32) * (rank.rank + 1)
    right = start.clone()
    dist.all_reduce(right)
    by_hand = {
        "ring, node by node": partial(ring_in_order, order=nodes.node_by_node()),
        "ring, in turn": partial(ring_in_order, order=nodes.in_turn()),
        "hierarchical": partial(
            hierarchical_all_reduce, inside=mesh["inside"].get_group(), across=mesh["across"].get_group()
        ),
    }
    for way, reduce in by_hand.items():
        x = start.clone()
        reduce(x)
        yield rank.record("max_error", "1", rank.slowest([(x - right).abs().max().item()]), way=way)


def times(ways: dict[str, Callable[[], object]], config: Config, nodes: Nodes, rank: Rank) -> Iterator[Record]:
    """Seconds of each way on the slowest rank, and of CPU time on all ranks; wires are set outside of the clock."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    cpu_s: dict[str, list[float]] = {way: [] for way in ways}
    budget = measure.rounds_of(config, rank.slowest)
    most = budget if isinstance(budget, int) else budget.most
    for done, order in enumerate(measure.within(measure.orders(tuple(ways), most), budget), start=1):
        for way in order:
            with levels.two_speeds(rank, nodes, lanes(way, nodes)):
                rank.barrier()
                before = time.process_time()
                seconds[way] += measure.time_steps(ways[way], 1, rank.device)
                cpu_s[way].append(time.process_time() - before)
        rank.progress(done, most if isinstance(budget, int) else budget.least, "a round of all ways")
    for way, samples in seconds.items():
        micro = config.every if way == "ddp, accumulated" else 1
        yield rank.record("step_s", "s", [s / micro for s in rank.slowest(samples)], way=way)
        every = [sum(ranks) / micro for ranks in zip(*rank.gather(cpu_s[way]), strict=True)]
        yield rank.record("cpu_s", "s", every, way=way)  # of all ranks and their threads together


# -- what it says


def of(run: Records, metric: str, kind: str, **case: str) -> Record | None:
    """The record of that kind; None without one."""
    return next((r for r in run.where(metric, **case) if (r.kind == "modelled") == (kind == "modelled")), None)


def ways_of(run: Records) -> list[str]:
    """The ways of a run, by predicted time, fastest first."""
    modelled = {r.case["way"]: r.value for r in run.where("step_s") if r.kind == "modelled"}
    return sorted(modelled, key=modelled.__getitem__)


@dataclass(frozen=True)
class Ranking:
    """Pairs of ways whose predicted times differ: in how many the measured ratio agrees, contradicts, cannot tell."""

    agree: int
    contradict: list[tuple[str, str]]
    open: int


APART = 1.25
"""From which ratio on the formula is asked which of two ways is faster. It leaves out latency, arithmetic and FSDP2's
own work, which lengthen a step, and that after a pause a paced connection sends its first packets at once, which
shortens it: on a quiet machine ways took 0.85 to 1.1 times the formula. Closer pairs are shown, not judged: `close`."""


def ranking(run: Records, apart: float = APART) -> Ranking:
    """Every pair of ways that the formula sets apart by more than `apart`, judged by the paired ratio's interval."""
    agree, against, open_ = 0, [], 0
    ways = ways_of(run)
    for i, fast in enumerate(ways):
        for slow in ways[i + 1 :]:
            if of(run, "step_s", "modelled", way=slow).value <= apart * of(run, "step_s", "modelled", way=fast).value:
                continue
            ratio = measure.paired_ratio(*(of(run, "step_s", "measured", way=w).samples for w in (slow, fast)))
            agree += ratio.low > 1
            open_ += ratio.low <= 1 <= ratio.high
            if ratio.high < 1:
                against.append((fast, slow))
    return Ranking(agree, against, open_)


def close(run: Records, fast: str, slow: str) -> tuple[float, measure.Estimate] | None:
    """(formula, measured) time of `fast` over that of `slow`, if it sets them apart by less than APART."""
    if not {fast, slow} <= set(ways_of(run)):
        return None
    formula = of(run, "step_s", "modelled", way=fast).value / of(run, "step_s", "modelled", way=slow).value
    if not 1 / APART <= formula < 1:
        return None
    return formula, measure.paired_ratio(*(of(run, "step_s", "measured", way=w).samples for w in (fast, slow)))


def beside_by_hand(run: Records) -> tuple[measure.Estimate, float, float] | None:
    """(time of HSDP over that of its collectives by hand, seconds and CPU seconds of all ranks that it takes more)."""
    both = [of(run, "step_s", "measured", way=way) for way in ("hsdp", "hsdp, by hand")]
    cpu = [of(run, "cpu_s", "measured", way=way) for way in ("hsdp", "hsdp, by hand")]
    if None in (*both, *cpu):
        return None
    ratio = measure.paired_ratio(*(r.samples for r in both))
    return ratio, both[0].value - both[1].value, cpu[0].value - cpu[1].value


def over_formula(run: Records) -> dict[str, measure.Estimate]:
    """{way: measured time over the formula's}."""
    return {
        way: measure.estimate(
            [s / of(run, "step_s", "modelled", way=way).value for s in of(run, "step_s", "measured", way=way).samples],
            "x",
        )
        for way in ways_of(run)
    }


def counted_off(run: Records, tolerance: float = 0.02) -> list[str]:
    """Ways and levels whose counted bytes differ from the closed form by more than `tolerance` of the gradients."""
    size = gradient_bytes(run)
    off = []
    for record in run.where("sent_bytes"):
        formula = of(run, "sent_bytes", "modelled", **record.case)
        if record.kind != "modelled" and abs(max(record.samples) - formula.value) > tolerance * size:
            off.append(f"{record.case['way']}, {record.case['level']}")
    return off


def gradient_bytes(run: Records) -> float:
    """Of one step, summed over all layers."""
    return 4 * run[0].config["width"] ** 2 * run[0].config["layers"]


def answer(run: Records) -> Iterator[str]:
    """The fastest and slowest exchange, what crosses, whether bytes and ranking are as predicted."""
    config, n = run[0].config, run[0].layout["world_size"]
    took = {way: measure.estimate(of(run, "step_s", "measured", way=way).samples, "s") for way in ways_of(run)}
    yield (
        f"{config['nodes']} nodes of {n // config['nodes']} ranks, {config['inside_mb_s']:g} MB/s inside and "
        f"{config['across_mb_s']:g} MB/s out of each node, {gradient_bytes(run) / 1e6:.1f} MB to sum."
    )
    fast, slow = (f(took, key=lambda way: took[way].value) for f in (min, max))
    yield f"Fastest is {fast!r} with {took[fast]} per step, slowest {slow!r} with {took[slow]}."
    off, counted = counted_off(run), [r for r in run.where("sent_bytes") if r.kind != "modelled"]
    if counted:
        word = "all are those of the closed form" if not off else f"NOT those of the closed form: {'; '.join(off)}"
        yield f"{len(counted)} counts of bytes by level, by the kernel: {word}."
    order = ranking(run)
    word = "" if not order.contradict else ": " + "; ".join(f"{a} before {b}" for a, b in order.contradict)
    yield (
        f"Of the pairs of ways that the formula sets apart, {order.agree} are in its order, {order.open} cannot be "
        f"told, {len(order.contradict)} are against it{word}."
    )
