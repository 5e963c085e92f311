"""For which models and batches are two devices faster than one?

    python -m labs.crossover
    torchrun --nproc-per-node 2 -m labs.crossover --widths 64 4096 --batches 1 1024

About 8 s on 2 CPU cores. Each cell of the map trains a perceptron (width x width layers) with one rank and with
DDP on all ranks, in turn. The prediction needs no second rank: only one rank's step times and the link.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labs.common.models import gradient_bytes
from labs.common.sharding.link import all_reduce_link
from labs.common.timing import collectives
from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

LAYERS = 3


@dataclass(frozen=True)
class Config:
    """The cells of the map."""

    widths: tuple[int, ...] = (64, 256, 768)
    """Width of the perceptron's layers: parameters grow with its square."""
    batches: tuple[int, ...] = (4, 32, 256, 1024)
    """Samples per rank."""
    seconds: float = 4.0
    """Time for all rounds, in s. A slower machine takes fewer rounds and has wider intervals."""
    rounds: int | None = None
    """Times that one rank and all ranks take turns, per cell; by default as many as fit into `seconds`, at least 6."""
    budget_s: float = 0.012
    """Least duration of a turn: fast steps are repeated up to 8 times per turn."""
    smoke: bool = False
    """Two by two cells, few rounds."""

    def __post_init__(self) -> None:
        require(len(self.widths) > 0 and min(self.widths) >= 1, "widths must hold positive numbers")
        require(len(self.batches) > 0 and min(self.batches) >= 1, "batches must hold positive numbers")
        measure.require_budget(self.seconds, self.rounds)
        require(self.budget_s > 0, f"budget_s must be positive, not {self.budget_s}")


def predict(single_step_s: float, size: float, link: collectives.LatencyBandwidth, ranks: int) -> float:
    """Weak-scaling speed-up of DDP without overlap: n t1 / (t1 + all-reduce), the all-reduce of `size` bytes.

    `link` is that of a whole all-reduce: its `b_s` are bytes per s of the message that is reduced. An estimate
    from below where DDP overlaps communication with backward, from above where ranks slow each other down.
    """
    together_s = single_step_s + link.seconds(size)
    return ranks * single_step_s / together_s if together_s else float(ranks)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """All-reduce times by size, then the map cell by cell."""
    seconds, _ = all_reduce_link(6 if config.smoke else 14, rank)
    for size, samples in seconds.items():
        yield rank.record("all_reduce_s", "s", samples, size=size)
    widths, batches = (config.widths[:2], config.batches[:2]) if config.smoke else (config.widths, config.batches)
    cells = [(width, batch) for width in widths for batch in batches]
    for done, (width, batch) in enumerate(cells, start=1):
        yield from cell(width, batch, config, rank, 1 / len(cells))
        rank.progress(done, len(cells), f"width {width}, batch {batch}")


def cell(width: int, batch: int, config: Config, rank: Rank, part: float) -> Iterator[Record]:
    """Step times of one rank alone and of DDP on all, in turn, in `part` of the time for all cells."""
    torch.manual_seed(0)
    x = torch.randn(batch, width, device=rank.device)
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)]).to(rank.device)
    size = gradient_bytes(plain)
    steps = {
        "single": _step(plain, x) if rank.rank == 0 else _wait,
        "ddp": _step(DistributedDataParallel(plain), x),
    }
    warm = [measure.time_steps(s, 4, rank.device)[-1] for s in steps.values()]
    # All ranks must take equally many steps: the slowest decides.
    inner = max(1, min(8, int(config.budget_s / rank.slowest(warm)[0])))
    seconds = measure.interleave(
        steps, measure.rounds_of(config, rank.slowest, part), rank.device, inner=inner, between=rank.barrier
    )
    for mode, samples in seconds.items():
        yield rank.record(
            "step_s", "s", rank.slowest(samples), mode=mode, width=width, batch=batch, gradient_bytes=size
        )


def _wait() -> None:
    """One rank trains alone; the others go to the next barrier."""


def _step(module: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()

    return step


def crossover_map(records: Records) -> list[dict]:
    """One row per cell: width, batch, gradient_bytes, `measured` speed-up (Estimate), `modelled` speed-up."""
    times = records.where("all_reduce_s")
    link = collectives.fit([r.case["size"] for r in times], [r.value for r in times])
    ranks = times[0].layout["world_size"]
    rows = []
    for ddp in records.where("step_s", mode="ddp"):
        case = {k: ddp.case[k] for k in ("width", "batch", "gradient_bytes")}
        single = records.one("step_s", mode="single", **case)
        measured = measure.paired_ratio([ranks * t for t in single.samples], ddp.samples)
        rows.append(
            {
                **case,
                "measured": measured,
                "modelled": predict(single.value, case["gradient_bytes"], link, ranks),
            }
        )
    return rows


def score(rows: list[dict]) -> tuple[int, int, int]:
    """(cells in which the model names the faster side, cells of the commoner side, cells that are decided).

    Where the interval holds 1, the measured side may be noise: such cells are not counted.
    """
    decided = [r for r in rows if not r["measured"].low <= 1 <= r["measured"].high]
    faster = [r["measured"].value > 1 for r in decided]
    right = sum((r["modelled"] > 1) == won for r, won in zip(decided, faster, strict=True))
    return right, max(sum(faster), len(faster) - sum(faster)), len(decided)


def answer(run: Records) -> Iterator[str]:
    """In which cells DDP pays, whether the model knew it, and the extremes."""
    rows, ranks = crossover_map(run), run[0].layout["world_size"]
    if ranks == 1:
        yield "One rank is not faster or slower than itself. The map needs two."
        return
    faster, slower = (sum(r["measured"].low > 1 for r in rows), sum(r["measured"].high < 1 for r in rows))
    right, commoner, decided = score(rows)
    yield (
        f"DDP on {ranks} ranks is faster than one in {faster} of {len(rows)} cells and slower in {slower}; of the "
        f"others this run cannot tell it."
    )
    if decided:
        yield (
            f"Of these {decided}, one rank's step time and the link alone name the faster side in {right}; "
            f"always naming the commoner one would name {commoner}."
        )
    for word, choose in (("Slowest", min), ("Fastest", max)):
        r = choose(rows, key=lambda row: row["measured"].value)
        yield f"{word}: width {r['width']}, batch {r['batch']}: {r['measured']}."


if __name__ == "__main__":
    cli.main()
