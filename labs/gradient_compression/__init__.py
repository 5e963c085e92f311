"""Does sending fewer bytes make training faster, and does the model learn as well?

    python -m labs.gradient_compression                         # launches its own ranks
    python -m labs.gradient_compression --ways fp32 fp16 powersgd_4 --mb-s 400 100 25 --seconds 60
    python -m labs.gradient_compression --ways fp32 fp16 powersgd_4 --mb-s 100 --hidden 512 256 --train-mb-s 100
        --accuracy-seconds 60                                   # one training: how fast, and what it has learned
    python -m labs.gradient_compression --model labs.common.data_parallel.training:many_layers --bucket-cap-mb 0.25
        --batch-size 16 --ways fp32 fp16 --mb-s 200 50 25 10 --seconds 60 --accuracy-seconds 0    # 16 bits can lose
    torchrun --nproc-per-node 2 -m labs.gradient_compression

About 20 s on 2 CPU cores. Every way to send gradients is one communication hook of DDP.
  bytes      what each rank wrote to the wire in a step, against a closed form
  time       a training step with each way, in turn, at each bandwidth of a paced wire
  break-even from the fastest and the slowest wire the bandwidth is predicted below which a way gains; then the wire is
             set to 1 / 1.5 and to 1.5 times of it: a way that gains at the one and loses at the other breaks even there
  accuracy   the same training on Fashion-MNIST with each way, from the same seeds; with --train-mb-s over a paced wire,
             and timed
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labs.common import models
from labs.common.communication import wire
from labs.common.communication.wire import NO_PACE
from labs.common.data import fashion_mnist
from labs.common.data_parallel.scaling import ring_all_reduce_bytes
from labs.common.data_parallel.training import train_step
from labs.common.data_parallel.wire import sent_by
from labs.common.sharding.link import timed
from labs.gradient_compression import compression
from labs.gradient_compression.compression import WAYS, wrapped
from labs.kit import measure
from labs.kit.errors import naming, require
from labs.kit.measure import Budget
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

PLAIN = "fp32"
AROUND = (1 / 1.5, 1.5)
"""A predicted break-even bandwidth is tried at these multiples of it: between them it is right within a factor 1.5."""
HELD_OUT_ROWS = 2000
TRAINED_ROWS = 4096
NEVER = 1e5
"""MB/s: a predicted break-even beyond it is none that anybody can try."""
LEAST_SEEDS, MOST_SEEDS = 6, 20


@dataclass(frozen=True)
class Config:
    """Which ways, over which wires, for how long."""

    ways: tuple[str, ...] = ("fp32", "fp16", "bf16", "powersgd_1", "powersgd_4", "top_1%")
    """Ways to send gradients, of labs.gradient_compression.compression.WAYS; fp32 is DDP as it is."""
    break_even: tuple[str, ...] = ("fp16", "powersgd_4", "top_1%")
    """Those of them whose predicted break-even bandwidth is tried."""
    model: str = "mlp"
    """Model of the timed steps: one of labs.models.MODELS, or package.module:factory."""
    batch_size: int = 64
    """Samples per rank of the timed steps."""
    bucket_cap_mb: float = 25.0
    """Size of DDP's gradient buckets in MiB, in a timed step of the ways that may have several."""
    mb_s: tuple[float, ...] = (200.0, 100.0, 50.0, 25.0)
    """Bandwidths of the wire in each direction, in 10^6 byte/s, besides the wire as it is."""
    seconds: float = 8.0
    """Time for the timed steps, in s. A slower machine takes fewer rounds and has wider intervals."""
    rounds: int | None = None
    """Rounds at each bandwidth; by default as many as fit into `seconds`, at least 6."""
    accuracy_seconds: float = 9.0
    """Time for the trainings, in s: as many seeds as fit, at least 6; 0 leaves them out."""
    epochs: int = 2
    """Passes over the images in a training."""
    hidden: tuple[int, ...] = (128,)
    """Widths of the hidden layers of the perceptron that is trained; 512 256 has those of the articles' MLP."""
    train_mb_s: float | None = None
    """Bandwidth of the wire of these trainings, in 10^6 byte/s, which are then timed; by default the wire as it is."""
    lr: float = 0.1
    """Learning rate of SGD with momentum 0.9 in a training."""
    seed: int = 0
    """The first seed."""
    smoke: bool = False
    """Two ways are timed and trained, at one bandwidth, with two seeds, in few steps."""

    def __post_init__(self) -> None:
        with naming("ways"):
            for name in self.ways:
                compression.require_way(name)
        require(
            PLAIN in self.ways and len(set(self.ways)) == len(self.ways) >= 2,
            f"ways must hold 'fp32', to compare with, and others, each once, not {self.ways}",
        )
        with naming("break_even"):
            for name in self.break_even:
                compression.require_way(name)
        require(self.bucket_cap_mb > 0, f"bucket_cap_mb must be positive, not {self.bucket_cap_mb}")
        require(all(width >= 1 for width in self.hidden), f"hidden must be widths of at least 1, not {self.hidden}")
        require(self.batch_size >= 1, f"batch_size must be at least 1, not {self.batch_size}")
        with naming("mb_s"):
            wire.require_rates(self.mb_s)
        if self.train_mb_s is not None:
            with naming("train_mb_s"):
                wire.require_rates((self.train_mb_s,))
        measure.require_budget(self.seconds, self.rounds)
        require(self.accuracy_seconds >= 0, f"accuracy_seconds must not be negative, not {self.accuracy_seconds}")
        require(self.epochs >= 1, f"epochs must be at least 1, not {self.epochs}")
        require(self.lr > 0, f"lr must be positive, not {self.lr}")
        models.require_known(self.model)


