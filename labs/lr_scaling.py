"""Does the learning rate follow the batch, and until where?

    python -m labs.lr_scaling                                     # launches its own ranks
    torchrun --nproc-per-node 2 -m labs.lr_scaling --factors 1 8 32 --warm-up-share 0.1 --seeds 5

About 22 s on 2 CPU cores. A perceptron learns Fashion-MNIST with batches of base_batch x factor, all for equally many
epochs, so that a larger batch takes fewer steps. SGD with momentum trains it, or AdamW, with a base rate of its own, in
rules that are called so. Every training is done for every seed; a seed fixes the weights at the start and the order of
the images, so that rules are compared pair by pair. Each rank trains with seeds of its own.
Where time is short there are fewer seeds, then fewer batches: never fewer steps.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from labs.data.fashion import vectors
from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.measure import Budget, Estimate
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

Rule = Literal["same", "linear", "linear, warm-up", "sqrt, warm-up", "AdamW, linear, warm-up", "AdamW, sqrt, warm-up"]
RULES: tuple[Rule, ...] = Rule.__args__
MOST_SEEDS = 64  # however fast the machine is
FEWEST_BATCHES = 3  # however slow it is
GUESS_LOSS = math.log(10)  # nats, of a model that gives each of the ten classes the same probability


@dataclass(frozen=True)
class Config:
    """Batches, rules and trainings."""

    base_batch: int = 32
    """Batch that base_lr was chosen for."""
    base_lr: float = 0.02
    """Learning rate at base_batch: the largest of 0.005 to 0.04 that was as good as any there, over 24 seeds.

    0.04 lost against 0.01: `--factors 1 --rules same --rates 0.25 0.5 2 --adamw-factors 1 --seeds 24`. With smaller
    rates all that breaks breaks at a larger factor.
    """
    adamw_lr: float = 0.002
    """AdamW's learning rate at base_batch: of 0.0005 to 0.008 none was shown to differ from it there, over 8 seeds."""
    factors: tuple[int, ...] = (1, 16, 32, 64)
    """Batches, in multiples of base_batch. They must hold 1, which all others are compared with."""
    rules: tuple[Rule, ...] = RULES
    """How the rate follows the batch: not at all, x factor, x factor after a warm-up, x its root after a warm-up."""
    adamw_factors: tuple[int, ...] = (1, 16, 64)
    """Those of `factors` that AdamW's rules are tried with, for the time it takes; always with 1."""
    warm_up_share: float = 0.5
    """Part of all steps in which the rate rises from base_lr. Goyal et al. took 5 of 90 epochs, 0.06."""
    rates: tuple[float, ...] = (2.0, 4.0, 8.0, 16.0)
    """Further rates that are tried with the largest batch, in multiples of base_lr, without warm-up."""
    momentum: float = 0.9
    """Momentum of SGD."""
    epochs: int = 12
    """Passes over the images, for every batch."""
    samples: int = 8192
    """Images of the training set that are used, the first ones: a multiple of every batch."""
    seconds: float = 24.0
    """Time for all trainings, in s. A slower machine has fewer seeds, but at least 6, which an interval needs.

    Where even these take longer, batches between the smallest and the largest are left out, the small ones first, until
    three are left.
    """
    seeds: int | None = None
    """Trainings of each case, of all batches, whatever they take; by default as many as fit into `seconds`."""
    seed: int = 0
    """The first seed."""
    smoke: bool = False
    """One epoch, two seeds."""

    def __post_init__(self) -> None:
        require(self.base_batch >= 1, f"base_batch must be at least 1, not {self.base_batch}")
        require(0 < self.base_lr < math.inf, f"base_lr must be positive, not {self.base_lr}")
        require(0 < self.adamw_lr < math.inf, f"adamw_lr must be positive, not {self.adamw_lr}")
        require(1 in self.factors and min(self.factors) >= 1, "factors must be positive and hold 1, the reference")
        require(1 in self.adamw_factors, "adamw_factors must hold 1, the reference; leave AdamW's rules out of rules")
        require(len(self.rules) > 0, f"rules must name at least one of: {'; '.join(RULES)}")
        twice = len({*self.factors}) < len(self.factors) or len({*self.rules}) < len(self.rules)
        require(not twice, "factors and rules must be different: each pair is a case of its own")
        require(0 <= self.warm_up_share <= 1, f"warm_up_share must be between 0 and 1, not {self.warm_up_share}")
        require(all(0 < r < math.inf for r in self.rates), f"rates must be positive, not {self.rates}")
        require(0 <= self.momentum < 1, f"momentum must be at least 0 and below 1, not {self.momentum}")
        require(self.epochs >= 1, f"epochs must be at least 1, not {self.epochs}")
        require(1 <= self.samples <= 10_000, f"samples must be between 1 and 10000, not {self.samples}")
        measure.require_budget(self.seconds, None)
        require(self.seeds is None or self.seeds >= 1, f"seeds must be at least 1, not {self.seeds}")
        bad = [b for f in self.factors if self.samples % (b := self.base_batch * f)]
        require(
            not bad, f"samples must be a multiple of every batch (base_batch x factor), not {self.samples} of {bad}"
        )


