"""How do many ranks save one model, how long does training stand still, and who notices a damaged file?

    python -m labs.sharded_checkpoint
    torchrun --nproc-per-node 2 -m labs.sharded_checkpoint --width 4096 --folder /mnt/shared

About 12 s on 2 CPU cores. Model and optimizer are sharded over the ranks (FSDP2), so that each rank writes its own
part with torch.distributed.checkpoint; the same files are then loaded by another number of ranks. With several
machines, `folder` must be one that all of them see.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.optim import Optimizer

from labs.kit import measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.kit.supervise import watched_folder
from labs.sharded_checkpoint import damage, sharded_model, shards

MODES = ("gathered", "save", "async_save")
ALONE = 2  # steps without a save, once a round: what those during a save are compared with


@dataclass(frozen=True)
class Config:
    """The model, whose state is 12 bytes per parameter, and where to save it."""

    width: int = 2048
    """Width of the perceptron's layers."""
    layers: int = 2
    """Layers of width x width parameters."""
    batch_size: int = 64
    """Rows per rank and training step."""
    seconds: float = 4.5
    """Time for all rounds, in s. A slower machine takes fewer rounds and has wider intervals."""
    rounds: int | None = None
    """Times that each way to save is timed, in turn; by default as many as fit into `seconds`, at least 6."""
    folder: Path | None = None
    """Where to save; without it a temporary folder of this machine. What is saved is deleted in the end."""
    smoke: bool = False
    """A small model, two rounds."""

    def __post_init__(self) -> None:
        require(self.width >= 1, f"width must be at least 1, not {self.width}")
        require(self.layers >= 1, f"layers must be at least 1, not {self.layers}")
        require(self.batch_size >= 1, f"batch_size must be at least 1, not {self.batch_size}")
        measure.require_budget(self.seconds, self.rounds)
        writable = self.folder is None or (self.folder.is_dir() and os.access(self.folder, os.W_OK))
        require(writable, f"cannot write to {self.folder}: name a folder that is there")


