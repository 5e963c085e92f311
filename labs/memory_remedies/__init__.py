"""Memory runs out: which of the remedies takes away how much, and of what?

    python -m labs.memory_remedies --nproc 1
    python -m labs.memory_remedies --nproc 1 --parts remedies --models char_gpt mlp --rows 32 16

About 13 s on 2 CPU cores. Rank 0 works, the other ranks wait.
  accumulation   one batch cut into micro-batches: peak, gradient, time
  remedies       each remedy on a model full of activations and on one full of states
  leaks          training loops that hold on to tensors: bytes after each step, the peak so far, the line they come from
Peaks are those of torch's allocator, on a CPU as the profiler lists what it hands out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from labs.common import models
from labs.common.oracle.reality import measured
from labs.common.oracle.step import step
from labs.common.remedies import leaks as leaking
from labs.kit import measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.memory_remedies import ways_out
from labs.memory_remedies.offload import offloaded
from labs.memory_remedies.ways_out import predict

Part = Literal["accumulation", "remedies", "leaks"]
SMOKE = {
    "models": ("mlp",),
    "rows": (16,),
    "cuts": (1, 2),
    "steps": 3,
}  # with --smoke in a shell


@dataclass(frozen=True)
class Config:
    """Which parts, and how large they are."""

    parts: tuple[Part, ...] = Part.__args__
    """Parts to run."""
    models: tuple[str, ...] = ("char_gpt", "mlp")
    """Models of remedies: of labs.models.MODELS, or package.module:factory. Other parts take the first one."""
    rows: tuple[int, ...] = (32, 16)
    """Rows of a step of each model."""
    cuts: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of micro-batches of accumulation."""
    seconds: float = 0.8
    """Time for all rounds of accumulation, in s. A slower machine takes fewer rounds and has wider intervals."""
    rounds: int | None = None
    """Times that their steps take turns; by default as many as fit into `seconds`, at least 6."""
    steps: int = 8
    """Steps of each loop of leaks."""
    seed: int = 0
    """Seed of models and data."""
    smoke: bool = False
    """Fewer micro-batches and remedies."""

    def __post_init__(self) -> None:
        require(len(self.parts) > 0, f"parts must hold some of {', '.join(Part.__args__)}")
        same = f"rows must hold one number for each of the {len(self.models)} models, not {len(self.rows)}"
        require(len(self.models) == len(self.rows) > 0, same)
        require(min(self.rows) >= 4, f"rows must be at least 4, for 4 micro-batches, not {min(self.rows)}")
        require(len(self.cuts) > 0 and min(self.cuts) >= 1, "cuts must hold positive numbers")
        require(1 in self.cuts, "cuts must hold 1: the whole batch is what the others are compared with")
        require(
            max(self.cuts) <= self.rows[0],
            f"cuts must be at most {self.rows[0]}, the rows of {self.models[0]}, not {max(self.cuts)}",
        )
        measure.require_budget(self.seconds, self.rounds)
        require(self.steps >= 3, f"steps must be at least 3, not {self.steps}: growth needs a first and a last one")
        models.require_known(*self.models, option="models")


def check_layout(config: Config, world_size: int) -> None:
    """BadInput if a model cannot be built."""
    for name in config.models:
        models.build(name, config.seed)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Part by part, on rank 0."""
    if rank.rank == 0:
        for done, part in enumerate(config.parts, start=1):
            yield from PARTS[part](config, rank)
            rank.progress(done, len(config.parts), part)
    rank.barrier()


def accumulation(config: Config, rank: Rank) -> Iterator[Record]:
    """(D24, B34) The same batch in m micro-batches: the step's peak, its gradient, its time."""
    model, rows, cuts = config.models[0], config.rows[0], config.cuts[:3] if config.smoke else config.cuts
    case = {"part": "accumulation", "model": model, "rows": rows}
    workload = models.make(model, config.seed)
    workload.module.to(rank.device)
    x, y = (t.to(rank.device) for t in workload.make_batch(rows))
    whole = step(workload, rows, optimizer="adam", target=rank.device.type).peak
    trained = models.gradient_bytes(workload.module)
    for m in cuts:
        peak = measured(workload, rows, rank.device, optimizer="adam", micro_batches=m).peak_bytes
        yield rank.record("peak_bytes", "B", peak, rank=0, micro_batches=m, **case)
        closed = predict(whole, m, trained)
        yield rank.record("predicted_bytes", "B", closed, kind="modelled", rank=0, micro_batches=m, **case)
    true = ways_out.gradient(workload, x, y, 1)
    for m in cuts:
        error = (ways_out.gradient(workload, x, y, m) - true).norm() / true.norm()
        yield rank.record("gradient_error", "1", error.item(), rank=0, micro_batches=m, **case)
    steps, rounds = ways_out.steps(workload, x, y, cuts), measure.rounds_of(config)
    seconds = measure.interleave(steps, rounds, rank.device)
    for m, samples in seconds.items():
        yield rank.record("step_s", "s", samples, rank=0, micro_batches=m, **case)