def check_layout(config: Config, world_size: int) -> None:
    """BadInput for one rank."""
    wire.require_wire(world_size)


@dataclass(frozen=True)
class Crossing:
    """Where a way of fewer bytes begins to gain: step = fixed_s + bytes / bandwidth, for both ways."""

    fixed_s: float
    """What the way costs more, wherever the wire is fast: compressing, or overlap that is lost."""
    saved_bytes: float

    @property
    def b_s(self) -> float:
        """Bandwidth in byte/s below which the way gains; inf if it costs nothing, 0 if it saves nothing."""
        if self.saved_bytes <= 0:
            return 0.0
        return self.saved_bytes / self.fixed_s if self.fixed_s > 0 else float("inf")


def predict(fast: tuple[float, float], slow: tuple[float, float]) -> Crossing:
    """The crossing from two wires: each (1 / bandwidth in s/byte, seconds that the way takes more than fp32).

    A straight line in 1 / bandwidth goes through both: its slope is the bytes that are saved, its height at an
    infinitely fast wire what the way costs.
    """
    (x0, more0), (x1, more1) = fast, slow
    slope = (more1 - more0) / (x1 - x0)
    return Crossing(more0 - slope * x0, -slope)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Bytes of every way, their times over every wire, break-even bandwidths, accuracy."""
    wire.require_tcp(rank)
    yield from wire.how(rank)
    ways = _possible(config.ways, rank)
    for name, why in ways.items():
        if why:
            yield rank.record("left_out", "1", 1.0, way=name, why=why)
    steps = {name: training_step(name, config, rank) for name, why in ways.items() if not why}
    yield from step_bytes(steps, config, rank)
    yield from facts(config, rank)
    timed = dict(list(steps.items())[: 2 if config.smoke else None])
    yield from step_times(timed, config, rank)
    if config.accuracy_seconds:
        yield from accuracies(list(timed), config, rank)


def _possible(names: tuple[str, ...], rank: Rank) -> dict[str, str]:
    """Of each way, why it cannot be used here, "" if it can: not every gloo adds bfloat16."""
    found = {}
    for name in names:
        try:
            ddp = wrapped(nn.Linear(2, 2), name)
            ddp(torch.ones(1, 2)).sum().backward()
            why = ""
        except (RuntimeError, TypeError) as e:
            why = str(e).strip().splitlines()[0]
        found[name] = next((w for w in rank.gather(why) if w), "")
    return found


def training_step(name: str, config: Config, rank: Rank) -> Callable[[], object]:
    """A DDP training step that sends its gradients in the way `name`: the hook sits in `ddp`, no line changes."""
    workload = models.build(config.model, config.seed)
    ddp = wrapped(workload.module, name, config.bucket_cap_mb)
    x, y = workload.make_batch(config.batch_size)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    return partial(train_step, ddp, optimizer, x, y, workload.loss)


def step_bytes(steps: dict[str, Callable], config: Config, rank: Rank) -> Iterator[Record]:
    """Bytes that a rank writes to its TCP connections in a step, and by closed form.

    After four steps: DDP has rearranged its buckets, PowerSGD has begun to compress.
    """
    parameters = list(models.build(config.model, config.seed).module.parameters())
    for name, step in steps.items():
        for _ in range(4):
            step()
        if (sent := sent_by(step, rank)) is not None:
            yield rank.record("sent_bytes", "B", sent, way=name)
        modelled = WAYS[name].sent_bytes(parameters, rank.world_size)
        yield rank.record("sent_bytes", "B", modelled, kind="modelled", way=name)


def facts(config: Config, rank: Rank) -> Iterator[Record]:
    """What two of the articles' recipes send: DDP under autocast, and an interface that one of them names."""
    workload = models.build(config.model, config.seed)
    ddp = DistributedDataParallel(workload.module)
    x, y = workload.make_batch(config.batch_size)

    def under_autocast() -> None:
        with torch.autocast(rank.device.type, torch.bfloat16):
            value = workload.loss(ddp(x), y)
        value.backward()

    under_autocast()  # from the second step on, DDP has rearranged its buckets
    if (sent := sent_by(under_autocast, rank)) is not None:
        yield rank.record("autocast_sent_bytes", "B", sent)
    there = hasattr(torch.distributed.nn, "init_distributed_optimizer") if hasattr(torch.distributed, "nn") else False
    yield rank.record("interface_exists", "1", float(there), name="torch.distributed.nn.init_distributed_optimizer")