class Training(NamedTuple):
    """One training; two with the same values are the same training."""

    rule: Rule
    factor: int
    base_lr: float
    seed: int

    @property
    def adamw(self) -> bool:
        """Whether AdamW trains; otherwise SGD with momentum."""
        return self.rule.startswith("AdamW")


def learning_rate(step: int, base_lr: float, factor: float, rule: Rule, warm_up_steps: int) -> float:
    """Rate of optimizer step 0, 1, ... for a batch `factor` times as large as the one that `base_lr` is good for.

    With warm-up it rises on a straight line from base_lr in step 0 to its final value in step `warm_up_steps`.
    Linear scaling and gradual warm-up: Goyal et al. 2017, arXiv:1706.02677, sections 2.1 and 2.2. The square root
    keeps the variance of a step: Krizhevsky 2014, "One weird trick", arXiv:1404.5997. For Adam: Malladi et al. 2022,
    "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", arXiv:2205.10287.
    """
    scale = {"same": 1.0, "linear": factor, "sqrt": math.sqrt(factor)}
    final = base_lr * scale[rule.removeprefix("AdamW, ").removesuffix(", warm-up")]
    if "warm-up" not in rule or step >= warm_up_steps:
        return final
    return base_lr + (final - base_lr) * step / warm_up_steps


def final_rate(config: Config, rule: Rule, factor: int) -> float:
    """The rate that `rule` reaches, after any warm-up."""
    return learning_rate(0, base_rate(config, rule), factor, rule, 0)


def base_rate(config: Config, rule: Rule) -> float:
    """The rate with factor 1 of the optimizer that `rule` is for."""
    return config.adamw_lr if rule.startswith("AdamW") else config.base_lr


def cases(config: Config) -> list[tuple[Rule, int]]:
    """Every rule with every factor that it is tried with, by factor."""
    return [
        (rule, f)
        for f in config.factors
        for rule in config.rules
        if f in config.adamw_factors or not rule.startswith("AdamW")
    ]


