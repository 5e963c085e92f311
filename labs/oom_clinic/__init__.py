"""What filled the memory, and which cure helps?

    python -m labs.oom_clinic --nproc 1
    python -m labs.oom_clinic --nproc 1 --parts ends --seeds 0 1 2 --sizes 0.8 1 1.5
    python -m labs.oom_clinic --nproc 1 --parts cures --causes batch states graph

About 20 s on 2 CPU cores. Small programs run out of memory, each by another cause, each in a process of its own that a
limit ends: a limit of the kernel, a small /dev/shm, or a watcher that kills as the kernel's out-of-memory killer does.
From the signs alone (levels, growth from step to step, in which process, message, exit code) the cause is named. Then
each cure is tried on each program without a limit: the memory that it takes at most, with the cure and without. It all
happens in the host's memory, on a machine with GPUs, too. empty_cache does nothing there: malloc_trim is tried in its
place.

Records, case fields in brackets:
  named            1 if the cause that was planted is the one named [cause, end, size, seed, named, sentence, message,
                   exit_code, steps]
  level_bytes      the most, above the start [of: trainer, workers, shared, states, activations, batches; and as above]
  growth_bytes     what each step leaves [of: trainer, workers, tensors, batches; and as above]
  left             what each step leaves, in numbers [of: tensors, nodes; and as above]
  needed_bytes     the most that a program takes of the memory that it runs out of [cause, cure ("none": as it is),
                   memory: trainer, workers, shared, addresses]
  tensor_bytes     the most bytes of tensors in the trainer [cause, cure]
  left_bytes       what each step still leaves in the trainer [cause, cure]
  predicted_bytes  needed_bytes by a formula, for the causes that have one [cause, cure]
  left_over        processes that are still there in the end, and bytes in /dev/shm of this run [of: processes]
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from labs.common.oracle.step import step
from labs.common.traps.datasets import workers_now
from labs.common.traps.shm import in_flight_bytes
from labs.kit.errors import require
from labs.kit.rank import Rank, unpinned
from labs.kit.record import Record, Records
from labs.oom_clinic import memory_end, memory_faults
from labs.oom_clinic.memory_end import OLD_HABITS, Signs, Trial, run_until_end
from labs.oom_clinic.memory_faults import CURES, ENDS, LOADER, MIB, TRIM, WHAT, Cure

Part = Literal["ends", "cures"]
NOBODY = "none"
END_STEPS, CURE_STEPS = 20, 5
LEAKS = ("graph", "outputs", "closure", "python_objects")
SAME_SAMPLES = "it runs for the same number of samples, so for twice as many steps"
INSTEAD = "in place of empty_cache, which does nothing on a CPU"
LEAST_SHARE, LEAST_BYTES = 0.1, 4 * MIB
"""A cure that gives less than this share of what is needed, or less than these bytes, gave nothing: two runs of one
program differ by up to 3 MB of resident memory."""
SMOKE = {"causes": ("states", "graph", "shared_memory"), "cures": ("half the batch", "detach()")}


@dataclass(frozen=True)
class Config:
    """Which programs, how large, and which cures."""

    parts: tuple[Part, ...] = Part.__args__
    """ends: run out and name the cause; cures: try each cure on each."""
    causes: tuple[str, ...] = tuple(WHAT)
    """What fills the memory."""
    cures: tuple[str, ...] = tuple(CURES)
    """What is tried against it."""
    sizes: tuple[float, ...] = (1.0,)
    """How large the programs are, and their limits with them; each takes some 100 MB at size 1."""
    seeds: tuple[int, ...] = (0,)
    """Each draws a size within 20 % of those above, and the programs' numbers."""
    at_once: int = 2
    """Programs that run at the same time; more than there are cores makes all slower."""
    smoke: bool = False
    """One kind of end, and each cure on one cause only; from a shell four causes and two cures."""

    def __post_init__(self) -> None:
        require(len(self.parts) > 0, f"parts must hold some of {', '.join(Part.__args__)}")
        for name, given, known in (("causes", self.causes, WHAT), ("cures", self.cures, CURES)):
            require(len(given) > 0, f"{name} must hold some of {', '.join(known)}")
            unknown = sorted(set(given) - set(known))
            require(not unknown, f"{name}: there is no {', '.join(unknown)}; there are {', '.join(known)}")
        require(len(self.sizes) > 0 and len(self.seeds) > 0, "sizes and seeds must hold one number at least")
        require(all(0.5 <= s <= 20 for s in self.sizes), f"sizes must be from 0.5 to 20, not {self.sizes}")
        require(all(s >= 0 for s in self.seeds), f"seeds must not be negative: {self.seeds}")
        require(1 <= self.at_once <= 64, f"at_once must be from 1 to 64, not {self.at_once}")