def step_times(steps: dict[str, Callable], config: Config, rank: Rank) -> Iterator[Record]:
    """Seconds of a step of every way at every bandwidth; then around those that are predicted to be break-even ones."""
    wires = [NO_PACE, *sorted(config.mb_s, reverse=True)[: 1 if config.smoke else None]]
    tried = [name for name in steps if name in config.break_even]
    parts = len(wires) + len(AROUND) * len(tried)  # equal parts of the time
    yield rank.record("reached_mb_s", "MB/s", reached_mb_s(config, rank))
    medians: dict[float, dict[str, float]] = {}
    for done, mb_s in enumerate(wires, start=1):
        seconds = wire.in_turn(steps, config, rank, 1 / parts, mb_s)
        medians[mb_s] = {name: statistics.median(samples) for name, samples in seconds.items()}
        for name, samples in seconds.items():
            yield rank.record("step_s", "s", samples, way=name, mb_s=mb_s)
        rank.progress(done, len(wires), f"{mb_s:g} MB/s" if mb_s else "the wire as it is")
    if len(wires) < 3:
        return
    fast, slow = wires[1], wires[-1]
    for name in tried:
        more = {w: medians[w][name] - medians[w][PLAIN] for w in (fast, slow)}
        crossing = predict((1e-6 / fast, more[fast]), (1e-6 / slow, more[slow])).b_s / 1e6
        yield rank.record("break_even_mb_s", "MB/s", min(crossing, 1e9), kind="modelled", way=name)
        for times in AROUND:
            if wire.LEAST_B_S / 1e6 <= crossing * times <= NEVER:  # also where the wire itself is slower: it tells
                pair = {PLAIN: steps[PLAIN], name: steps[name]}
                for way, samples in wire.in_turn(pair, config, rank, 1 / parts, crossing * times).items():
                    yield rank.record(
                        "tried_step_s", "s", samples, way=way, beside=name, times=times, mb_s=crossing * times
                    )


