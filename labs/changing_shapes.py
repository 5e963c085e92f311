"""What does a new input shape at every step cost, and what does cudnn.benchmark have to do with it?

    python -m labs.changing_shapes --nproc 1
    torchrun --nproc-per-node 1 -m labs.changing_shapes --channels 64 --rounds 10

About 3 s on 2 CPU cores. Rank 0 trains two convolutions on images of one fixed height, on images of a height that it
has never seen before, and on these a second time, with torch.backends.cudnn.benchmark off and on, all in turn. On a
CPU there is no cuDNN: off against on is then a control. A new shape costs there, too: oneDNN makes kernels by shape.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.parts.timing import roofline

Arm = tuple[str, bool]  # (shapes, cudnn_benchmark)
ARMS: tuple[Arm, ...] = tuple(itertools.product(("fixed", "changing", "seen"), (False, True)))


@dataclass(frozen=True)
class Config:
    """The convolutions, their images, and how often each arm takes its turn."""

    height: int = 96
    """Fixed height of the images in pixels; the others lie around it."""
    width: int = 32
    """Width of all images in pixels."""
    channels: int = 16
    """Channels after each of the two convolutions."""
    batch: int = 4
    """Images per step."""
    rounds: int = 30
    """Times that every arm takes its turn, of two steps; each gives one sample."""
    smoke: bool = False
    """Three rounds."""

    def __post_init__(self) -> None:
        for name in ("width", "channels", "batch", "rounds"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}")
        least = 2 * (self.rounds + 1)
        fix = f"height must be above {least} for {self.rounds} rounds of new heights, not {self.height}"
        require(self.height > least, f"{fix}: raise height or lower rounds")


def predict(step_s: float, set_up_s: float, steps: int, shapes: int) -> float:
    """Mean seconds per step of a run of `steps` steps over `shapes` different shapes, each of them set up once.

    `step_s` is a step of a shape seen before: oneDNN's kernels, and what cudnn.benchmark chose, are kept by shape.
    """
    return step_s + set_up_s * shapes / steps


def height_pairs(fixed: int) -> Iterator[tuple[int, int]]:
    """Heights that occur once each, in mirrored pairs: both of a pair together have the FLOPs of two fixed ones."""
    return ((fixed + d, fixed - d) for d in itertools.count(1))


def schedule(config: Config, rounds: int) -> dict[Arm, list[tuple[int, int]]]:
    """{arm: the two heights of each round}. No two changing arms share a height: one's kernels would serve the other.

    "seen" repeats what "changing" did a round before, so that arms may take their turns in any order. Benchmark off
    and on swap the pair that is nearer to the fixed height from round to round.
    """
    fixed, new = (config.height, config.height), height_pairs(config.height)
    found: dict[Arm, list[tuple[int, int]]] = {arm: [fixed] * (rounds if arm[0] == "fixed" else 0) for arm in ARMS}
    for i in range(rounds):
        for benchmark in (bool(i % 2), not i % 2):
            found["seen", benchmark].append(found["changing", benchmark][-1] if i else fixed)
            found["changing", benchmark].append(next(new))
    return found


def network(channels: int) -> nn.Module:
    """Two 3x3 convolutions that keep height and width, so that FLOPs are proportional to the pixels."""
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1))


def train(module: nn.Module, x: Tensor) -> None:
    """Forward and backward pass of one batch, (batch, 3, height, width)."""
    module.zero_grad()
    module(x).square().mean().backward()


def turns(module: nn.Module, inputs: list[list[Tensor]], benchmark: bool) -> Callable[[], None]:
    """A function whose every call trains on the next of `inputs`, with this value of cudnn.benchmark."""
    todo = iter(inputs)

    def turn() -> None:
        torch.backends.cudnn.benchmark = benchmark
        for x in next(todo):
            train(module, x)

    return turn


def images(config: Config, pairs: list[tuple[int, int]], device: torch.device | str) -> list[list[Tensor]]:
    """Random images of these heights."""
    n, w = config.batch, config.width
    return [[torch.randn(n, 3, h, w, device=device) for h in pair] for pair in pairs]


def step_flop(config: Config, pairs: list[tuple[int, int]]) -> float:
    """FLOPs of one step, mean over `pairs`, counted without computing anything."""
    module, inputs = network(config.channels).to("meta"), images(config, pairs, "meta")
    flops = [roofline.count(lambda x=x: train(module, x)).flop for pair in inputs for x in pair]
    return sum(flops) / len(flops)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Rank 0 trains; the others wait for it."""
    if rank.rank == 0:
        before = torch.backends.cudnn.benchmark
        try:
            yield from _alone(config, rank)
        finally:
            torch.backends.cudnn.benchmark = before  # the switch belongs to the process, and it may live on
    rank.barrier()


def _alone(config: Config, rank: Rank) -> Iterator[Record]:
    rounds = min(3, config.rounds) if config.smoke else config.rounds
    pairs = schedule(config, rounds + 1)  # the first round warms up
    module = network(config.channels).to(rank.device)
    steps = {arm: turns(module, images(config, pairs[arm], rank.device), arm[1]) for arm in ARMS}
    measure.interleave(steps, 1, rank.device)
    seconds = measure.interleave(
        steps, rounds, rank.device, on_round=lambda done, total: rank.progress(done, total, "rounds of all arms")
    )
    for shapes, benchmark in ARMS:
        samples = [s / 2 for s in seconds[shapes, benchmark]]
        if shapes == "seen":
            yield rank.record("seen_step_s", "s", samples, rank=0, cudnn_benchmark=benchmark)
            continue
        case = {"shapes": shapes, "cudnn_benchmark": benchmark}
        yield rank.record("step_s", "s", samples, rank=0, **case)
        flop = step_flop(config, pairs[shapes, benchmark][1:])
        yield rank.record("step_flop", "FLOP", flop, kind="modelled", rank=0, **case)


def answer(run: Records) -> Iterator[str]:
    """What a new shape costs, and what the switch does to fixed and changing ones, in sentences."""
    step = {(r.case["shapes"], r.case["cudnn_benchmark"]): r for r in run.where("step_s")}
    seconds = {arm: record.samples for arm, record in step.items()}
    new = measure.paired_ratio(seconds["changing", False], seconds["fixed", False])
    yield measure.verdict(new, "A new shape at every step against a fixed one, seconds per step") + "."
    for shapes in ("fixed", "changing"):
        on = measure.paired_ratio(seconds[shapes, True], seconds[shapes, False])
        yield measure.verdict(on, f"cudnn.benchmark on against off, {shapes} shape, seconds per step") + "."
    if step["fixed", True].layout["device"] != "cuda":
        yield "There is no cuDNN here: on against off is a control, and only says how far this run can be trusted."


if __name__ == "__main__":
    cli.main()
