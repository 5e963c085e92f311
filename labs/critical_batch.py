"""How large a batch still saves time, and when does it only cost samples?

    python -m labs.critical_batch                                  # launches its own ranks
    torchrun --nproc-per-node 2 -m labs.critical_batch --batches 16 64 256 1024 --target 0.5

About 14 s on 2 CPU cores. Time to a loss = steps until it is reached x time of a step, so a batch is judged by both:
  steps    a perceptron learns Fashion-MNIST with SGD, with every batch at a rate that was searched for it
  step_s   one step of one rank, and of all ranks with DDP that share the same batch
  noise    the gradient noise scale, from the norms that data parallel ranks have anyway, and from single samples
McCandlish, Kaplan, Amodei et al. 2018, "An Empirical Model of Large-Batch Training", arXiv:1812.06162.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.parallel import DistributedDataParallel

from labs.data.fashion import vectors
from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.measure import Budget, Estimate
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

IMAGES = 8192  # of the training set
JUDGED = 1000  # images that no training sees; the loss on them says when a training is done
MOST_SEEDS = 64  # however fast the machine is
SEARCH_SEED = 10_000  # of the search for rates: none of those that are reported
NOISE_BATCH = 64  # of the training along which the noise scale is estimated
MOMENTS = (0.0, 0.1, 0.25, 0.5, 1.0)  # of its steps, at which it is
MICRO = 4  # micro-batches of MICRO_ROWS per rank: together they are the large batch
MICRO_ROWS = 16
DRAWS = 24  # large batches at each moment
REACH = 100  # times the largest batch, our round number: of a critical batch beyond it the run has seen nothing
SMOKE = {"batches": (32, 128, 512), "target": 1.2}  # with --smoke in a shell


@dataclass(frozen=True)
class Config:
    """Batches, rates and the loss to reach."""

    batches: tuple[int, ...] = (8, 16, 32, 64, 128, 512, 2048)
    """Samples per step, over all ranks."""
    rates: tuple[float, ...] = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
    """Learning rates to choose from, for every batch the one that needs fewest steps; in rising order."""
    target: float = 0.6
    """Loss in nats on 1,000 held-out images at which a training is done. A guess has 2.3."""
    most_steps: int = 6000
    """A training that has not reached the target by then has missed it."""
    seconds: float = 5.0
    """Time for the seeds, in s, after the search for rates. A slower machine has fewer seeds, but at least 6."""
    seeds: int | None = None
    """Trainings with each batch, whatever they take; by default as many as fit into `seconds`."""
    seed: int = 0
    """The first seed."""
    smoke: bool = False
    """Three batches, two seeds, no search but between two rates."""

    def __post_init__(self) -> None:
        require(len(self.batches) >= 3, f"batches must hold at least 3: two numbers are fitted, not {self.batches}")
        require(len({*self.batches}) == len(self.batches), "batches must be different: each is a point of the curve")
        require(
            all(1 <= b <= IMAGES for b in self.batches), f"batches must be between 1 and {IMAGES}, not {self.batches}"
        )
        require(len(self.rates) > 0 and all(0 < r < math.inf for r in self.rates), "rates must be positive")
        require(sorted({*self.rates}) == [*self.rates], f"rates must rise, not {self.rates}")
        require(0 < self.target < 2.3, f"target must be between 0 and 2.3, the loss of a guess, not {self.target}")
        require(self.most_steps >= 1, f"most_steps must be at least 1, not {self.most_steps}")
        measure.require_budget(self.seconds, None)
        require(self.seeds is None or self.seeds >= 1, f"seeds must be at least 1, not {self.seeds}")


def predict_steps(batch: float, fewest: float, critical: float) -> float:
    """Steps to a loss with batches of `batch` samples: S_min (1 + B_crit / B).

    Far below the critical batch twice the batch halves the steps; far above it saves none. At B_crit a training takes
    twice the fewest steps and twice the fewest samples. Source: arXiv:1812.06162, equations 2.7 and 2.11.
    """
    return fewest * (1 + critical / batch)


def fit_steps(batches: Sequence[int], steps: Sequence[float]) -> tuple[float, float]:
    """(S_min, B_crit) that fit best, in relative terms; neither is negative. ValueError for fewer than two batches."""
    if len({*batches}) < 2:
        raise ValueError(f"two different batches are needed, not {list(batches)}")
    from scipy.optimize import nnls

    s = np.asarray(steps, float)
    design = np.stack([1 / s, 1 / (np.asarray(batches, float) * s)], axis=1)
    fewest, samples = nnls(design, np.ones(len(s)))[0]
    fewest = max(fewest, 1e-9 * s.min())  # never 0: both numbers are finite, also where every batch pays
    return float(fewest), float(samples / fewest)


def noise_scale(small_sq: float, large_sq: float, small: int, large: int) -> tuple[float, float]:
    """(|G|^2, trace of the gradients' covariance) from mean squared norms of gradients of two batch sizes.

    A batch of B samples has E|g|^2 = |G|^2 + trace / B; two sizes give both, without bias. Their ratio trace / |G|^2
    is the noise scale in samples. Source: arXiv:1812.06162, appendix A.1.
    """
    squared = (large * large_sq - small * small_sq) / (large - small)
    trace = (small_sq - large_sq) / (1 / small - 1 / large)
    return squared, trace


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Rates by search, steps of all seeds, the noise scale along one training, then the time of a step."""
    if config.smoke:
        few = (min(config.batches), sorted(config.batches)[len(config.batches) // 2], max(config.batches))
        config = dataclasses.replace(config, batches=few, rates=config.rates[2:4] or config.rates, seeds=2)
    data = vectors(IMAGES, rank.device)
    rates = search_rates(config, data, rank)
    for batch, found in train_all(config, rates, data, rank).items():
        reached = [s for s in found if s is not None]
        if reached:
            yield rank.record("steps_to_target", "steps", reached, batch=batch, lr=rates[batch])
        yield rank.record("missed", "runs", len(found) - len(reached), batch=batch, lr=rates[batch])
    yield from noise_along(config, rates, data, rank)
    yield from time_steps(config, data, rank)


# -- statistical efficiency: how many steps


def perceptron(seed: int, device: torch.device) -> nn.Module:
    """The model, with weights that the seed fixes."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return model.to(device)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """One step: the same lines alone and with DDP, which averages the gradients during backward."""
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def steps_to_target(batch: int, lr: float, seed: int, data: tuple[Tensor, ...], target: float, most: int) -> int | None:
    """Steps of SGD until the loss on held-out images is at most `target`; None if `most` steps do not do.

    The loss is looked at after every 160 samples or so, after every step from batch 128 on.
    """
    images, labels, held_out, answers = (*data[:2], data[2][:JUDGED], data[3][:JUDGED])
    model = perceptron(seed, images.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, fused=True)
    draw, every = torch.Generator().manual_seed(seed), max(1, 160 // batch)
    for step in range(1, most + 1):
        rows = torch.randint(len(images), (batch,), generator=draw).to(images.device)
        train_step(model, optimizer, images[rows], labels[rows])
        if step % every == 0:
            with torch.no_grad():
                loss = nn.functional.cross_entropy(model(held_out), answers).item()  # waits for the device
            if loss <= target:
                return step
            if not math.isfinite(loss):
                return None
    return None


def search_rates(config: Config, data: tuple[Tensor, ...], rank: Rank) -> dict[int, float]:
    """{batch: the rate with fewest steps}; each rank searches for batches of its own, with a seed that counts nowhere.

    From the root rule upwards while it gets better, else downwards: the steps have one valley. A training that takes
    longer than the best so far is stopped.
    """
    mine = {}
    for batch in sorted(config.batches)[rank.rank :: rank.world_size]:
        tried = functools.partial(steps_to_target, batch, seed=SEARCH_SEED, data=data, target=config.target)
        mine[batch] = best_rate(config, batch, tried)
    return {batch: lr for part in rank.gather(mine) for batch, lr in part.items()}


def best_rate(config: Config, batch: int, steps: Callable[..., int | None]) -> float:
    """Climbs from rate to rate, beginning at the one nearest to rates[1] x the root of batch / 8."""
    guess = config.rates[min(1, len(config.rates) - 1)] * math.sqrt(batch / 8)
    at = min(range(len(config.rates)), key=lambda i: abs(math.log(config.rates[i] / guess)))
    fewest = steps(lr=config.rates[at], most=config.most_steps) or math.inf
    for way in (1, -1):
        moved = False
        while 0 <= at + way < len(config.rates):
            most = min(config.most_steps, fewest - 1)
            found = steps(lr=config.rates[at + way], most=int(most)) if most >= 1 else None
            if found is None:
                break
            at, fewest, moved = at + way, found, True
        if moved:
            break
    return config.rates[at]


def train_all(
    config: Config, rates: Mapping[int, float], data: tuple[Tensor, ...], rank: Rank
) -> dict[int, list[int | None]]:
    """{batch: steps of every seed}; each rank takes a seed per round, as many rounds as there is time for."""
    done: dict[int, dict[int, int | None]] = {}
    seeds = itertools.count(config.seed + rank.rank, rank.world_size)
    end = config.seed + (config.seeds or MOST_SEEDS)

    def one_seed() -> None:
        if (seed := next(seeds)) < end:
            done[seed] = {
                b: steps_to_target(b, rates[b], seed, data, config.target, config.most_steps) for b in config.batches
            }

    def rounds(n: int) -> int:
        return -(-n // rank.world_size)

    budget = Budget(config.seconds, rank.slowest, rounds(measure.LEAST_ROUNDS), rounds(MOST_SEEDS))
    measure.interleave(
        {"seed": one_seed},
        rounds(config.seeds) if config.seeds else budget,
        rank.device,
        on_round=lambda n, total: rank.progress(n, total, f"{n * rank.world_size} seeds"),
    )
    every = {seed: found for part in rank.gather(done) for seed, found in part.items()}
    return {b: [every[seed][b] for seed in sorted(every)] for b in sorted(config.batches)}


# -- the gradient noise scale


def noise_along(config: Config, rates: Mapping[int, float], data: tuple[Tensor, ...], rank: Rank) -> Iterator[Record]:
    """The noise scale at moments of one training, estimated in two ways that share nothing but the weights."""
    batch = min(config.batches, key=lambda b: abs(math.log(b / NOISE_BATCH)))
    length = steps_to_target(batch, rates[batch], config.seed, data, config.target, config.most_steps)
    moments = MOMENTS[2:4] if config.smoke else MOMENTS
    model, step = perceptron(config.seed, rank.device), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=rates[batch], fused=True)
    draw = torch.Generator().manual_seed(config.seed)
    for moment in moments:
        for _ in range(round(moment * (length or config.most_steps)) - step):
            rows = torch.randint(IMAGES, (batch,), generator=draw).to(rank.device)
            train_step(model, optimizer, data[0][rows], data[1][rows])
            step += 1
        for p in model.parameters():
            dist.broadcast(p.data, src=0)  # the same bits on all ranks, whatever their processors
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(data[2][:JUDGED]), data[3][:JUDGED]).item()
        case = {"step": step, "loss": round(loss, 3)}
        for method, (squared, trace) in (
            ("norms of ranks", from_norms(model, data, rank, config.seed + step)),
            ("single samples", from_samples(model, data, rank)),
        ):
            if squared > 0:  # an estimate of few draws may be below zero where noise is all there is
                yield rank.record("noise_scale", "samples", trace / squared, method=method, **case)


def from_norms(model: nn.Module, data: tuple[Tensor, ...], rank: Rank, seed: int) -> tuple[float, float]:
    """(|G|^2, trace) from what data parallel training has at hand: gradients before and after the all-reduce."""
    draw = torch.Generator().manual_seed(1_000 * seed + rank.rank)
    small_sq, large_sq, parts = 0.0, 0.0, MICRO * rank.world_size
    for _ in range(DRAWS):
        total = torch.zeros(sum(p.numel() for p in model.parameters()), device=rank.device)
        for _ in range(MICRO):
            rows = torch.randint(IMAGES, (MICRO_ROWS,), generator=draw).to(rank.device)
            gradient = flat_gradient(model, data[0][rows], data[1][rows])
            small_sq += gradient.square().sum().item() / (MICRO * DRAWS)
            total += gradient / parts
        dist.all_reduce(total)  # the mean over all ranks, as in DDP
        large_sq += total.square().sum().item() / DRAWS
    mean = torch.tensor(small_sq / rank.world_size, dtype=torch.float64, device=rank.device)
    dist.all_reduce(mean)
    return noise_scale(mean.item(), large_sq, MICRO_ROWS, MICRO_ROWS * parts)


def flat_gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of the mean loss of this batch, all parameters in one vector."""
    loss = nn.functional.cross_entropy(model(x), y)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def from_samples(model: nn.Module, data: tuple[Tensor, ...], rank: Rank, rows: int = 2048) -> tuple[float, float]:
    """(|G|^2, trace) from the gradient of every single sample of the first `rows`, shared by the ranks."""
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(w: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, w, (x[None],)), y[None])

    of_each = vmap(grad(loss), (None, 0, 0))
    size = sum(p.numel() for p in weights.values())
    sums = torch.zeros(size + 1, dtype=torch.float64, device=rank.device)  # the gradients, and their squared norms
    for start in range(256 * rank.rank, rows, 256 * rank.world_size):  # 256 gradients are 17 MB
        x, y = (t[start : min(start + 256, rows)] for t in data[:2])
        gradients = torch.cat([g.flatten(1) for g in of_each(weights, x, y).values()], dim=1).double()
        sums += torch.cat([gradients.sum(0), gradients.square().sum()[None]])
    dist.all_reduce(sums)
    mean_sq, single_sq = (sums[:-1] / rows).square().sum().item(), sums[-1].item() / rows
    return noise_scale(single_sq, mean_sq, 1, rows)


# -- hardware efficiency: how long a step takes


def time_steps(config: Config, data: tuple[Tensor, ...], rank: Rank) -> Iterator[Record]:
    """Seconds of a step by batch, of one rank and of all ranks that share the batch, in turn."""
    steps: dict[tuple[str, int], Callable[[], object]] = {}
    alone = _step_of(perceptron(0, rank.device), data)
    together = _step_of(DistributedDataParallel(perceptron(0, rank.device)), data)
    for batch in sorted(config.batches):
        steps["one rank", batch] = functools.partial(alone, slice(0, batch)) if rank.rank == 0 else _wait
        if rank.world_size > 1 and batch % rank.world_size == 0:
            first, last = (r * batch // rank.world_size for r in (rank.rank, rank.rank + 1))
            steps["all ranks", batch] = functools.partial(together, slice(first, last))
    for step in steps.values():
        rank.barrier()
        measure.time_steps(step, 3, rank.device)
    rounds = 2 if config.smoke else Budget(0.5 * config.seconds, rank.slowest)
    seconds = measure.interleave(steps, rounds, rank.device, inner=4, between=rank.barrier)
    for (way, batch), samples in seconds.items():
        yield rank.record("step_s", "s", rank.slowest(samples), way=way, batch=batch)


def _step_of(model: nn.Module, data: tuple[Tensor, ...]) -> Callable[[slice], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    return lambda rows: train_step(model, optimizer, data[0][rows], data[1][rows])


def _wait() -> None:
    """One rank trains alone; the others go to the next barrier."""


# -- what the records say


def steps(run: Records) -> dict[int, Estimate]:
    """{batch: steps to the target} of batches with which every seed reached it."""
    sure = {r.case["batch"] for r in run.where("missed") if r.value == 0}
    return {
        r.case["batch"]: measure.estimate(r.samples, "steps")
        for r in run.where("steps_to_target")
        if r.case["batch"] in sure
    }


def critical(run: Records) -> tuple[Estimate, Estimate]:
    """(fewest steps, critical batch in samples), fitted seed by seed."""
    batches = sorted(steps(run))
    columns = [run.one("steps_to_target", batch=b).samples for b in batches]
    found = [fit_steps(batches, row) for row in zip(*columns, strict=True)]
    fewest, batch = zip(*found, strict=True)
    return measure.estimate(fewest, "steps"), measure.estimate(batch, "samples")


def fit_error(run: Records) -> float:
    """Largest distance of S_min (1 + B_crit / B) from the median steps, relative to these."""
    fewest, batch = critical(run)
    return max(abs(predict_steps(b, fewest.value, batch.value) / s.value - 1) for b, s in steps(run).items())


def noise(run: Records, method: str = "norms of ranks") -> dict[int, float]:
    """{step of the training: noise scale in samples} by one of the two methods."""
    return {r.case["step"]: r.value for r in run.where("noise_scale", method=method)}


def time_to_target(run: Records, way: str = "one rank") -> dict[int, Estimate]:
    """{batch: seconds to the target} = steps x seconds of a step; an interval holds both intervals' extremes."""
    found = {}
    for batch, n in steps(run).items():
        for r in run.where("step_s", way=way, batch=batch):
            s = measure.estimate(r.samples, "s")
            found[batch] = Estimate(n.value * s.value, n.low * s.low, n.high * s.high, min(n.n, s.n), "s")
    return found


def quickest(run: Records, way: str = "one rank") -> tuple[int, Estimate]:
    """(batch, seconds) with the shortest time to the target. LookupError if nothing ran that way."""
    found = time_to_target(run, way)
    if not found:
        raise LookupError(f"no training of {way} here")
    return min(found.items(), key=lambda item: item[1].value)


def answer(run: Records) -> Iterator[str]:
    """Where steps stop falling, what the noise says of it beforehand, and which batch is quickest."""
    target, by = run[0].config["target"], steps(run)
    if len(by) < 2:
        yield f"A loss of {target:g} was reached with every seed by {len(by)} of the batches: no curve."
        return
    fewest, batch = critical(run)
    if batch.high > REACH * max(by):
        yield (
            f"To a loss of {target:g} even batch {max(by)} saves steps in proportion, with some seeds at least: where "
            "the critical batch is, this run cannot tell. Take larger batches, or more seeds."
        )
    else:
        yield f"To a loss of {target:g} it takes {fewest} at least, and twice as many at the critical batch, {batch}."
    yield f"That curve is within {100 * fit_error(run):.0f} % of all medians."
    told = noise(run)
    if told:
        yield (
            f"The gradient noise scale is {min(told.values()):.0f} to {max(told.values()):.0f} samples along the "
            "way, without any training but one."
        )
    small, large = min(by), max(by)
    saved, paid = by[small].value / by[large].value, large / small
    yield f"Batch {large} instead of {small}: {paid:.0f} times the samples a step, {saved:.1f} times fewer steps."
    for way in ("one rank", "all ranks"):
        found = time_to_target(run, way)
        if found:
            best, seconds = quickest(run, way)
            name = way if way == "one rank" else f"{run[0].layout['world_size']} ranks"
            near = [str(b) for b, s in sorted(found.items()) if b != best and s.low <= seconds.high]
            open_ = f" Its interval meets that of {', '.join(near)}: this run cannot tell them apart." if near else ""
            yield f"Quickest on {name}: batch {best}, {seconds} of steps.{open_}"


if __name__ == "__main__":
    cli.main()