class Diagnosis(NamedTuple):
    """The cause and why it is that one."""

    cause: str
    sentence: str


def name(s: Signs) -> Diagnosis:
    """The cause, from signs alone: what the message says, who has most, what grows, what it consists of."""
    if re.search(r"shared memory|bus error|/torch_", s.message, re.IGNORECASE):
        return Diagnosis(
            "shared_memory", "The message is about shared memory, through which workers hand batches over."
        )
    if s.shared > max(s.trainer, s.workers):
        return Diagnosis("prefetch", f"{_mb(s.shared)} lie in shared memory: batches that are ready and wait.")
    if s.workers > s.trainer:
        if s.steps * s.worker_growth > SHARE_OF_LEAK * s.workers:
            return Diagnosis(
                "worker_objects",
                f"The workers grow by {_mb(s.worker_growth)} per step, to {_mb(s.workers)}: they copy what they read.",
            )
        if s.steps < 3:
            return Diagnosis(
                "worker_buffers",
                f"The workers hold {_mb(s.workers)}. It was killed after {s.steps} "
                f"steps, too early to see growth: that their number counts {GUESSED}.",
            )
        return Diagnosis("worker_buffers", f"The workers hold {_mb(s.workers)} and do not grow: their number counts.")
    if s.steps * s.trainer_growth > SHARE_OF_LEAK * s.trainer:
        return _leak(s)
    refused = re.search(r"allocate memory|MemoryError|Errno 12", s.message)
    tried = asked_for(s.message)
    if refused and s.limit_bytes and s.trainer + tried < 0.5 * s.limit_bytes:
        return Diagnosis(
            "address_space",
            f"It had {_mb(s.trainer)} when it was refused more, far less than the "
            f"{_mb(s.limit_bytes)} that it may have: addresses are counted.",
        )
    if s.exit_code == 0 and s.message == "":
        return Diagnosis(NOBODY, "It came to its end, and nothing grows.")
    if not s.tensors:
        return Diagnosis("unknown", "Nothing grows, and nobody has counted the bytes of tensors.")
    if s.states > s.activations:
        return Diagnosis(
            "states",
            f"Nothing grows. {_mb(s.states)} are parameters, gradients and the optimizer's, "
            f"{_mb(s.activations)} activations.",
        )
    return Diagnosis(
        "batch",
        f"Nothing grows. {_mb(s.activations)} are activations, {_mb(s.states)} parameters, "
        "gradients and the optimizer's.",
    )


GUESSED = "is a guess"
"""In the sentence of a cause whose signs fit another one, too."""
SHARE_OF_LEAK = 0.25
"""Share of the level that has grown from step to step, from which on a leak is what filled the memory."""


def _leak(s: Signs) -> Diagnosis:
    """Which one, where the trainer grows."""
    tensors, per_step = sum(s.live_growth.values()), f"Each step leaves {_mb(s.trainer_growth)}"
    if tensors < 0.5 * s.trainer_growth:
        return Diagnosis(
            "python_objects", f"{per_step} in the trainer, {_mb(tensors)} of tensors: the rest is Python's."
        )
    if s.live_growth["inputs/buffers"] > 0.5 * tensors:
        return Diagnosis("closure", f"{per_step}, and they are batches: something remembers them.")
    if s.nodes_left > 0.5 and s.tensors_left > 2.5:
        return Diagnosis(
            "graph", f"{per_step}: {s.tensors_left:.0f} tensors that {s.nodes_left:.0f} nodes of autograd keep."
        )
    return Diagnosis("outputs", f"{per_step}: {s.tensors_left:.0f} tensor, and no graph that would hold it.")


def asked_for(message: str) -> float:
    """Bytes that a message of torch's allocator of the CPU's memory says were asked for; 0: not told."""
    hit = re.search(r"tried to allocate (\d+) bytes", message)
    return float(hit[1]) if hit else 0.0


