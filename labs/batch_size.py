"""What does a larger batch buy, and where does it stop?

    python -m labs.batch_size                                     # launches its own ranks
    torchrun --nproc-per-node 2 -m labs.batch_size --model cnn --batches 4 32 256

About 8 s on 2 CPU cores. A step costs some time whatever the batch (launching kernels, reading and updating every
parameter, and with several ranks the all-reduce) and some time per sample. All batch sizes and ways take turns:
  single    one rank trains, the others wait
  ddp       n ranks train one model with DistributedDataParallel
  no_sync   the same without its all-reduces: what is missing to ddp is what communication costs
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labs.common import models
from labs.common.memory.activation_bytes import activation_bytes
from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.measure import Estimate
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

ARTICLES = (32, 256)  # batch sizes between which the articles tell to look
MOST_STEPS = 16  # per turn

Steps = dict[tuple[str, int], Callable[[], object]]  # by mode and samples per rank


@dataclass(frozen=True)
class Config:
    """What to train, and with which batches."""

    model: str = "mlp"
    """One of labs.models.MODELS, or package.module:factory."""
    batches: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    """Samples per rank and step."""
    seconds: float = 7.5
    """Time for all rounds, in s. A slower machine takes fewer rounds and has wider intervals."""
    rounds: int | None = None
    """Times that every batch size and way takes its turn; by default as many as fit into `seconds`, at least 6."""
    budget_s: float = 0.008
    """Least duration of a turn: fast steps are repeated, up to 16 times, and their mean is the sample."""
    seed: int = 0
    """Seed of the model and of the data."""
    smoke: bool = False
    """Two rounds, steps with batches up to 256; bytes are counted for all."""

    def __post_init__(self) -> None:
        require(len(self.batches) > 0 and min(self.batches) >= 1, "batches must hold positive numbers")
        require(len(set(self.batches)) == len(self.batches), "batches must be different: each is a point of the curve")
        measure.require_budget(self.seconds, self.rounds)
        require(self.budget_s > 0, f"budget_s must be positive, not {self.budget_s}")
        models.require_known(self.model)


def check_layout(config: Config, world_size: int) -> None:
    """BadInput if the model cannot be built."""
    models.build(config.model)


@dataclass(frozen=True)
class StepModel:
    """Seconds of a step with b samples, t(b) = fixed_s + b sample_s, drawn through batches `small` and `large`.

    Neither part is negative. Where noise hides what a sample costs, sample_s is 0: this run cannot tell it.
    """

    small: int
    large: int
    fixed_s: float
    """What a step costs whatever its batch."""
    sample_s: float
    """What each sample adds."""

    def step_s(self, batch: float) -> float:
        """t(b)."""
        return self.fixed_s + batch * self.sample_s

    def samples_per_s(self, batch: float) -> float:
        """b / t(b) for b > 0; with b = inf the throughput that no batch exceeds."""
        seconds = self.fixed_s / batch + self.sample_s
        return 1 / seconds if seconds else math.inf

    @property
    def half_batch(self) -> float:
        """The knee, fixed_s / sample_s: this batch has half of the throughput that no batch exceeds; inf if unknown.

        Far below it a larger batch is nearly free, far above it buys nothing. Vector computers have the same
        number, n_1/2: Hockney & Jesshope 1988, "Parallel Computers 2".
        """
        return self.fixed_s / self.sample_s if self.sample_s else math.inf


def predict(small: int, small_s: float, large: int, large_s: float) -> StepModel:
    """The whole curve from the seconds of a step at two batch sizes, in samples.

    Only noise gives a negative cost. Then the other one alone explains the times: without a cost per sample both steps
    take their mean. ValueError if the larger batch is no larger.
    """
    if not small < large:
        raise ValueError(f"two batches are needed, a small and a large one, not {small} and {large}")
    if small_s >= large_s:
        return StepModel(small, large, (small_s + large_s) / 2, 0.0)
    sample_s = (large_s - small_s) / (large - small)
    return StepModel(small, large, max(small_s - small * sample_s, 0.0), sample_s)


def predict_share(step_s: float, all_reduce_s: float) -> float:
    """Share of communication in a DDP step if nothing overlaps, from one rank's own step and one all-reduce."""
    both_s = step_s + all_reduce_s
    return all_reduce_s / both_s if both_s else 0.0


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Bytes by batch, then step times of all batches and ways, in turn."""
    workload = models.build(config.model, config.seed)
    workload.module.to(rank.device)
    data = {b: [t.to(rank.device) for t in workload.make_batch(b)] for b in config.batches}
    size = models.gradient_bytes(workload.module)
    yield rank.record("gradient_bytes", "B", size, kind="modelled")
    for b, (x, y) in data.items():
        yield rank.record("activation_bytes", "B", activation_bytes(workload, x, y), kind="modelled", batch=b)
    steps = _steps(workload, {b: data[b] for b in _timed(config)}, rank)
    seconds, all_reduce_s = _measure(steps, torch.zeros(size // 4, device=rank.device), config, rank)
    for (mode, batch), samples in seconds.items():
        yield rank.record("step_s", "s", rank.slowest(samples), mode=mode, batch=batch)
    if all_reduce_s:
        yield rank.record("all_reduce_s", "s", rank.slowest(all_reduce_s))


def _timed(config: Config) -> tuple[int, ...]:
    small = tuple(b for b in config.batches if b <= 256)
    return (small or config.batches[:1]) if config.smoke else config.batches


def _measure(steps: Steps, buffer: torch.Tensor, config: Config, rank: Rank) -> tuple[dict, list[float]]:
    """Seconds per step of each way, and of one all-reduce of `buffer` after each round; one sample per round."""
    repeats = {case: _repeats(step, config.budget_s, rank) for case, step in steps.items()}
    rounds = measure.rounds_of(config, rank.slowest)
    all_reduce_s: list[float] = []

    def end_of_round(done: int, total: int) -> None:
        if rank.world_size > 1:
            # With work before it, as in training: back to back the threads that communicate never fall asleep.
            steps["no_sync", min(b for _, b in steps)]()
            all_reduce_s.extend(measure.time_steps(lambda: dist.all_reduce(buffer), 1, rank.device))
        rank.progress(done, total, f"round {done} of {total}")

    turns = {case: _repeated(step, repeats[case]) for case, step in steps.items()}
    seconds = measure.interleave(turns, rounds, rank.device, between=rank.barrier, on_round=end_of_round)
    return {case: [s / repeats[case] for s in samples] for case, samples in seconds.items()}, all_reduce_s


def _steps(workload: models.Workload, data: dict[int, list[torch.Tensor]], rank: Rank) -> Steps:
    """A step for each (mode, batch), all on the same parameters."""
    several = rank.world_size > 1
    ddp = DistributedDataParallel(workload.module) if several else None  # its ranks drift apart in no_sync's turns
    steps: Steps = {}
    for b in data:
        alone = _step(workload, workload.module, data[b])
        steps["single", b] = alone if rank.rank == 0 else _wait
        if several:
            steps["ddp", b] = _step(workload, ddp, data[b])
            steps["no_sync", b] = _step(workload, ddp, data[b], ddp.no_sync)
    return steps


def _wait() -> None:
    """One rank trains alone; the others go to the next barrier."""


def _step(
    workload: models.Workload, model: nn.Module, data: list[torch.Tensor], context: Callable = nullcontext
) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = data

    def step() -> None:
        optimizer.zero_grad()
        with context():
            workload.loss(model(x), y).backward()
        optimizer.step()

    return step


def _repeats(step: Callable[[], object], budget_s: float, rank: Rank) -> int:
    """Steps that fill a turn, after a warm-up; all ranks must take equally many, so the slowest decides."""
    rank.barrier()
    seconds = measure.time_steps(step, 3, rank.device)[-1]
    return max(1, min(MOST_STEPS, int(budget_s / rank.slowest([seconds])[0])))


def _repeated(step: Callable[[], object], times: int) -> Callable[[], object]:
    return lambda: [step() for _ in range(times)]


def latency(records: Records, mode: str = "single") -> dict[int, Estimate]:
    """Seconds that a step takes, by samples per rank; empty if nothing ran in that `mode`."""
    return {r.case["batch"]: measure.estimate(r.samples, "s") for r in records.where("step_s", mode=mode)}


def throughput(records: Records, mode: str = "single") -> dict[int, Estimate]:
    """Samples per second of the whole job (one rank, or all of them) by samples per rank."""
    found = {}
    for r in records.where("step_s", mode=mode):
        ranks = 1 if mode == "single" else r.layout["world_size"]
        found[r.case["batch"]] = measure.estimate([ranks * r.case["batch"] / t for t in r.samples], "samples/s")
    return found


def communication_share(records: Records) -> dict[int, Estimate]:
    """1 - no_sync / ddp, pair by pair, by samples per rank: the part of a step that only waits for other ranks.

    What DDP hides behind backward is not in it. Noise can make it negative; without other ranks it is empty.
    """
    found = {}
    for ddp in records.where("step_s", mode="ddp"):
        batch = ddp.case["batch"]
        without = records.one("step_s", mode="no_sync", batch=batch)
        shares = [1 - a / b for a, b in zip(without.samples, ddp.samples, strict=True)]
        found[batch] = measure.estimate(shares, "1")
    return found


def fit_ends(records: Records, mode: str = "single", small: int = ARTICLES[0], large: int = ARTICLES[1]) -> StepModel:
    """The StepModel from the median step times at two batch sizes alone; LookupError if one was not run.

    ValueError as for `predict`.
    """
    times = (records.one("step_s", mode=mode, batch=b).value for b in (small, large))
    return predict(small, next(times), large, next(times))


def knee(records: Records, mode: str = "single", small: int = ARTICLES[0], large: int = ARTICLES[1]) -> Estimate | None:
    """`half_batch` with its interval, fitted round by round; None if noise hid the slope in every round."""
    pairs = zip(*(records.one("step_s", mode=mode, batch=b).samples for b in (small, large)), strict=True)
    found = [predict(small, s, large, t).half_batch for s, t in pairs if s < t]
    return measure.estimate(found, "samples") if found else None


def modelled_share(records: Records) -> dict[int, float]:
    """Communication share by samples per rank, expected from one rank's curve and the all-reduce; empty without DDP."""
    if not len(records.where("all_reduce_s")):
        return {}
    model, all_reduce_s = fit_ends(records), records.one("all_reduce_s").value
    return {
        r.case["batch"]: predict_share(model.step_s(r.case["batch"]), all_reduce_s)
        for r in records.where("step_s", mode="ddp")
    }