def predict(width: int, layers: int, ranks: int) -> list[int]:
    """Bytes of model and AdamW state that each rank holds: parameters and two moments, split by rows, in FP32.

    FSDP2 gives ceil(rows / ranks) rows to each rank while there are any. The step count of each parameter is a tensor
    of 4 bytes that every rank has.
    """
    each = -(-width // ranks)
    rows = (max(0, min(each, width - rank * each)) for rank in range(ranks))
    return [layers * (3 * 4 * (width + 1) * r + 2 * 4) for r in rows]


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Three ways to save a large model; then a small one is saved and loaded by other numbers of ranks, and damaged."""
    width = 256 if config.smoke else config.width
    background = dist.new_group(backend="gloo")  # a save in a thread must not share a group with training
    with watched_folder(config.folder) if rank.rank == 0 else nullcontext() as folder:
        folder = rank.gather(folder)[0]
        yield from ways_to_save(width, folder, background, config, rank)
        groups = groups_of({n for pair in _pairs(rank.world_size) for n in pair})
        for saved_by, loaded_by in _pairs(rank.world_size):
            yield from other_ranks(saved_by, loaded_by, folder, groups, rank)
        rank.progress(1, 2, "another number of ranks")
        yield from damaged(folder, rank)
        rank.progress(2, 2, "damaged files")


def ways_to_save(
    width: int, folder: Path, background: dist.ProcessGroup, config: Config, rank: Rank
) -> Iterator[Record]:
    """Stall and whole time of each way, in turn, with training going on; then what each has written."""
    module, optimizer = sharded_model.make(width, config.layers, sharded_model.mesh(rank.world_size, rank), rank)
    x = torch.randn(config.batch_size, width, device=rank.device)

    def step() -> None:
        sharded_model.train_step(module, optimizer, x)

    step()
    yield rank.record("state_bytes", "B", shards.local_bytes(shards.state_of(module, optimizer)), rank=rank.rank)
    predicted = predict(width, config.layers, rank.world_size)[rank.rank]
    yield rank.record("state_bytes", "B", predicted, kind="modelled", rank=rank.rank)

    found: dict[str, list[Saved]] = {mode: [] for mode in MODES}

    def save(mode: str) -> None:
        found[mode].append(timed(mode, module, optimizer, step, folder / mode, background, rank))

    alone: list[float] = []

    def steps_alone() -> None:
        rank.barrier()
        alone.extend(measure.time_steps(step, ALONE, rank.device))

    saves = {mode: partial(save, mode) for mode in MODES} | {"alone": steps_alone}
    measure.interleave(
        saves,
        measure.rounds_of(config, rank.slowest),
        rank.device,
        on_round=lambda done, total: rank.progress(done, total + 2, "saving"),
    )
    for mode, saves in found.items():
        yield rank.record("stall_s", "s", rank.slowest([s.stall_s for s in saves]), mode=mode)
        yield rank.record("total_s", "s", rank.slowest([s.total_s for s in saves]), mode=mode)
        yield rank.record("steps_during", "steps", [len(s.step_s) for s in saves], mode=mode)
    yield rank.record("step_s", "s", rank.slowest(alone), when="alone")
    if during := [t for s in found["async_save"] for t in s.step_s]:
        yield rank.record("step_s", "s", rank.slowest(during), when="during async_save")
    usual = [sum(alone[i : i + ALONE]) / ALONE for i in range(0, len(alone), ALONE)]  # of each round
    for mode, saves in found.items():
        lost = [s.stall_s + sum(s.step_s) - len(s.step_s) * t for s, t in zip(saves, usual, strict=True)]
        yield rank.record("lost_s", "s", rank.slowest(lost), mode=mode)
    yield from snapshot(module, optimizer, step, folder / "snapshot", background, rank)


@dataclass
class Saved:
    """One save, as one rank saw it."""

    stall_s: float = 0.0
    """Training stands still."""
    total_s: float = 0.0
    """Until all is on the disk."""
    step_s: tuple[float, ...] = ()
    """Training steps that were taken meanwhile."""


def timed(
    mode: str,
    module: nn.Module,
    optimizer: Optimizer,
    step: Callable,
    folder: Path,
    background: dist.ProcessGroup,
    rank: Rank,
) -> Saved:
    """Save in one way to `folder`, which is deleted afterwards; train until it is done."""
    saved, futures = Saved(), []

    def start() -> None:
        if mode == "gathered":
            gathered(module, optimizer, folder, rank)
        elif mode == "save":
            dcp.save(shards.state_of(module, optimizer), checkpoint_id=folder)
        else:  # copies the state, then writes the copy in a thread
            state = shards.state_of(module, optimizer)
            futures.append(dcp.async_save(state, checkpoint_id=folder, process_group=background))

    rank.barrier()
    began = time.perf_counter()
    saved.total_s = saved.stall_s = measure.time_steps(start, 1, rank.device)[0]
    for future in futures:
        # Called in the thread that writes, at its end, which comes in the middle of a step.
        future.add_done_callback(lambda _: setattr(saved, "total_s", time.perf_counter() - began))
        while not rank.agree(future.done()):  # every rank takes the same steps
            saved.step_s += (*measure.time_steps(step, 1, rank.device),)
        future.result()  # raises what went wrong in the thread
    rank.barrier()
    if rank.rank == 0:
        shutil.rmtree(folder)
    return saved


def gathered(module: nn.Module, optimizer: Optimizer, folder: Path, rank: Rank) -> None:
    """The whole state on rank 0, in its memory, in one file; all others wait."""
    everything = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_state_dict(module, optimizer, options=everything)
    if rank.rank == 0:
        folder.mkdir()
        with (folder / "whole.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # as DCP does
    rank.barrier()


def snapshot(
    module: nn.Module, optimizer: Optimizer, step: Callable, folder: Path, background: dist.ProcessGroup, rank: Rank
) -> Iterator[Record]:
    """Is what async_save writes the state at the moment of the call, though training went on? And what checks cost."""
    state = shards.state_of(module, optimizer)
    before = [shards.local(t).clone() for _, t in shards.tensors(state)]
    future, steps = dcp.async_save(state, checkpoint_id=folder, process_group=background), 0
    while not rank.agree(future.done()) or not steps:
        step()
        steps += 1
    future.result()
    for name, check in (("seal_s", shards.seal), ("verify_s", shards.verify)):
        yield rank.record(name, "s", rank.slowest(measure.time_steps(lambda c=check: c(folder), 1, rank.device)))
    state = shards.state_of(module, optimizer)
    seconds = measure.time_steps(lambda: dcp.load(state, checkpoint_id=folder), 1, rank.device)
    yield rank.record("load_s", "s", rank.slowest(seconds))
    equal = all(torch.equal(a, shards.local(t)) for a, (_, t) in zip(before, shards.tensors(state), strict=True))
    yield rank.record("is_snapshot", "1", float(rank.agree(equal)), steps=steps)
    if rank.rank == 0:
        files = [path for path in sorted(folder.iterdir()) if path.name != shards.SUMS]
        yield from (rank.record("file_bytes", "B", p.stat().st_size, rank=0, file=p.name) for p in files)


def _pairs(world_size: int) -> list[tuple[int, int]]:
    """(saved by, loaded by) numbers of ranks: all, one, and one less than all."""
    counts = {1, max(1, world_size - 1), world_size}
    return [(a, b) for a in sorted(counts) for b in sorted(counts) if a != b] or [(1, 1)]


def groups_of(counts: set[int]) -> dict[int, dist.ProcessGroup]:
    """The first n ranks as a gloo group, for each n, made by these ranks alone; None on the others.

    By default all ranks take part, and on GPUs those outside would wait in an NCCL call that no member makes. So made,
    a group is named after its ranks and the number of groups that each of them is in, which must be the same number:
    the largest group comes first.
    """
    largest_first = sorted(counts, reverse=True)
    return {n: dist.new_group(list(range(n)), backend="gloo", use_local_synchronization=True) for n in largest_first}


def other_ranks(
    saved_by: int, loaded_by: int, folder: Path, groups: dict[int, dist.ProcessGroup], rank: Rank
) -> Iterator[Record]:
    """Train and save on the first `saved_by` ranks, load on the first `loaded_by`, compare every bit."""
    target, expected = folder / f"{saved_by}-to-{loaded_by}", {}
    for ranks, loads in ((saved_by, False), (loaded_by, True)):
        group = groups[ranks]
        mesh = sharded_model.mesh(ranks, rank) if ranks > 1 else None  # one rank holds a plain model
        if rank.rank < ranks:
            module, optimizer = sharded_model.small(mesh, rank, seed=int(loads))
            state = shards.state_of(module, optimizer)
            if loads:
                shards.load(state, target, group)
                shards.put_back(module, optimizer, state)
                found = sharded_model.whole(shards.state_of(module, optimizer))
            else:
                shards.save(state, target, group)
                expected = sharded_model.whole(state)
        rank.barrier()
    if rank.rank == 0:
        for part in ("model", "optimizer"):
            names = [name for name in expected if name.startswith(part)]
            equal = all(torch.equal(expected[name], found[name]) for name in names)
            case = {"saved_by": saved_by, "loaded_by": loaded_by, "part": part, "tensors": len(names)}
            yield rank.record("equal", "1", float(equal), rank=0, **case)


def damaged(folder: Path, rank: Rank) -> Iterator[Record]:
    """Load checkpoints with one damage each: as DCP does it, and after the checksums were compared."""
    mesh = sharded_model.mesh(rank.world_size, rank)
    for seed, name in enumerate(("older", "newer")):
        module, optimizer = sharded_model.small(mesh, rank, seed)
        shards.save(shards.state_of(module, optimizer), folder / name)
    expected = sharded_model.whole(shards.state_of(module, optimizer))
    tensor = shards.local(module[0].weight)
    for kind, harm in damage.DAMAGES.items():
        copy, name = folder / kind, None
        if rank.rank == 0:
            shutil.copytree(folder / "newer", copy)
            name = harm(copy, folder / "older", tensor).name
        name = rank.gather(name)[0]
        for checksums, load in ((False, damage.plain_load), (True, shards.load)):
            state = shards.state_of(*sharded_model.small(mesh, rank, seed=2))
            error, right = damage.attempt(load, state, copy, expected)
            case, told = {"damage": kind, "checksums": checksums}, error.replace(str(copy), "...")
            yield rank.record("right_values", "1", float(right), **case)
            yield rank.record("noticed", "1", float(error != "none"), **case, error=told, named=name in error)


NAMES = {"gathered": "gathered on rank 0", "save": "each rank its part", "async_save": "each its part, async"}


def costs(run: Records) -> Iterator[str]:
    """For each way to save: the standstill, all that training loses, and when the save would survive a kill."""
    for mode, name in NAMES.items():
        stall, lost, total = (
            measure.estimate(run.one(m, mode=mode).samples, "s") for m in ("stall_s", "lost_s", "total_s")
        )
        slower = f", {lost} lost with what slows the steps meanwhile" if mode == "async_save" else ""
        yield f"{name.capitalize()}: training stands still for {stall}{slower}; on the disk after {total}."
    lost = measure.paired_ratio(run.one("lost_s", mode="async_save").samples, run.one("lost_s", mode="save").samples)
    told = (
        "no difference that this run can show"
        if not measure.differs(lost)
        else "it is cheaper"
        if lost.high < 1
        else "it costs more"
    )
    yield f"All that async saving costs training is {lost} the cost of waiting for the save: {told}."


def answer(run: Records) -> Iterator[str]:
    """What each way to save costs training, whether other numbers of ranks load it, and which damage is noticed."""
    size = next(r.value for r in run.where("state_bytes") if r.kind == "measured")
    yield f"{size / 1e6:.3g} MB of model and optimizer state per rank, on {run[0].layout['world_size']} rank(s)."
    yield from costs(run)
    equal = [r.value for r in run.where("equal")]
    yield (f"Loaded by another number of ranks, {sum(equal):.0f} of {len(equal)} states are equal bit for bit.")
    found = {c: [r.value for r in run.where("noticed", checksums=c)] for c in (False, True)}
    yield (
        f"Of {len(found[False])} damages torch.distributed.checkpoint notices {sum(found[False]):.0f}, with "
        f"this course's "
        f"checksums {sum(found[True]):.0f}."
    )