def predict(config: Config) -> dict[int, int]:
    """Optimizer steps of a training by factor: equal epochs are not equal steps."""
    return {f: config.epochs * config.samples // (config.base_batch * f) for f in config.factors}


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """All trainings; accuracy, loss and divergence of every rule and batch; which batches there was no time for."""
    config = dataclasses.replace(config, epochs=1, seeds=2) if config.smoke else config
    data = vectors(config.samples, rank.device)
    kept = config.factors if config.seeds else affordable(config, epoch_seconds(config, data, rank), rank.world_size)
    why = f"with it {measure.LEAST_ROUNDS} seeds, the fewest for an interval, would take more than {config.seconds:g} s"
    for factor in sorted({*config.factors} - {*kept}):
        yield rank.record("left_out", "1", 1.0, factor=factor, batch=config.base_batch * factor, why=why)
    config = dataclasses.replace(config, factors=kept)
    results = train_all(config, data, rank)
    for rule, factor in cases(config):
        yield from _by_rule(rule, factor, results, config, rank)
    largest = max(config.factors)
    for lr in _rates(config):
        found = [accuracy for accuracy, _ in _of_seeds(results, Training("same", largest, lr, 0))]
        yield rank.record("accuracy_at_rate", "1", found, factor=largest, batch=config.base_batch * largest, lr=lr)


def epoch_seconds(config: Config, data: tuple[Tensor, ...], rank: Rank) -> dict[int, float]:
    """Seconds of one epoch of the slowest rank, by factor; the same on all ranks."""
    once = dataclasses.replace(config, epochs=1)
    epochs = [functools.partial(train, Training("same", f, config.base_lr, 0), data, once) for f in config.factors]
    measure.time_steps(epochs[-1], 1, rank.device)  # the first optimizer of a process takes its time
    seconds = [s for epoch in epochs for s in measure.time_steps(epoch, 1, rank.device)]
    return dict(zip(config.factors, rank.slowest(seconds), strict=True))


def affordable(config: Config, epoch_s: Mapping[int, float], ranks: int) -> tuple[int, ...]:
    """The factors of `config` with which the fewest seeds that make an interval take no longer than `seconds`.

    Where they still take longer, the smallest, the largest and the one before it are kept: fewer batches show nothing
    of a rule. The small ones between go first: their trainings have the most steps.
    """
    kept, rounds = sorted(config.factors), _rounds(measure.LEAST_ROUNDS, ranks)
    while len(kept) > FEWEST_BATCHES:
        todo = trainings(dataclasses.replace(config, factors=tuple(kept)), config.seed)
        if rounds * config.epochs * sum(epoch_s[t.factor] for t in todo) <= config.seconds:
            break
        del kept[1]
    return tuple(f for f in config.factors if f in kept)


def _rounds(seeds: int, ranks: int) -> int:
    """Rounds until all `seeds` have been taken, when each rank takes one per round."""
    return -(-seeds // ranks)


def train_all(config: Config, data: tuple[Tensor, ...], rank: Rank) -> dict[Training, tuple[float, float]]:
    """Accuracy and loss of every training: each rank takes a seed per round; as many rounds as there is time for."""
    done: dict[Training, tuple[float, float]] = {}
    mine, end = itertools.count(config.seed + rank.rank, rank.world_size), config.seed + (config.seeds or MOST_SEEDS)

    def one_seed() -> None:
        if (seed := next(mine)) < end:
            done.update(
                (training, evaluate(train(training, data, config), data)) for training in trainings(config, seed)
            )

    least, most = (_rounds(seeds, rank.world_size) for seeds in (measure.LEAST_ROUNDS, MOST_SEEDS))
    rounds = (
        _rounds(config.seeds, rank.world_size) if config.seeds else Budget(config.seconds, rank.slowest, least, most)
    )
    measure.interleave(
        {"seed": one_seed},
        rounds,
        rank.device,
        on_round=lambda done, total: rank.progress(done, total, f"{done * rank.world_size} seeds"),
    )
    return {training: result for part in rank.gather(done) for training, result in part.items()}


def _by_rule(rule: Rule, factor: int, results: dict, config: Config, rank: Rank) -> Iterator[Record]:
    """One sample per seed, whatever became of it. With factor 1 all rules of an optimizer share their trainings."""
    found = _of_seeds(results, training_of(rule, factor, config, 0))
    accuracies, losses = zip(*found, strict=True)
    case = {"rule": rule, "factor": factor, "batch": config.base_batch * factor}
    case["lr"] = final_rate(config, rule, factor)
    yield rank.record("test_accuracy", "1", accuracies, **case)
    yield rank.record("train_loss", "nats", losses, **case)
    # Worse than a guess, or so near to it that the weights have died: each happens to rates that are too high.
    yield rank.record("diverged", "runs", sum(loss > 0.99 * GUESS_LOSS for loss in losses), **case)


def _of_seeds(results: dict[Training, tuple[float, float]], like: Training) -> list[tuple[float, float]]:
    """The results of trainings that are `like` this one but for their seed, by seed."""
    return [results[t] for t in sorted(results, key=lambda t: t.seed) if t._replace(seed=like.seed) == like]


def _rates(config: Config) -> list[float]:
    return [config.base_lr * r for r in sorted(set(config.rates))]


def training_of(rule: Rule, factor: int, config: Config, seed: int) -> Training:
    """The training by which `rule` is judged. With factor 1 all rules of an optimizer are one."""
    if factor == 1:
        rule = "AdamW, linear, warm-up" if rule.startswith("AdamW") else "same"
    return Training(rule, factor, base_rate(config, rule), seed)


def trainings(config: Config, seed: int) -> list[Training]:
    """Every different training with one seed, small batches first."""
    found = [training_of(rule, f, config, seed) for rule, f in sorted(cases(config), key=lambda case: case[1])]
    found += [Training("same", max(config.factors), lr, seed) for lr in _rates(config)]
    return list(dict.fromkeys(found))


def train(training: Training, data: tuple[Tensor, ...], config: Config) -> nn.Module:
    """The training loop: the rate is set anew before every step."""
    images, labels = data[:2]
    torch.manual_seed(training.seed)
    model = nn.Sequential(nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model.to(images.device)
    if training.adamw:
        optimizer = torch.optim.AdamW(model.parameters(), lr=training.base_lr, fused=True)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=training.base_lr, momentum=config.momentum, fused=True)
    batch = config.base_batch * training.factor
    warm_up_steps = round(config.warm_up_share * config.epochs * len(images) / batch)
    step = 0
    for _ in range(config.epochs):
        for rows in torch.randperm(len(images)).to(images.device).view(-1, batch):
            lr = learning_rate(step, training.base_lr, training.factor, training.rule, warm_up_steps)
            optimizer.param_groups[0]["lr"] = lr
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
            step += 1
    return model


@torch.no_grad()
def evaluate(model: nn.Module, data: tuple[Tensor, ...]) -> tuple[float, float]:
    """Accuracy on the test images, and loss on the training images in nats, at most that of a guess.

    A model of NaNs is evaluated like any other: it takes the first class for everything, and its loss is that of a
    guess.
    """
    images, labels, test_images, test_labels = data
    accuracy = (model(test_images).argmax(1) == test_labels).double().mean().item()
    loss = nn.functional.cross_entropy(model(images), labels).item()
    return accuracy, min(loss, GUESS_LOSS) if math.isfinite(loss) else GUESS_LOSS


def accuracy(records: Records) -> dict[tuple[Rule, int], Estimate]:
    """Test accuracy by rule and factor."""
    return {_case(r): measure.estimate(r.samples, "1") for r in records.where("test_accuracy")}


def _case(record: Record) -> tuple[Rule, int]:
    return record.case["rule"], record.case["factor"]


def difference(records: Records, a: tuple[Rule, int], b: tuple[Rule, int]) -> Estimate:
    """Test accuracy of the (rule, factor) `a` minus that of `b`, seed by seed."""
    x, y = (records.one("test_accuracy", rule=rule, factor=factor).samples for rule, factor in (a, b))
    return measure.estimate([p - q for p, q in zip(x, y, strict=True)], "1")


def change(records: Records) -> dict[tuple[Rule, int], Estimate]:
    """What each rule and factor adds to the accuracy of its own factor 1, seed by seed; a loss is negative."""
    cases = map(_case, records.where("test_accuracy"))
    return {(rule, factor): difference(records, (rule, factor), (rule, 1)) for rule, factor in cases}


Judgement = Literal["keeps", "loses", "cannot be told"]


def judged(records: Records, rule: Rule, margin: float = 0.01) -> dict[int, Judgement]:
    """For each factor above 1: is it shown to keep all but `margin` of the accuracy, or shown to lose more?

    By the interval of the difference to factor 1, seed by seed. One that holds the margin can tell neither, nor can
    fewer than 6 seeds.
    """
    found = {factor: d for (r, factor), d in sorted(change(records).items()) if r == rule and factor > 1}
    told = {f: "keeps" if d.low >= -margin else "loses" if d.high < -margin else "" for f, d in found.items()}
    return {f: told[f] if told[f] and d.n >= measure.LEAST_ROUNDS else "cannot be told" for f, d in found.items()}


def keeps_until(records: Records, rule: Rule, margin: float = 0.01) -> int:
    """The largest factor up to which all are shown to keep their accuracy; 1 if the first one is not."""
    words = judged(records, rule, margin)
    return max([1, *itertools.takewhile(lambda f: words[f] == "keeps", words)])


def loses_from(records: Records, rule: Rule, margin: float = 0.01) -> int | None:
    """The smallest factor that is shown to lose more than `margin`; None if none is."""
    return min((f for f, word in judged(records, rule, margin).items() if word == "loses"), default=None)


def best_rate(records: Records) -> tuple[float, Estimate]:
    """The best rate of all that were tried with the largest batch, rules included, and its accuracy.

    Chosen by the test images, so it flatters the large batch: if even this one loses, a better rate is no cure.
    """
    best = _best_record(records)
    return best.case["lr"], measure.estimate(best.samples, "1")


def _best_record(records: Records) -> Record:
    largest = max(r.case["factor"] for r in records.where("test_accuracy"))
    tried = records.where("test_accuracy", factor=largest) + records.where("accuracy_at_rate", factor=largest)
    return max(tried, key=lambda r: r.value)


def answer(run: Records) -> Iterator[str]:
    """How far each rule goes, and whether any rate would have saved the largest batch, in sentences."""
    accuracies = run.where("test_accuracy")
    largest, batch = max((r.case["factor"], r.case["batch"]) for r in accuracies)
    base, n = batch // largest, len(accuracies[0].samples)
    for rule in dict.fromkeys(r.case["rule"] for r in accuracies):
        words = judged(run, rule)
        at = {w: ", ".join(str(base * f) for f in words if words[f] == w) for w in Judgement.__args__}
        said = ["keeps all but a point of accuracy at batch " + at["keeps"]] if at["keeps"] else []
        said += ["loses more than a point at " + at["loses"]] if at["loses"] else []
        said += [f"{n} seeds cannot tell at " + at["cannot be told"]] if at["cannot be told"] else []
        if said:
            yield f"Rate {rule}: {'; '.join(said)}."
    best = _best_record(run)
    first = run.one("test_accuracy", rule=accuracies[0].case["rule"], factor=1)
    gained = measure.estimate([100 * (b - a) for a, b in zip(first.samples, best.samples, strict=True)], "points")
    how = best.case.get("rule", "a rate of its own")
    rate = f"{best.case['lr']:g} ({how})"
    yield f"Of all rates tried, batch {batch} does best with {rate}: {gained} of accuracy against batch {base}."
    for record in run.where("left_out"):
        yield f"Not tried: batch {record.case['batch']}, {record.case['why']}."


if __name__ == "__main__":
    cli.main()
