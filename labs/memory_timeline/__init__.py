"""What grows from training step to training step, and which line allocated it?

    python -m labs.memory_timeline --nproc 1
    python -m labs.memory_timeline --nproc 1 --loops my_package.my_module:loop --model my_package.my_module:factory

About 2 s on 2 CPU cores. Rank 0 works, the other ranks wait. Runs a few steps of each loop while tracking every
tensor's lifetime: bytes by category over time, what remains after each step, and the line that allocated it. The
course's loops are none (no leak), losses, outputs, validation and hook, which each leak something. Your own loop takes
a labs.common.remedies.leaks.Job and yields after each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from labs.common import models
from labs.common.oracle.trace import CATEGORIES
from labs.common.remedies import leaks
from labs.kit.errors import BadInput, require
from labs.kit.lab import imported, require_findable
from labs.kit.measure import PREFIXES
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.memory_timeline import memory_steps

COURSE = tuple(name for name in leaks.LOOPS if name != leaks.LARGER)


@dataclass(frozen=True)
class Config:
    """Which loops, of which model."""

    loops: tuple[str, ...] = ("none", "validation")
    """Loops to watch: none, losses, outputs, validation, hook, or package.module:loop."""
    model: str = "mlp"
    """One of labs.models.MODELS, or package.module:factory."""
    batch_size: int = 256
    """Rows per step."""
    steps: int = 8
    """Steps per loop."""
    snapshot: Path | None = None
    """On a GPU: write the allocator's history of the last loop to this file, for pytorch.org/memory_viz."""
    seed: int = 0
    """Seed of the model and the data."""
    smoke: bool = False
    """Run four steps."""

    def __post_init__(self) -> None:
        require(len(self.loops) > 0, f"loops must hold some of {', '.join(COURSE)}, or package.module:loop")
        for name in self.loops:
            known = name in COURSE or ":" in name
            require(known, f"loops: there is no loop {name!r}: take {', '.join(COURSE)}, or package.module:loop")
            if name not in COURSE:
                require_findable(name, "loops")
        require(self.batch_size >= 1, f"batch_size must be at least 1, not {self.batch_size}")
        require(4 <= self.steps <= 1000, f"steps must be from 4 to 1000, not {self.steps}: growth needs a few")
        if self.snapshot is not None:
            folder = self.snapshot.absolute().parent
            require(folder.is_dir(), f"snapshot: there is no folder {folder}")
        models.require_known(self.model)


def check_layout(config: Config, world_size: int) -> None:
    """Raise BadInput if the model can't be built or a loop isn't callable."""
    models.build(config.model, config.seed)
    for name in config.loops:
        _loop(name)


def _loop(name: str) -> memory_steps.Loop:
    found = leaks.LOOPS[name] if name in COURSE else imported(name, "loops")
    if not callable(found):
        raise BadInput(f"loops: {name} must be a function that takes a job and yields after each step")
    return found


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Watch the loops one by one on rank 0."""
    if rank.rank == 0:
        for done, name in enumerate(config.loops, start=1):
            yield from _watched(config, name, rank)
            rank.progress(done, len(config.loops), name)
    rank.barrier()


def _watched(config: Config, name: str, rank: Rank) -> Iterator[Record]:
    rows = [config.batch_size] * (4 if config.smoke else config.steps)

    def job() -> leaks.Job:
        return leaks.job(models.make(config.model, config.seed), rows, rank.device)

    found = memory_steps.watch(job(), _loop(name))
    for category in CATEGORIES:
        case = {"loop": name, "category": category}
        yield rank.record("after_step_bytes", "B", found.after[category], rank=0, **case)
        yield rank.record("curve_bytes", "B", found.curve[category], rank=0, **case)
    yield rank.record("curve_step", "1", found.moments, rank=0, loop=name)
    yield rank.record("peak_bytes", "B", found.peak, rank=0, loop=name)
    if found.site:
        where = {"line": found.site.line, "code": found.site.code, "inner": found.site.inner}
        yield rank.record("held_share", "1", found.share, rank=0, loop=name, **where)
    if (expected := memory_steps.expected_growth(job(), name)) is not None:
        yield rank.record("expected_growth_bytes", "B", expected, rank=0, loop=name)
    if rank.device.type == "cuda":
        line, size = memory_steps.snapshot(job(), _loop(name), config.snapshot)
        yield rank.record("snapshot_bytes", "B", size, rank=0, loop=name, line=line)


def loops_of(run: Records) -> list[str]:
    """Return the watched loops, in order."""
    return list(dict.fromkeys(r.case["loop"] for r in run.where("peak_bytes")))


def growth(run: Records, loop: str) -> dict[str, float]:
    """Return the bytes that each step leaves behind, by category, where not 0."""
    found = {c: memory_steps.slope(run.one("after_step_bytes", loop=loop, category=c).samples) for c in CATEGORIES}
    return {c: size for c, size in found.items() if size}


def size_text(nbytes: float) -> str:
    """Format bytes, for example "1.23 MB"."""
    scale, prefix = next(((s, p) for s, p in PREFIXES if 1 <= s <= abs(nbytes)), (1.0, ""))
    return f"{nbytes / scale:.{2 if prefix else 0}f} {prefix}B"


def answer(run: Records) -> Iterator[str]:
    """Yield, for each loop, what a step leaves behind, its category and line, and what it should leave."""
    for loop in loops_of(run):
        grown, peak = growth(run, loop), run.one("peak_bytes", loop=loop).samples
        if not grown:
            yield f"Loop {loop}: no category grows from step to step; the peak of each step is {size_text(peak[-1])}."
            continue
        told = ", ".join(f"{size_text(size)} of {category}" for category, size in grown.items())
        yield (
            f"Loop {loop}: each step leaves {told}; the peak went from {size_text(peak[0])} in the first step to "
            f"{size_text(peak[-1])} in the last."
        )
        for r in run.where("held_share", loop=loop):
            inner = "" if r.case["inner"] == r.case["line"] else f" (innermost line: {r.case['inner']})"
            yield f"{100 * r.value:.0f} % of what is left comes from {r.case['line']}: {r.case['code']}{inner}."
        for r in run.where("expected_growth_bytes", loop=loop):
            equal = "the same" if r.value == sum(grown.values()) else "not the same"
            yield f"Counted without the tracker, a step should leave {r.value:,.0f} bytes: {equal}."
