"""What does an armed training cost per step?

    python -m labs.debug_cost --nproc 1
    python -m labs.debug_cost --nproc 1 --seconds 60 --batch-size 1024

About 20 s on 2 CPU cores. Two trainings of the recipe train_ddp_debug.py's model, of two ranks each, stand side by
side: one as train_ddp.py is, one with torch's Flight Recorder and the thread that watches. They take steps in turn, so
that one always waits; the armed one without and with each guard, of which each one's own price follows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.fork_server import guarded_folder
from labs.kit.measure import Estimate
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.parts.faults.armed import Job

GUARDS = {
    "recorder and watch": (),
    "finite loss": ("each step",),
    "replicas": ("replicas",),
    "memory": ("memory",),
}
"""What each variant of the armed training does besides; the first is in all of them."""
AIM = 0.02
"""Share of a step that all that is done at each step may cost."""


@dataclass(frozen=True)
class Config:
    """The training, and for how long it is measured."""

    batch_size: int = 256
    """Images per step, on both ranks together."""
    block: int = 10
    """Steps in a row of one variant; then replicas are compared, or the memory is noted, once."""
    check_every: int = 100
    """Steps from one comparison of replicas to the next in the recipe."""
    seconds: float = 12.0
    """Time for all variants in turn, in s. A slower machine takes fewer rounds and has wider intervals."""
    rounds: int | None = None
    """Rounds in turn; by default as many as fit into `seconds`, at least 6."""
    seed: int = 0
    """Seed of the weights and the data."""
    smoke: bool = False
    """Two rounds."""

    def __post_init__(self) -> None:
        require(
            2 <= self.batch_size <= 100_000 and self.batch_size % 2 == 0,
            f"batch_size must be an even number from 2 to 100000, not {self.batch_size}",
        )
        require(1 <= self.block <= 1000, f"block must be from 1 to 1000 steps, not {self.block}")
        require(1 <= self.check_every <= 1_000_000, f"check_every must be from 1 to 1000000, not {self.check_every}")
        require(0 <= self.seed < 2**32, f"seed must be from 0 to 4294967295, not {self.seed}")
        measure.require_budget(self.seconds, self.rounds)


def check_layout(config: Config, world_size: int) -> None:
    """BadInput for more than the one process that starts the trainings' own ranks."""
    require(world_size == 1, f"debug_cost starts four ranks of its own: use nproc=1, not {world_size}")


def predict(per_step_s: float, per_check_s: float, check_every: int) -> float:
    """Seconds per step of a guard that acts at each step and one that acts every `check_every` steps."""
    return per_step_s + per_check_s / check_every


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Blocks of steps of each variant, in turn."""
    with (
        guarded_folder() as root,
        Job(root, False, config.batch_size, config.seed, rank) as plain,
        Job(root, True, config.batch_size, config.seed, rank) as armed,
    ):
        steps = {"none": partial(plain.steps, config.block)}
        steps |= {name: partial(armed.steps, config.block, guards) for name, guards in GUARDS.items()}
        for step in steps.values():  # both have loaded torch, and allocated what they need
            step()
        found = measure.interleave(steps, measure.rounds_of(config), rank.device, on_round=rank.progress)
    for name, seconds in found.items():
        yield rank.record("step_s", "s", [s / config.block for s in seconds], guard=name)


def ratio(run: Records, guard: str, than: str = "none") -> Estimate:
    """How many times as long as without it a step takes with a guard, pair by pair."""
    return measure.paired_ratio(run.one("step_s", guard=guard).samples, run.one("step_s", guard=than).samples)


def price(run: Records, guard: str) -> Estimate:
    """Seconds that a guard adds: to each step, or each time that replicas are compared or memory is noted."""
    once = run[0].config["block"] if guard in ("replicas", "memory") else 1
    than = "none" if guard == "recorder and watch" else "recorder and watch"
    with_it, without = (run.one("step_s", guard=g).samples for g in (guard, than))
    return measure.estimate([once * (a - b) for a, b in zip(with_it, without, strict=True)], "s")


def answer(run: Records) -> Iterator[str]:
    """What a step costs, what all guards add to it, and each one's own price."""
    plain = measure.estimate(run.one("step_s", guard="none").samples, "s")
    whole = ratio(run, "finite loss")
    yield f"A step takes {plain} without any of it."
    if whole.n < measure.fewest() or not measure.differs(whole):
        yield (
            f"With recorder, watch and the test of each loss: no difference that this run can show ({whole}); the "
            f"aim is at most {1 + AIM:.2f}x."
        )
    else:
        held = "within" if whole.high <= 1 + AIM else "above" if whole.low > 1 + AIM else "around"
        yield (
            f"With recorder, watch and the test of each loss it takes {whole}: {held} the aim of at most "
            f"{1 + AIM:.2f}x."
        )
    for guard, what in (
        ("recorder and watch", "per step"),
        ("finite loss", "per step more"),
        ("replicas", "each time they are compared"),
        ("memory", "each time"),
    ):
        cost = price(run, guard)
        shown = cost.n >= measure.fewest() and measure.differs(cost, 0.0)
        yield f"{guard.capitalize()}: {cost} {what}{'' if shown else ', nothing that this run can show'}."
    every, check = run[0].config["check_every"], price(run, "replicas")
    share = predict(0.0, max(0.0, check.value), every) / plain.value
    yield f"Replicas compared every {every} steps cost {100 * share:.2f} % of a step (modelled from that price)."


if __name__ == "__main__":
    cli.main()