def remedies(config: Config, rank: Rank) -> Iterator[Record]:
    """(B41, D24, C28) Peak bytes of each model under each remedy, and what they consist of."""
    for model, rows in zip(config.models, config.rows, strict=True):
        plain, full_of = models.make(model, config.seed), ""
        for remedy in ways_out.SMOKE if config.smoke else ways_out.REMEDIES:
            n, conditions = ways_out.conditions(remedy, rows)
            workload = offloaded(plain) if remedy == ways_out.OFFLOAD else plain
            trace = step(workload, n, target=rank.device.type, **conditions)
            parts = ways_out.peak_parts(trace, remedy)
            full_of = full_of or ways_out.dominated_by(parts)
            case = {"part": "remedies", "model": model, "remedy": remedy, "full_of": full_of, "rows": n}
            for category, size in parts.items():
                yield rank.record("part_bytes", "B", size, kind="modelled", rank=0, category=category, **case)
            peak_in = trace.peak_event.phase
            yield rank.record("predicted_bytes", "B", sum(parts.values()), kind="modelled", rank=0, at=peak_in, **case)
            if remedy != ways_out.LEAN:
                peak = measured(workload, n, rank.device, **conditions).peak_bytes
                yield rank.record("peak_bytes", "B", peak, rank=0, **case)


def leaks(config: Config, rank: Rank) -> Iterator[Record]:
    """(B40) Loops with and without a leak: live bytes after each step, the peak so far, where what is left was made."""
    for name, loop in leaking.LOOPS.items():
        workload = models.make(config.models[0], config.seed)
        job = leaking.job(workload, [8] * config.steps, rank.device, larger=name == leaking.LARGER)
        found = leaking.watch(job, loop)
        case = {"part": "leaks", "loop": name, "leaks": name in leaking.LEAKS}
        yield rank.record("live_bytes", "B", found.live_bytes, rank=0, **case)
        yield rank.record("peak_so_far_bytes", "B", found.peak_bytes, rank=0, **case)
        yield rank.record("growth_bytes", "B", found.growth_bytes, rank=0, **case)
        if found.growth_bytes > 0:
            site = found.site
            where = {"line": site.line, "code": site.code, "made_in": site.inner, "op": site.op}
            yield rank.record("site_share", "1", found.share, rank=0, **where, **case)


def separates(records: Records, metric: str) -> bool:
    """Whether every loop that leaks has a last `metric` above those of all loops that do not."""
    clean, leaky = ([r.samples[-1] for r in records.where(metric, leaks=leaks)] for leaks in (False, True))
    return min(leaky) > max(clean)


def answer(run: Records) -> Iterator[str]:
    """Which remedy takes most off each model's peak, what micro-batches cost, what tells a leak, in sentences."""
    for none in run.where("peak_bytes", part="remedies", remedy="none"):
        case = {"part": "remedies", "model": none.case["model"]}
        left = {r.case["remedy"]: r.value / none.value for r in run.where("peak_bytes", **case) if r is not none}
        best, worst = (pick(left, key=left.__getitem__) for pick in (min, max))
        yield (
            f"{none.case['model']}, full of {none.case['full_of']} ({none.value / 1e6:.1f} MB): {best} leaves "
            f"{100 * left[best]:.0f} % of the peak, {worst} leaves {100 * left[worst]:.0f} %."
        )
    if steps := {r.case["micro_batches"]: r.samples for r in run.where("step_s", part="accumulation")}:
        most, error = max(steps), max(r.value for r in run.where("gradient_error", part="accumulation"))
        if most > 1:
            yield (
                f"{most} micro-batches take {measure.paired_ratio(steps[most], steps[1])} the time of the "
                f"whole batch; "
                f"gradients differ by at most {error:.1g} (relative)."
            )
    if run.where("growth_bytes", part="leaks"):
        yield (
            "Growth from step to step tells every loop that leaks from those that do not"
            + ("; the peak alone does, too." if separates(run, "peak_so_far_bytes") else "; the peak alone does not.")
            if separates(run, "growth_bytes")
            else "Growth does not tell all leaks in this run."
        )


PARTS: dict[str, Callable[[Config, Rank], Iterator[Record]]] = {
    "accumulation": accumulation,
    "remedies": remedies,
    "leaks": leaks,
}
