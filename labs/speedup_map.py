"""For which models and batches do n ranks train faster than one?

    python -m labs.speedup_map      |      torchrun --nproc-per-node 2 -m labs.speedup_map --widths 64 2048

About 8 s on 2 CPU cores. Each cell of the map trains an MLP of width x width layers, on one rank and with DDP on all
ranks in turn.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Gt
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labs.common.models import gradient_bytes
from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

LAYERS = 3


@dataclass(frozen=True)
class Config:
    """The cells of the map."""

    widths: tuple[int, ...] = (256, 512, 1024)
    """Width of the MLP's layers; the number of parameters grows with its square."""
    batch_sizes: tuple[int, ...] = (8, 64, 512)
    """Samples per rank and step."""
    rounds: Annotated[int, Ge(6)] = 9
    """Number of rounds in each cell; one rank and all ranks take one turn per round."""
    block_s: Annotated[float, Gt(0)] = 0.04
    """Approximate duration of a turn, in s."""
    smoke: bool = False
    """Run only a few steps in each cell."""

    def __post_init__(self) -> None:
        require(min(self.widths, default=0) >= 1, f"widths must hold positive numbers, not {self.widths}")
        require(
            min(self.batch_sizes, default=0) >= 1, f"batch_sizes must hold positive numbers, not {self.batch_sizes}"
        )


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Measure the map cell by cell."""
    cells = [(width, batch_size) for width in config.widths for batch_size in config.batch_sizes]
    for done, (width, batch_size) in enumerate(cells, start=1):
        yield from cell(width, batch_size, config, rank)
        rank.progress(done, len(cells), f"width {width}, batch {batch_size}")


def cell(width: int, batch_size: int, config: Config, rank: Rank) -> Iterator[Record]:
    """Yield the slowest rank's seconds per step, on one rank alone and with DDP on all ranks."""
    torch.manual_seed(0)
    x = torch.randn(batch_size, width, device=rank.device)
    layers = [m for _ in range(LAYERS) for m in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers).to(rank.device)
    plain, ddp = training_step(model, x), training_step(DistributedDataParallel(copy.deepcopy(model)), x)
    ways = {"single": plain if rank.rank == 0 else lambda: None, "ddp": ddp}
    warm = [measure.time_steps(step, 4, rank.device)[-1] for step in ways.values()]
    steps = 1 if config.smoke else max(1, min(64, round(config.block_s / max(rank.slowest(warm)))))
    seconds = measure.interleave(
        ways, 6 if config.smoke else config.rounds, rank.device, inner=steps, between=rank.barrier
    )
    case = {"width": width, "batch_size": batch_size, "gradient_mb": gradient_bytes(model) / 1e6}
    for way, samples in seconds.items():
        yield rank.record("step_s", "s", rank.slowest(samples), way=way, **case)


def training_step(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Return a training step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def speedups(records: Records) -> list[dict]:
    """Return a row per cell: its case, median `single_s`, the speedup (Estimate) and the implied `overhead_s`."""
    rows = []
    for ddp in records.where("step_s", way="ddp"):
        single = records.one("step_s", **{**ddp.case, "way": "single"})
        n = ddp.layout["world_size"]
        ratio = measure.paired_ratio([n * s for s in single.samples], ddp.samples)
        overhead_s = single.value * (n / ratio.value - 1)
        rows.append({**ddp.case, "single_s": single.value, "overhead_s": overhead_s, "speedup": ratio})
    return rows


def predicted(rows: list[dict], ranks: int) -> list[float]:
    """Predict each cell's speedup if DDP adds a + b x gradient bytes per step, fitted to the smallest batches."""
    least = min(row["batch_size"] for row in rows)
    fitted = [row for row in rows if row["batch_size"] == least]
    added_s = [row["overhead_s"] for row in fitted]
    b, a = np.polyfit([row["gradient_mb"] for row in fitted], added_s, 1) if len(fitted) > 1 else (0.0, added_s[0])
    return [ranks * row["single_s"] / (row["single_s"] + a + b * row["gradient_mb"]) for row in rows]


def category(records: Records) -> str:
    """Say whether the fit names the faster side in every other decided cell: "right", "wrong" or "inconclusive"."""
    rows, ranks = speedups(records), records[0].layout["world_size"]
    fitted = min(row["batch_size"] for row in rows)
    decided = [
        (guess > 1) == (row["speedup"].low > 1)
        for row, guess in zip(rows, predicted(rows, ranks), strict=True)
        if row["batch_size"] > fitted and measure.differs(row["speedup"])
    ]
    return "inconclusive" if not decided else "right" if all(decided) else "wrong"


def answer(records: Records) -> Iterator[str]:
    """Yield where DDP gains and where it loses."""
    rows = speedups(records)
    gains, losses = (sum(f(row["speedup"]) for row in rows) for f in (lambda e: e.low > 1, lambda e: e.high < 1))
    yield f"DDP is faster than one rank in {gains} of {len(rows)} cells and slower in {losses}."
    for word, choose in (("Slowest", min), ("Fastest", max)):
        row = choose(rows, key=lambda row: row["speedup"].value)
        yield f"{word}: width {row['width']}, batch {row['batch_size']}: {row['speedup']}."


if __name__ == "__main__":
    cli.main()