def answer(run: Records) -> Iterator[str]:
    """Which batch trains fastest, where the curve bends, and what communication takes, in sentences."""
    found = throughput(run)
    small, large = min(found), max(found)
    best = max(found, key=lambda b: found[b].value)
    if small != large:
        steps = (run.one("step_s", mode="single", batch=b).samples for b in (small, large))
        more = measure.paired_ratio(*steps).scaled(large / small)
        end = f"{more} as many" if measure.differs(more) else f"no more that this run can show ({more})"
        yield f"One device trains {found[large]} with batch {large}, against batch {small}: {end}."
    yield f"Of the batches tried, {best} has the most samples/s: {found[best]}."
    if {*ARTICLES} <= {*found} and (half := knee(run)):
        yield f"Through batches {ARTICLES[0]} and {ARTICLES[1]}, half of the limit is reached at a batch of {half}."
    shares = {b: e.scaled(100, "%") for b, e in communication_share(run).items()}
    for b in dict.fromkeys((min(shares), max(shares)) if shares else ()):
        unsure = "" if shares[b].low > 0 else ", which may be nothing"
        ranks = run[0].layout["world_size"]
        yield f"On {ranks} ranks, exchanging gradients takes {shares[b]} of a step with batch {b}{unsure}."


if __name__ == "__main__":
    cli.main()