def predict(cause: str, cure: Cure) -> float | None:
    """Bytes that the program needs at size 1 of the memory that it runs out of; None where there is no formula.

    A training step is traced without memory (labs.memory_oracle); what loaders have under way is counted.
    """
    if cause in ("batch", "states"):
        width, rows = (32, memory_faults.BATCH_ROWS) if cause == "batch" else (memory_faults.WIDE, memory_faults.FEW)
        source = functools.partial(memory_end.workload, width)
        return float(step(source, round(rows * cure.rows), **{**OLD_HABITS, **cure.conditions}).peak_bytes)
    if cause in ("prefetch", "shared_memory"):
        items, workers, factor = (4, 2, 8) if cause == "prefetch" else (8, 1, 2)
        workers, factor = cure.loader.get("workers", workers), cure.loader.get("prefetch", factor)
        return float(in_flight_bytes(workers, factor, round(items * cure.rows) * MIB))
    return None


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Rank 0 lets programs run out, other ranks wait."""
    if rank.rank == 0:
        before = {w.pid for w in workers_now()}
        if not memory_end.LINUX:
            print("oom_clinic: nothing is tried: limits and counts of a process's memory are Linux's here")
        with unpinned(rank):
            for part in config.parts:
                yield from PARTS[part](config, rank)
        left = {w.pid for w in workers_now()} - before
        yield rank.record("left_over", "processes", len(left), rank=0, of="processes")
    rank.barrier()


def ends(config: Config, rank: Rank) -> Iterator[Record]:
    """Each program to its end, and the name of its cause."""
    trials = [
        Trial(cause, end, memory_faults.limit_bytes(cause, size), size, END_STEPS, seed)
        for seed in config.seeds
        for size in (s * random.Random(seed).uniform(0.8, 1.2) for s in config.sizes)
        for cause, (kinds, _) in ENDS.items()
        for end in (kinds[:1] if config.smoke else kinds)
        if cause in config.causes and memory_end.LINUX
    ]
    trials += [Trial("healthy", seed=seed, size=size) for seed in config.seeds for size in config.sizes][: len(trials)]
    for done, (trial, signs) in enumerate(zip(trials, _run(trials, config, rank), strict=True), 1):
        planted = NOBODY if trial.cause == "healthy" else trial.cause
        case = {"cause": planted, "end": trial.end, "size": round(trial.size, 3), "seed": trial.seed}
        yield from _of_signs(signs, case, rank)
        rank.progress(done, len(trials), f"{planted}, {trial.end}")


def _run(trials: list[Trial], config: Config, rank: Rank) -> Iterator[Signs]:
    """By fork, unless this process has a GPU: a fork of it could not run backward."""
    return run_until_end(trials, config.at_once, "fork" if rank.device.type == "cpu" else "forkserver")


def _of_signs(s: Signs, case: dict, rank: Rank) -> Iterator[Record]:
    named = name(s)
    case |= {"exit_code": s.exit_code, "steps": s.steps, "message": s.message}
    yield rank.record(
        "named",
        "",
        float(named.cause == case["cause"]),
        rank=0,
        named=named.cause,
        sentence=named.sentence,
        **case,
    )
    levels = {
        "trainer": s.trainer,
        "workers": s.workers,
        "shared": s.shared,
        "states": s.states,
        "activations": s.activations,
        "batches": s.live["inputs/buffers"],
    }
    growth = {
        "trainer": s.trainer_growth,
        "workers": s.worker_growth,
        "tensors": sum(s.live_growth.values()),
        "batches": s.live_growth["inputs/buffers"],
    }
    for of, value in levels.items():
        yield rank.record("level_bytes", "B", value, rank=0, of=of, **case)
    for of, value in growth.items():
        yield rank.record("growth_bytes", "B/step", value, rank=0, of=of, **case)
    for of, value in {"tensors": s.tensors_left, "nodes": s.nodes_left}.items():
        yield rank.record("left", "1/step", value, rank=0, of=of, **case)


def cures(config: Config, rank: Rank) -> Iterator[Record]:
    """What each program takes as it is, and with each cure."""
    named = {NOBODY: Cure(), **{c: CURES[c] for c in config.cures}}
    todo = [
        (cause, cure)
        for cause in ENDS
        for cure in named
        if cause in config.causes and memory_end.LINUX and (cure == NOBODY or named[cure].applies(cause))
    ]
    if config.smoke:  # each cause as it is, and each cure once
        first = {cure: cause for cause, cure in reversed(todo)}
        todo = [(cause, cure) for cause, cure in todo if cure == NOBODY or cause == first[cure]]
    trials = [Trial(cause, steps=_steps(cause, named[cure]), cure=named[cure]) for cause, cure in todo]
    for done, ((cause, cure), s) in enumerate(zip(todo, _run(trials, config, rank), strict=True), 1):
        case = {"cause": cause, "cure": cure}
        if s.exit_code:
            yield rank.record("failed", "", 1.0, rank=0, message=s.message, exit_code=s.exit_code, **case)
            continue
        memory = memory_of(cause)
        needed = {"trainer": s.resident_peak, "workers": s.workers, "shared": s.shared, "addresses": s.addresses}
        yield rank.record("needed_bytes", "B", needed[memory], rank=0, memory=memory, **case)
        yield rank.record("tensor_bytes", "B", s.tensors, rank=0, **case)
        yield rank.record("left_bytes", "B/step", s.trainer_growth, rank=0, **case)
        if (expected := predict(cause, named[cure])) is not None:
            yield rank.record("predicted_bytes", "B", expected, kind="modelled", rank=0, **case)
        rank.progress(done, len(todo), f"{cause}: {cure}")


def _steps(cause: str, cure: Cure) -> int:
    """So many that a program has the same number of samples with a smaller batch: a leak is per sample."""
    steps = memory_faults.STEPS.get(cause, CURE_STEPS)
    return math.ceil(steps / cure.rows) if cause in LEAKS else steps


def memory_of(cause: str) -> str:
    """Which memory a cause fills."""
    return {"prefetch": "shared", "shared_memory": "shared", "address_space": "addresses"}.get(
        cause, "workers" if cause in LOADER else "trainer"
    )


PARTS = {"ends": ends, "cures": cures}


# What came out -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """What a cure gave."""

    needed: float
    """Bytes without it."""
    saved: float
    """Bytes less; below 0: it takes more."""
    postpones: bool = False
    """Whether the program still grows from step to step, as it does without the cure: it runs out later."""

    @property
    def share(self) -> float:
        """Saved, of what was needed."""
        return self.saved / self.needed

    @property
    def is_nothing(self) -> bool:
        """Whether it is within what two runs of one program differ by."""
        return abs(self.saved) < max(LEAST_BYTES, LEAST_SHARE * self.needed)


def given(run: Records) -> dict[str, dict[str, Given]]:
    """{cause: {cure: what it gave}}: the cells of the table. Cures that have nothing to change are not in it."""
    found: dict[str, dict[str, Given]] = {}
    for base in run.where("needed_bytes", cure=NOBODY):
        cause = base.case["cause"]
        rows = {r.case["cure"]: r.value for r in run.where("needed_bytes", cause=cause) if r is not base}
        left = {r.case["cure"]: r.value for r in run.where("left_bytes", cause=cause) if cause in LEAKS}
        found[cause] = {
            cure: Given(base.value, base.value - needed, left.get(cure, 0.0) > LEAST_SHARE * left.get(NOBODY, 0.0))
            for cure, needed in rows.items()
        }
    return found


def is_later(found: Given) -> bool:
    """Whether it gave something, but the program grows on."""
    return found.postpones and found.saved > 0 and not found.is_nothing


def helpful(run: Records, cause: str) -> list[str]:
    """Cures that gave something for good, the one that gave most first."""
    cells = given(run)[cause]
    found = (c for c, g in cells.items() if g.saved > 0 and not g.is_nothing and not g.postpones)
    return sorted(found, key=lambda c: -cells[c].saved)


def confusion(run: Records) -> dict[tuple[str, str], int]:
    """{(planted, named): runs}."""
    found: dict[tuple[str, str], int] = {}
    for r in run.where("named"):
        pair = r.case["cause"], r.case["named"]
        found[pair] = found.get(pair, 0) + 1
    return found


def answer(run: Records) -> Iterator[str]:
    """How often the cause was named, what it looked like, and which cure gave most for each."""
    if rows := run.where("named"):
        wrong = [f"{a} as {b}" for (a, b) in confusion(run) if a != b]
        right = sum(int(r.value) for r in rows)
        yield (
            f"{right} of {len(rows)} programs were named right by their signs"
            + (f"; taken for another: {', '.join(wrong)}." if wrong else ".")
        )
    table = {cause: cells for cause, cells in given(run).items() if cells}
    if table:
        best = {cause: helpful(run, cause) for cause in table}
        said = (
            f"{WHAT[c]}: {b[0]}, {_mb(table[c][b[0]].saved)} of {_mb(table[c][b[0]].needed)}"
            for c, b in best.items()
            if b
        )
        yield f"What gives most, by what filled the memory: {'; '.join(said)}."
        if alone := [WHAT[c] for c, b in best.items() if not b]:
            yield f"None of the cures tried helps against: {'; '.join(alone)}."
        for cure, note in (("half the batch", ""), (TRIM, f" ({INSTEAD})")):
            tried = [c for c in table if cure in table[c]]
            helps = [WHAT[c] for c in tried if cure in best[c]]
            if tried:
                yield f"Of {len(tried)}, {cure}{note} helps against {len(helps)}: {'; '.join(helps) or 'none'}."
        if leaks := [c for c in table if c in LEAKS and "half the batch" in table[c]]:
            yield f"{len(leaks)} are leaks, to which half the batch does nothing by definition: {SAME_SAMPLES}."
        later = [f"{cure} ({WHAT[c]})" for c in table for cure, g in table[c].items() if is_later(g)]
        if later:
            yield f"It only comes later with {', '.join(later)}: each step still leaves something."
    for r in run.where("failed"):
        yield f"{r.case['cause']} with {r.case['cure']} failed: {r.case['message']}"


def _mb(size: float) -> str:
    return f"{size / 1e6:.1f} MB" if abs(size) < 10e6 else f"{size / 1e6:.0f} MB"