def reached_mb_s(config: Config, rank: Rank) -> float:
    """What an all-reduce of the gradients reaches over the wire as it is, in 10^6 byte/s: no wire here is faster."""
    size = models.gradient_bytes(models.build(config.model, config.seed).module)
    seconds = statistics.median(timed(partial(dist.all_reduce, torch.zeros(size // 4)), 12, rank))
    return ring_all_reduce_bytes(size, rank.world_size) / seconds / 1e6


def accuracies(names: list[str], config: Config, rank: Rank) -> Iterator[Record]:
    """Accuracy on held-out images after the same training with every way, seed by seed; its seconds if a wire is set.

    Ways take turns within a seed, so that a slow spell of the machine hits all of them.
    """
    data = fashion_images()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    seeds = itertools.count(config.seed)

    def one_seed() -> None:
        seed = next(seeds)
        for name in names:
            found[name].append(trained(name, seed, data, config, rank))

    rounds = 2 if config.smoke else Budget(config.accuracy_seconds, rank.slowest, LEAST_SEEDS, MOST_SEEDS)
    with wire.slowed(rank, config.train_mb_s or NO_PACE):
        measure.interleave(
            {"seed": one_seed},
            rounds,
            rank.device,
            on_round=lambda done, total: rank.progress(done, total, f"{done} seeds"),
        )
    for name, of_seeds in found.items():
        shares, seconds = zip(*of_seeds, strict=True)
        yield rank.record("accuracy", "1", shares, way=name)
        if config.train_mb_s is not None:
            yield rank.record("train_s", "s", rank.slowest(seconds), way=name, mb_s=config.train_mb_s)


def fashion_images() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (N, 784), labels (N,) to train with, and the same to test with."""
    data = fashion_mnist()
    x = torch.from_numpy(data.x_train[:TRAINED_ROWS]).flatten(1).float().div(255).sub(0.286).div(0.353)
    held_out = torch.from_numpy(data.x_test[:HELD_OUT_ROWS]).flatten(1).float().div(255).sub(0.286).div(0.353)
    y, held_out_y = data.y_train[:TRAINED_ROWS], data.y_test[:HELD_OUT_ROWS]
    return x, torch.from_numpy(y).long(), held_out, torch.from_numpy(held_out_y).long()


def trained(name: str, seed: int, data: tuple[Tensor, ...], config: Config, rank: Rank) -> tuple[float, float]:
    """(accuracy of a perceptron that all ranks trained together, seconds of its steps on this rank).

    The accuracy is the same on all ranks. Making the model and testing it are outside of the clock.
    """
    images, labels, test_images, test_labels = data
    torch.manual_seed(seed)
    ddp: DistributedDataParallel = wrapped(perceptron(784, *config.hidden, 10), name)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=config.lr, momentum=0.9)
    rows = config.batch_size * rank.world_size
    rank.barrier()  # all ranks start together
    start = time.perf_counter()
    for _ in range(1 if config.smoke else config.epochs):
        order = torch.randperm(len(images))  # the same on all ranks: they have drawn equally often since the seed
        for all_rows in order[: len(images) // rows * rows].view(-1, rows)[: 3 if config.smoke else None]:
            mine = all_rows[rank.rank :: rank.world_size]
            train_step(ddp, optimizer, images[mine], labels[mine], nn.functional.cross_entropy)
    seconds = time.perf_counter() - start  # require_tcp: ranks are CPU cores, which have nothing left to do
    with torch.no_grad():
        return (ddp.module(test_images).argmax(1) == test_labels).double().mean().item(), seconds


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers from each width to the next, with ReLU between them."""
    layers = [layer for n, m in pairwise(widths) for layer in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def gains(run: Records) -> dict[str, dict[float, measure.Estimate]]:
    """{way: {bandwidth in MB/s: step of FP32 over step of the way, round by round}}."""
    found: dict[str, dict[float, measure.Estimate]] = {}
    for record in run.where("step_s"):
        way, mb_s = record.case["way"], record.case["mb_s"]
        if way != PLAIN:
            plain = run.one("step_s", way=PLAIN, mb_s=mb_s)
            found.setdefault(way, {})[mb_s] = measure.paired_ratio(plain.samples, record.samples)
    return found


@dataclass(frozen=True)
class Tried:
    """A break-even bandwidth, predicted from two wires, and what the wires around it showed. All in MB/s."""

    predicted: float
    gains_at: tuple[float, ...]
    """Where the way was surely faster than FP32."""
    loses_at: tuple[float, ...]
    """Where it was surely slower."""
    reached: float = float("inf")
    """What the wire reaches as it is: setting it to more changes nothing."""

    @property
    def found(self) -> tuple[float, float] | None:
        """The break-even bandwidth lies between these two; None where the wires that were tried cannot tell."""
        if not self.gains_at or not self.loses_at or max(self.gains_at) >= min(self.loses_at):
            return None
        return max(self.gains_at), min(self.loses_at)

    @property
    def off(self) -> float | None:
        """The prediction is off by this factor at most, since the bandwidth lies between the two of `found`."""
        return max(self.predicted / self.found[0], self.found[1] / self.predicted) if self.found else None


def crossings(run: Records) -> dict[str, Tried]:
    """{way: its break-even bandwidth, predicted and tried}. Every wire of the run counts, not only those around it."""
    found = {}
    sweep = gains(run)
    for record in run.where("break_even_mb_s"):
        way = record.case["way"]
        ratios = {mb_s: e for mb_s, e in sweep[way].items() if mb_s != NO_PACE}
        tried = run.where("tried_step_s", beside=way)
        for mine in tried.where(way=way):
            plain = tried.one("tried_step_s", way=PLAIN, times=mine.case["times"])
            ratios[mine.case["mb_s"]] = measure.paired_ratio(plain.samples, mine.samples)
        wins = tuple(sorted(mb_s for mb_s, e in ratios.items() if e.low > 1))
        loses = tuple(sorted(mb_s for mb_s, e in ratios.items() if e.high < 1))
        reached = run.where("reached_mb_s")
        found[way] = Tried(record.value, wins, loses, reached[0].value if reached else float("inf"))
    return found


def losses(run: Records) -> dict[str, measure.Estimate]:
    """{way: accuracy against FP32 in percentage points, seed by seed}."""
    plain = run.one("accuracy", way=PLAIN).samples
    return {
        r.case["way"]: measure.estimate([100 * (a - b) for a, b in zip(r.samples, plain, strict=True)], "points")
        for r in run.where("accuracy")
        if r.case["way"] != PLAIN
    }


def trainings(run: Records) -> dict[str, measure.Estimate]:
    """{way: seconds of the same training with FP32 over those with the way, seed by seed}; empty if none was timed."""
    return {
        r.case["way"]: measure.paired_ratio(run.one("train_s", way=PLAIN).samples, r.samples)
        for r in run.where("train_s")
        if r.case["way"] != PLAIN
    }


CHOICE_MB_S = 100.0
"""A wire a little slower than gigabit Ethernet, at which a way is chosen."""


def choice_text(run: Records, mb_s: float) -> str:
    """Which way to take at `mb_s`."""
    found = chosen(run, mb_s)
    if found is None:
        return f"At {mb_s:g} MB/s no way is surely faster than DDP as it is without learning less."
    way, ratio = found
    own = run.one("step_s", way=way, mb_s=mb_s).samples
    rivals = [
        r
        for r in _not_worse(run, mb_s)
        if r != way and measure.paired_ratio(run.one("step_s", way=r, mb_s=mb_s).samples, own).low <= 1
    ]
    told = ""
    if rivals:
        told = f" It is not shown to be faster than {', '.join(rivals)}: of ways not told apart take the simplest."
    return (
        f"At {mb_s:g} MB/s {way} has the best median: {ratio} as fast as DDP as it is, no loss of accuracy shown.{told}"
    )


def trained_text(run: Records) -> str:
    """Which way trained fastest among those that are not shown to learn less. BadInput if no training was timed."""
    plain, lost = run.one("train_s", way=PLAIN), losses(run)
    widths = "-".join(map(str, (784, *run[0].config["hidden"], 10)))
    what = f"Trainings of the perceptron {widths} at {plain.case['mb_s']:g} MB/s, {len(plain.samples)} seeds:"
    gained = {way: e for way, e in trainings(run).items() if e.low > 1 and lost[way].high >= 0}
    if not gained:
        return f"{what} no way is surely faster than DDP as it is without learning less."
    way, ratio = max(gained.items(), key=lambda item: item[1].value)
    return f"{what} {way} is {ratio} as fast as DDP as it is; its accuracy differs by {lost[way]}."


def _wires(mb_s: tuple[float, ...]) -> str:
    return f"{', '.join(f'{m:.0f}' for m in mb_s)} MB/s"


def tried_text(tried: Tried) -> str:
    """The break-even bandwidth in words."""
    if tried.predicted <= 0:
        but = f"; but it did at {_wires(tried.gains_at)}" if tried.gains_at else ""
        return f"by the straight line it never gains{but}"
    if tried.predicted >= NEVER:
        surely = f"it surely did at {_wires(tried.gains_at)}" if tried.gains_at else "it surely did nowhere"
        but = f", it lost at {_wires(tried.loses_at)}" if tried.loses_at else ""
        return f"by the straight line it gains on every wire; {surely}{but}"
    beyond = f", more than this wire reaches as it is ({tried.reached:.0f})" if tried.predicted > tried.reached else ""
    if tried.found is None:
        surely = f"; it surely gains at {_wires(tried.gains_at)}" if beyond and tried.gains_at else ""
        return (
            f"break-even predicted at {tried.predicted:.0f} MB/s{beyond}{surely}; the wires that were tried cannot "
            "tell where it is"
        )
    low, high = tried.found
    return (
        f"break-even predicted at {tried.predicted:.0f} MB/s{beyond}, found between {low:.0f} and {high:.0f}: "
        f"a factor of {tried.off:.2g} away at most"
    )


def chosen(run: Records, mb_s: float) -> tuple[str, measure.Estimate] | None:
    """(the fastest way at `mb_s` that is not shown to learn less, step of DDP as it is over its step), or None.

    None if no way is surely faster, or nothing was trained.
    """
    found = {way: gain for way, gain in _not_worse(run, mb_s).items() if gain.low > 1}
    return max(found.items(), key=lambda item: item[1].value) if found else None


def _not_worse(run: Records, mb_s: float) -> dict[str, measure.Estimate]:
    """Gain at `mb_s` of each way that is not shown to learn less; of none if nothing was trained."""
    less = {way for way, e in losses(run).items() if e.high < 0} if run.where("accuracy") else set(WAYS)
    return {way: by[mb_s] for way, by in gains(run).items() if way not in less}


def answer(run: Records) -> Iterator[str]:
    """Below which bandwidth each way gains, and whether it learns as well."""
    yield from wire.label(run)
    for record in run.where("left_out"):
        yield f"{record.case['way']} is not possible here: {record.case['why']}"
    slowest = min(mb_s for by in gains(run).values() for mb_s in by if mb_s != NO_PACE)
    for way, by in gains(run).items():
        tried = crossings(run).get(way)
        more = f"; {tried_text(tried)}" if tried else ""
        yield f"{way}: a step is {by[slowest]} as fast as with FP32 at {slowest:g} MB/s{more}."
    worse = [f"{way} {e}" for way, e in (losses(run) if run.where("accuracy") else {}).items() if e.high < 0]
    if worse:
        yield f"Accuracy that is lost against FP32: {', '.join(worse)}."
    if run.where("train_s"):
        yield trained_text(run)
    elif run.where("accuracy") and run.where("step_s", mb_s=CHOICE_MB_S):
        yield choice_text(run, CHOICE_MB_S)
