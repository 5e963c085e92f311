"""Does the number format change what is learned?

    python -m labs.amp_training                                   # launches its own ranks
    torchrun --nproc-per-node 2 -m labs.amp_training --seeds 16 --loss-exponents 0 -7 -10 -12 -14

About 20 s on 2 CPU cores. A perceptron learns Fashion-MNIST in every format, for every seed; a seed fixes the weights
at the start and the order of the images, so that formats are compared pair by pair. It does so with the loss as it is
and times 2^-12 and 2^-14, as if it were a small term of a sum of losses: gradients that FP32 holds with
ease, and FP16 does not. Then the sizes of real gradients, and how many FP16 makes 0. Each rank trains with seeds of its
own. Where time is short there are fewer seeds, then fewer factors: never fewer steps.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from labs.amp_training import gradient_sizes
from labs.amp_training.gradient_sizes import Fact
from labs.common import models
from labs.common.data.fashion import vectors
from labs.common.models import Workload
from labs.common.precision import amp
from labs.common.timing import probing
from labs.kit import measure
from labs.kit.errors import require
from labs.kit.measure import Budget, Estimate
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

PERCEPTRON = "perceptron"
MOST_SEEDS = 64  # however fast the machine is
SMOKE = {"samples": 2048, "loss_exponents": (0, -14), "gradient_models": ("fashion_cnn",)}  # with --smoke in a shell


@dataclass(frozen=True)
class Config:
    """Formats, trainings and gradients."""

    formats: tuple[str, ...] = ()
    """Of fp32, tf32, bf16, fp16 and "fp16, no scaling"; by default all that the device has. fp32 is always one."""
    loss_exponents: tuple[int, ...] = (0, -12, -14)
    """The loss is multiplied by 2 to this power, which rounds nothing. Adam's step hardly depends on such a factor.

    As a small weight does where several losses are added.
    """
    loss_scale: float = 65536.0
    """First scale of GradScaler, a power of two; 65536 is its default."""
    lr: float = 0.002
    """Learning rate of Adam."""
    batch: int = 256
    """Images per step."""
    epochs: int = 5
    """Passes over the images."""
    samples: int = 8192
    """Images of the training set that are used, the first ones: a multiple of batch."""
    seconds: float = 20.0
    """Time for all trainings, in s. A slower machine has fewer seeds, but at least 6, which an interval needs.

    Where even these take longer, factors between the first and the last of `loss_exponents` are left out.
    """
    seeds: int | None = None
    """Trainings of each case, with all factors, whatever they take; by default as many as fit into `seconds`."""
    gradient_models: tuple[str, ...] = ("fashion_cnn", "char_gpt")
    """Models whose gradients are looked at, besides the perceptron: of labs.models.MODELS or package.module:factory."""
    gradient_steps: int = 50
    """Steps in FP32 before the gradients are looked at."""
    gradient_rows: int = 32
    """Rows per such step; the perceptron takes `batch`, as in its trainings."""
    seed: int = 0
    """The first seed."""
    smoke: bool = False
    """One epoch, two seeds, five steps before the gradients."""

    def __post_init__(self) -> None:
        unknown = sorted({*self.formats} - {*amp.FORMATS})
        require(not unknown, f"formats may hold {'; '.join(amp.FORMATS)}, not {'; '.join(unknown)}")
        different = 0 < len(exponents := self.loss_exponents) == len({*exponents})
        require(different, f"loss_exponents must be different ones, at least 0 (the loss as it is), not {exponents}")
        require(all(-40 <= e <= 10 for e in exponents), f"loss_exponents must be between -40 and 10, not {exponents}")
        usable = 1 <= self.loss_scale <= 2**24 and math.frexp(self.loss_scale)[0] == 0.5
        require(usable, f"loss_scale must be a power of two from 1 to 2^24, not {self.loss_scale}")
        require(0 < self.lr < math.inf, f"lr must be positive, not {self.lr}")
        measure.require_budget(self.seconds, None)
        require(self.seeds is None or self.seeds >= 1, f"seeds must be at least 1, not {self.seeds}")
        least = {"batch": 1, "epochs": 1, "gradient_steps": 0, "gradient_rows": 1}
        for name, low in least.items():
            require(getattr(self, name) >= low, f"{name} must be at least {low}, not {getattr(self, name)}")
        fits = 1 <= self.samples <= 10_000 and self.samples % self.batch == 0
        require(fits, f"samples must be a multiple of batch between 1 and 10000, not {self.samples}")
        require(len({*self.gradient_models}) == len(self.gradient_models), "gradient_models must be different")
        models.require_known(*self.gradient_models, option="gradient_models")


class Training(NamedTuple):
    """One training."""

    precision: str
    loss_exponent: int
    seed: int


class Outcome(NamedTuple):
    """What became of it. `train_loss` in nats, without its factor; that of a guess, ln(10), if it is not finite."""

    test_accuracy: float
    train_loss: float
    skipped_steps: int


def check_layout(config: Config, world_size: int) -> None:
    """BadInput if a model whose gradients are asked for cannot be built."""
    for name in config.gradient_models:
        models.build(name)


predict = gradient_sizes.flushed_share


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """All trainings and all gradients, shared out over the ranks."""
    if config.smoke:
        config = dataclasses.replace(config, epochs=1, seeds=2, gradient_steps=5)
    names, data = device_formats(config, rank.device), vectors(config.samples, rank.device)
    exponents = config.loss_exponents
    kept = exponents if config.seeds else affordable(config, epoch_seconds(names, data, config, rank), rank.world_size)
    why = f"with it {measure.LEAST_ROUNDS} seeds, the fewest for an interval, would take more than {config.seconds:g} s"
    for exponent in (e for e in exponents if e not in kept):
        yield rank.record("left_out", "1", 1.0, model=PERCEPTRON, loss_exponent=exponent, why=why)
    results = train_all(dataclasses.replace(config, loss_exponents=kept), names, data, rank)
    yield from _training_records(results, rank)
    looked_at = (PERCEPTRON, *config.gradient_models)
    mine = {name: gradient_facts(name, data, config) for name in looked_at[rank.rank :: rank.world_size]}
    facts = {name: found for part in rank.gather(mine) for name, found in part.items()}
    for name in looked_at:
        for fact in facts[name]:
            yield rank.record(fact.metric, fact.unit, fact.samples, kind=fact.kind, model=name, **fact.case)


def device_formats(config: Config, device: torch.device) -> list[str]:
    """The formats to run, fp32 first. BadInput if one that was asked for is not supported by the device."""
    able = [f for f in amp.FORMATS if probing.supported(f.partition(",")[0], device)]
    for name in config.formats:
        require(name in able, f"this {device.type} does not support {name}: take formats of {'; '.join(able)}")
    return [f for f in able if f == "fp32" or f in (config.formats or able)]


def epoch_seconds(names: Sequence[str], data: tuple[Tensor, ...], config: Config, rank: Rank) -> dict[str, float]:
    """Seconds of one epoch of the slowest rank, by format; the same on all ranks."""
    once = dataclasses.replace(config, epochs=1)
    epochs = [functools.partial(train, Training(name, 0, 0), data, once) for name in names]
    measure.time_steps(epochs[0], 1, rank.device)  # the first optimizer of a process takes its time
    seconds = [s for epoch in epochs for s in measure.time_steps(epoch, 1, rank.device)]
    return dict(zip(names, rank.slowest(seconds), strict=True))


def affordable(config: Config, epoch_s: Mapping[str, float], ranks: int) -> tuple[int, ...]:
    """The loss_exponents with which the fewest seeds that make an interval take no longer than `seconds`.

    The first and the last are always kept: the loss as it is, usually, and where FP16 loses most.
    """
    kept, rounds = list(config.loss_exponents), -(-measure.LEAST_ROUNDS // ranks)
    while len(kept) > 2 and rounds * config.epochs * len(kept) * sum(epoch_s.values()) > config.seconds:
        del kept[1]
    return tuple(kept)


def train_all(config: Config, names: Sequence[str], data: tuple[Tensor, ...], rank: Rank) -> dict[Training, Outcome]:
    """Every training, by format, factor and seed: each rank takes a seed per round, rounds as there is time for."""
    done: dict[Training, Outcome] = {}
    mine, end = itertools.count(config.seed + rank.rank, rank.world_size), config.seed + (config.seeds or MOST_SEEDS)

    def one_seed() -> None:
        if (seed := next(mine)) < end:
            done.update((t, train(t, data, config)) for t in trainings(config, names, seed))

    least, most = (-(-seeds // rank.world_size) for seeds in (measure.LEAST_ROUNDS, config.seeds or MOST_SEEDS))
    measure.interleave(
        {"seed": one_seed},
        most if config.seeds else Budget(config.seconds, rank.slowest, least, most),
        rank.device,
        on_round=lambda done, total: rank.progress(done, total, f"{done * rank.world_size} seeds"),
    )
    found = {t: outcome for part in rank.gather(done) for t, outcome in part.items()}
    return dict(sorted(found.items(), key=lambda item: item[0].seed))


def trainings(config: Config, names: Sequence[str], seed: int) -> list[Training]:
    """Every training with one seed, factor by factor."""
    return [Training(f, e, seed) for e in config.loss_exponents for f in names]


def train(training: Training, data: tuple[Tensor, ...], config: Config) -> Outcome:
    """Train a perceptron by amp.bf16_step, amp.fp16_step or, in FP32, amp.train_step; it is judged in FP32."""
    images, labels, test_images, test_labels = data
    torch.manual_seed(training.seed)
    model = perceptron().to(images.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    scaler = amp.scaler(training.precision, images.device, init_scale=config.loss_scale)
    name, factor, skipped = training.precision, 2.0**training.loss_exponent, 0
    for _ in range(config.epochs):
        for rows in torch.randperm(len(images)).to(images.device).view(-1, config.batch):
            scale = scaler.get_scale()
            batch = images[rows], labels[rows]
            amp.whole_batch_step(name, model, lambda out, y: cross_entropy(out, y) * factor, batch, optimizer, scaler)
            skipped += scaler.get_scale() < scale
    with torch.no_grad(), amp.precision("fp32", images.device):
        accuracy = (model(test_images).argmax(1) == test_labels).double().mean().item()
        last = cross_entropy(model(images), labels).item()
    return Outcome(accuracy, last if math.isfinite(last) else math.log(10), skipped)


def perceptron() -> nn.Module:
    """196-64-64-10, 17,418 parameters."""
    return nn.Sequential(nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def gradient_facts(name: str, data: tuple[Tensor, ...], config: Config) -> list[Fact]:
    """What is to be recorded of the gradients of a model; of the perceptron also with the loss times each factor."""
    own = name == PERCEPTRON
    workload = _perceptron_workload(data, config.seed) if own else models.make(name, config.seed)
    rows, factors = (config.batch, config.loss_exponents) if own else (config.gradient_rows, ())
    scales = tuple(dict.fromkeys(2.0**e * s for s in (1.0, config.loss_scale) for e in (0, *factors)))
    batch = gradient_sizes.trained(workload, rows, config.gradient_steps, data[0].device)
    if why := amp.impossible(workload.module, workload.loss, batch, "fp16"):
        return [Fact("not_possible", "1", 1.0, "measured", {"precision": "fp16", "why": why})]
    return list(gradient_sizes.facts(workload, batch, scales))


def _perceptron_workload(data: tuple[Tensor, ...], seed: int) -> Workload:
    torch.manual_seed(seed)
    images, labels = (t.cpu() for t in data[:2])

    def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(images), (batch_size,))
        return images[rows], labels[rows]

    return Workload(perceptron(), make_batch, cross_entropy)


def _training_records(results: dict[Training, Outcome], rank: Rank) -> Iterator[Record]:
    """One sample per seed."""
    for name, exponent in dict.fromkeys((t.precision, t.loss_exponent) for t in results):
        outcomes = [o for t, o in results.items() if (t.precision, t.loss_exponent) == (name, exponent)]
        case = {"model": PERCEPTRON, "precision": name, "loss_exponent": exponent}
        for metric, unit in (("test_accuracy", "1"), ("train_loss", "nats"), ("skipped_steps", "steps")):
            yield rank.record(metric, unit, [getattr(o, metric) for o in outcomes], **case)


def accuracy(records: Records) -> dict[tuple[str, int], Estimate]:
    """Test accuracy by (precision, loss_exponent)."""
    found = {(r.case["precision"], r.case["loss_exponent"]): r.samples for r in records.where("test_accuracy")}
    return {case: measure.estimate(samples, "1") for case, samples in found.items()}


def against_fp32(records: Records) -> dict[tuple[str, int], Estimate]:
    """Test accuracy minus that of FP32 with the same factor, seed by seed, by (precision, loss_exponent).

    The intervals are meant to hold all together: each has the level 1 - 0.05 / (how many there are), as of 9 intervals
    of 95 % one would miss by luck in every third run (Bonferroni). None reaches beyond the extremes of its samples,
    so that 8 seeds make that 1 - 9 x 2^-7, or 93 %; 10 make it 98 %.
    """
    others, found = [r for r in records.where("test_accuracy") if r.case["precision"] != "fp32"], {}
    level = 1 - (1 - measure.LEVEL) / max(1, len(others))
    for r in others:
        case = r.case["precision"], r.case["loss_exponent"]
        found[case] = measure.estimate(changes(records, *case), "1", level=level)
    return found


def changes(records: Records, precision: str, loss_exponent: int) -> list[float]:
    """Test accuracy minus that of FP32 with the same factor, seed by seed."""
    lowered, exact = (
        records.one("test_accuracy", precision=p, loss_exponent=loss_exponent).samples for p in (precision, "fp32")
    )
    return [a - b for a, b in zip(lowered, exact, strict=True)]


def seed_spread(records: Records, loss_exponent: int = 0) -> float:
    """Largest minus smallest test accuracy of FP32 over the seeds: what one run alone cannot tell apart."""
    samples = records.one("test_accuracy", precision="fp32", loss_exponent=loss_exponent).samples
    return max(samples) - min(samples)


def verdicts(records: Records) -> list[str]:
    """By format and factor, whether its accuracy can be told from that of FP32."""
    found = []
    for (precision, exponent), change in against_fp32(records).items():
        points = f"{100 * change.value:+.1f} points of accuracy [{100 * change.low:+.1f}, {100 * change.high:+.1f}]"
        text = points if told_apart(change) else f"not distinguishable from FP32: {points}"
        found.append(f"{precision}, loss x 2^{exponent}: {text}")
    return found


def told_apart(change: Estimate) -> bool:
    """Whether a difference of accuracy is one: fewer than LEAST_ROUNDS seeds make no interval that could say so."""
    return change.n >= measure.LEAST_ROUNDS and measure.differs(change, 0.0)


def answer(run: Records) -> Iterator[str]:
    """Each format's accuracy against FP32's seed by seed, what seeds alone do, and what FP16 makes 0."""
    exact = run.where("test_accuracy", precision="fp32")[0]
    n, spread = len(exact.samples), 100 * seed_spread(run, exact.case["loss_exponent"])
    few = f" Fewer than {measure.LEAST_ROUNDS} seeds can tell no formats apart." if n < measure.LEAST_ROUNDS else ""
    yield f"{n} seeds: between the best and the worst, FP32 itself differs by {spread:.1f} points of accuracy.{few}"
    found = against_fp32(run)
    same = {case: change for case, change in found.items() if not told_apart(change)}
    if same:
        most = 100 * max(max(-c.low, c.high) for c in same.values())
        names = ", ".join(f"{name} (loss x 2^{exponent})" for name, exponent in same)
        yield f"Not distinguishable from FP32, to {most:.1f} points or less: {names}."
    for line in (line for line in verdicts(run) if "not distinguishable" not in line):
        yield f"Another accuracy than FP32's, seed by seed: {line}."
    for r in run.where("zero_share", of="activations", precision="fp16", scale=1.0):
        case = {"model": r.case["model"], "of": "activations"}
        scales = [s.case["scale"] for s in run.where("zero_share", precision="fp16", **case)]
        scaled = run.one("zero_share", precision="fp16", scale=max(scales), **case).value
        zero = run.one("zero_share", precision="fp32", scale=1.0, **case).value
        yield (
            f"{r.case['model']}, gradients of activations that are 0: {zero:.2%} in FP32, {r.value:.2%} in FP16, "
            f"{scaled:.2%} with a scale of {max(scales):,.0f}."
        )
    for r in run.where("left_out"):
        yield f"Loss x 2^{r.case['loss_exponent']} was left out: {r.case['why']}."
