"""Where does the time of a training step go, and what does it cost to look?

    python -m labs.profile_step                                       # launches its own ranks
    python -m labs.profile_step --parts shares --plant data=10        # a sick step: 10 ms of sleep in data
    python -m labs.profile_step --parts shares --model my_package.my_module:factory
    python -m labs.profile_step --parts shares --recipe labs/recipes/train_ddp.py
    torchrun --nproc-per-node 2 -m labs.profile_step

About 7 s on 2 CPU cores.
  shares     steps under torch.profiler, cut into data, host-to-device, forward, backward, exposed communication,
             optimizer, overhead (on a GPU also idle); the same steps by another clock; what DDP costs by that clock;
             the operations that take most
  cost       steps with the profiler off, on, and with more of its options, in turn; bytes of trace for each step
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from labs.common import models
from labs.common.profiling import shares as trace_shares
from labs.common.profiling.shares import SHARES
from labs.kit import measure
from labs.kit.errors import BadInput, require
from labs.kit.measure import Estimate
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.profile_step.recipes import require_recipe, workload_of

Part = Literal["shares", "cost"]
PARTS: tuple[Part, ...] = Part.__args__
PLACES = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "between": "overhead",
    "late": "exposed communication",
}
"""Where a cost can be planted, and the share that it should be found in. late: on the last rank, before its step."""
SETTINGS: dict[str, dict[str, bool]] = {
    "off": {},
    "on": {},
    "shapes": {"record_shapes": True},
    "memory": {"profile_memory": True},
    "stacks": {"with_stack": True},
}
"""What the profiler is asked to note, beside the time of each operation."""
TIME = {"shares": 0.5, "cost": 0.5}  # parts of the seconds
TOP_OPS = 8


@dataclass(frozen=True)
class Config:
    """What to train, and what to look at."""

    model: str = "mlp"
    """One of labs.models.MODELS, or package.module:factory."""
    recipe: Path | None = None
    """In place of `model`: a file such as labs/recipes/train_ddp.py, or your own; its build_model and load_data count,
    with its data read by a DataLoader."""
    batch_size: int = 64
    """Samples per rank."""
    parts: tuple[Part, ...] = PARTS
    """Parts to run."""
    plant: tuple[str, ...] = ()
    """Costs that shares has in every step, as place=ms: data=10 forward=5. Places: data, forward, backward, optimizer,
    between (the ranges), late (the last rank, before its step)."""
    active: int = 8
    """Steps in each trace of shares and cost. All are in memory at once: a few are enough, and more rounds."""
    seconds: float = 6.0
    """Time for all parts, in s. A slower machine takes fewer rounds and has wider intervals."""
    rounds: int | None = None
    """Rounds of each part; by default as many as fit, at least 6."""
    seed: int = 0
    """Seed of the model and of the data."""
    smoke: bool = False
    """Two rounds of each part."""

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, f"batch_size must be at least 1, not {self.batch_size}")
        require(len(self.parts) > 0, f"parts must hold some of {', '.join(PARTS)}")
        require(
            1 <= self.active <= 100, f"active must be from 1 to 100 steps, not {self.active}: a trace holds them all"
        )
        measure.require_budget(self.seconds, self.rounds)
        planted_by(self.plant)
        models.require_known(self.model)
        if self.recipe is not None:
            require_recipe(self.recipe)


def planted_by(words: Sequence[str]) -> dict[str, float]:
    """{place: ms} of place=ms. BadInput says what is wrong with one."""
    found = {}
    for word in words:
        place, _, ms = word.partition("=")
        require(place in PLACES, f"plant: there is no place {place!r}: take {', '.join(PLACES)}, as in data=10")
        try:
            found[place] = float(ms)
        except ValueError:
            raise BadInput(f"plant {word!r} needs a number of ms, as in {place}=10") from None
        require(0 < found[place] <= 1000, f"plant {word!r} must be above 0 and up to 1000 ms")
    return found


def check_layout(config: Config, world_size: int) -> None:
    """BadInput if the model cannot be built, or a late rank is asked for and nobody waits for it."""
    late = "late" in planted_by(config.plant) and "shares" in config.parts
    require(world_size > 1 or not late, "plant late needs at least 2 ranks: with 1 nobody waits for it")
    if config.recipe is None:
        models.build(config.model, config.seed)
    else:
        workload_of(config.recipe, config.seed).make_batch(config.batch_size)


def training_step(
    batches: Iterator[tuple[Tensor, Tensor]],
    model: nn.Module,
    loss_of: Callable,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> None:
    """One step in named ranges. Without a profiler a range costs some microseconds."""
    with record_function("data"):
        x, y = next(batches)
    with record_function("host-to-device"):  # for a CPU rank there is nothing to copy
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
    with record_function("forward"):
        loss = loss_of(model(x), y)
    with record_function("backward"):  # DDP's all-reduces run in here; the trace tells what of them is exposed
        loss.backward()
    with record_function("optimizer"):
        optimizer.step()
        optimizer.zero_grad()


def profiled(
    step: Callable[[], None],
    active: int,
    rounds: int | measure.Budget,
    device: torch.device,
    on_trace: Callable[[profile], None],
) -> list[list[float]]:
    """Rounds of `active` steps under the profiler; seconds of each by the host's clock, which the trace knows not.

    Each round is a trace of its own: `on_trace` reads it, then it is gone. Memory does not grow with the run.
    """
    seconds: list[list[float]] = []
    plan = schedule(wait=1, warmup=1, active=active)  # over and over; the first steps under a profiler are slow
    warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # which is wanted here
    with profile(activities=activities(device), schedule=plan, on_trace_ready=on_trace) as profiler:
        for _ in measure.within(itertools.count(), rounds):
            took = []
            for i in range(2 + active):
                start = time.perf_counter()
                step()
                if i in (1, 1 + active):
                    measure.sync(device)  # what a GPU has still to do belongs to the step before the trace, or in it
                took.append(time.perf_counter() - start)
                profiler.step()  # after the last active one: stops, and calls on_trace
            seconds.append(took[2:])
    return seconds


def activities(device: torch.device) -> list[ProfilerActivity]:
    """What to record on `device`: the host's operations, and a GPU's kernels and copies."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler prints its start and its stop
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]


class Training:
    """A model in training, with places where a cost can be planted."""

    def __init__(self, config: Config, rank: Rank) -> None:
        """On `rank`'s device; a DDP model if there are more ranks."""
        named = config.recipe is None
        self.workload = models.make(config.model, config.seed) if named else workload_of(config.recipe, config.seed)
        self.device, self.rows = rank.device, config.batch_size
        module = self.workload.module.to(self.device)
        many, gpu = rank.world_size > 1, rank.device.type == "cuda"
        ids = {"device_ids": [rank.device.index]} if gpu else {}
        self.model = nn.parallel.DistributedDataParallel(module, **ids) if many else module
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batches = self._batches()
        self.last = many and rank.rank == rank.world_size - 1
        self.plants: dict[str, float] = {}
        module.register_forward_hook(lambda *_: self._pause("forward"))
        self.optimizer.register_step_pre_hook(lambda *_: self._pause("optimizer"))

    def step(self) -> None:
        """One training step with what is planted."""
        if self.last:
            self._pause("late")
        self._pause("between")
        training_step(self.batches, self.model, self._loss, self.optimizer, self.device)

    def step_alone(self) -> None:
        """The same without all-reduces."""
        with self.model.no_sync() if isinstance(self.model, nn.parallel.DistributedDataParallel) else nullcontext():
            self.step()

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            self._pause("data")
            yield self.workload.make_batch(self.rows)

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        loss = self.workload.loss(output, target)
        if "backward" in self.plants:
            loss.register_hook(lambda _: self._pause("backward"))
        return loss

    def _pause(self, place: str) -> None:
        """Sleep as long as is planted at `place`."""
        if ms := self.plants.get(place):
            time.sleep(1e-3 * ms)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Part by part."""
    training = Training(config, rank)
    measure.time_steps(training.step, 3 if config.smoke else 10, rank.device)
    for done, part in enumerate(config.parts, start=1):
        together = sum(TIME[p] for p in config.parts)
        rounds = measure.rounds_of(config, rank.slowest, TIME[part] / together)
        yield from {"shares": shares, "cost": cost}[part](config, rank, training, rounds)
        rank.progress(done, len(config.parts), part)


@contextmanager
def _trace_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "trace.json"


def read(profiler: profile) -> list[trace_shares.Event]:
    """What `profiler` has just recorded, through a file in Chrome's format, as any trace that is kept."""
    with _trace_file() as path:
        profiler.export_chrome_trace(str(path))
        return trace_shares.read(path)


def shares(config: Config, rank: Rank, training: Training, rounds: int | measure.Budget) -> Iterator[Record]:
    """Shares of steps, the same steps by the host's clock, the operations in them; then DDP's cost by that clock."""
    found: list[dict[str, float]] = []
    ops: dict[str, Any] = {}

    def on_trace(profiler: profile) -> None:
        found.extend(trace_shares.of_steps(read(profiler)))
        ops["table"] = profiler.key_averages()

    training.plants = planted_by(config.plant)
    half = rounds if isinstance(rounds, int) else measure.Budget(rounds.seconds / 2, rounds.slowest, least=3)
    seconds = profiled(training.step, config.active, half, rank.device, on_trace)
    for name in found[0]:
        yield rank.record("share_s", "s", [step[name] for step in found], rank=rank.rank, share=name)
    yield rank.record("step_s", "s", [s for took in seconds for s in took], rank=rank.rank, mode="profiled")
    yield from _ops(ops["table"], config.active, rank)
    if rank.world_size > 1:
        modes = {"ddp": training.step, "no_sync": training.step_alone}
        in_turn = measure.interleave(modes, rounds, rank.device, between=rank.barrier)
        for mode, samples in in_turn.items():
            yield rank.record("step_s", "s", samples, rank=rank.rank, mode=mode)
    training.plants = {}


def _ops(table: Any, active: int, rank: Rank) -> Iterator[Record]:
    """Rows of key_averages() with the most self time; per step. Ranges are no operations."""
    gpu = rank.device.type == "cuda"
    rows = [r for r in table if not r.is_user_annotation]

    def own(row: Any) -> float:
        return row.self_device_time_total if gpu else row.self_cpu_time_total

    def total(row: Any) -> float:
        return row.device_time_total if gpu else row.cpu_time_total

    for row in sorted(rows, key=own, reverse=True)[:TOP_OPS]:
        case = {"op": row.key, "calls": row.count / active}
        yield rank.record("op_self_s", "s", 1e-6 * own(row) / active, rank=rank.rank, **case)
        yield rank.record("op_total_s", "s", 1e-6 * total(row) / active, rank=rank.rank, **case)
    yield rank.record("ops_self_s", "s", 1e-6 * sum(map(own, rows)) / active, rank=rank.rank)
    yield rank.record("ops_total_s", "s", 1e-6 * sum(map(total, rows)) / active, rank=rank.rank)
    yield rank.record("ops_calls", "1", sum(row.count for row in rows) / active, rank=rank.rank)


def cost(config: Config, rank: Rank, training: Training, rounds: int | measure.Budget) -> Iterator[Record]:
    """Steps under each of SETTINGS in turn; then, once for each, the size of its trace."""
    names = tuple(SETTINGS)
    metrics = ("cost_step_s", "cost_cpu_s", "cost_stop_s")
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
    for order in measure.within(measure.orders(names, 10**6, config.seed), rounds):
        for name in order:
            rank.barrier()
            found[name].append(under(name, training.step, config.active, rank.device)[:3])
    for name in names:
        for metric, samples in zip(metrics, zip(*found[name], strict=True), strict=True):
            yield rank.record(metric, "s", rank.slowest(samples), profiler=name)
    for name in names[1:]:
        *_, profiler = under(name, training.step, config.active, rank.device)
        with _trace_file() as path:
            profiler.export_chrome_trace(str(path))
            yield rank.record("trace_bytes", "B", path.stat().st_size / config.active, profiler=name)
            yield rank.record("trace_events", "1", len(trace_shares.read(path)) / config.active, profiler=name)


def under(
    setting: str, step: Callable[[], None], steps: int, device: torch.device
) -> tuple[float, float, float, profile | None]:
    """(seconds and CPU seconds of a step in the mean of `steps`, seconds to stop, the profiler) under one of SETTINGS.

    CPU seconds are those that the process really computed: other programs' turns on its core are not in them.
    """
    profiler = None if setting == "off" else profile(activities=activities(device), **SETTINGS[setting])
    if profiler:
        profiler.start()
    step()  # outside of the clock: the first one under a profiler is slow
    measure.sync(device)
    start, computed = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    measure.sync(device)
    end, computed = time.perf_counter(), time.process_time() - computed
    if profiler:
        profiler.stop()
    return (end - start) / steps, computed / steps, time.perf_counter() - end, profiler


# What the records say


def ranks(run: Records) -> list[int]:
    """Ranks whose shares are there."""
    return sorted({r.layout["rank"] for r in run.where("share_s")})


def of_rank(run: Records, metric: str, rank: int, **case: Any) -> Record:
    """The one record of `rank`."""
    [found] = [r for r in run.where(metric, **case) if r.layout["rank"] == rank]
    return found


def share_estimates(run: Records, rank: int = 0) -> dict[str, Estimate]:
    """Seconds of each share of a step of `rank`, in the order of SHARES."""
    there = {r.case["share"]: r for r in run.where("share_s") if r.layout["rank"] == rank}
    return {name: measure.estimate(there[name].samples, "s") for name in SHARES if name in there}


def typical(run: Records, rank: int = 0) -> tuple[dict[str, float], float]:
    """(Seconds of each share, of the step by the host's clock): means over the middle half of the steps by length.

    Medians of shares do not sum to a step: a step that waits long is not the one that computes long.
    """
    there = {r.case["share"]: r.samples for r in run.where("share_s") if r.layout["rank"] == rank}
    sums = [sum(step) for step in zip(*there.values(), strict=True)]
    order, cut = sorted(range(len(sums)), key=sums.__getitem__), len(sums) // 4
    kept = order[cut : len(order) - cut]
    clock = of_rank(run, "step_s", rank, mode="profiled").samples
    means = {name: statistics.fmean(there[name][k] for k in kept) for name in SHARES if name in there}
    return means, statistics.fmean(clock[k] for k in kept)


def covered(run: Records, rank: int = 0) -> Estimate:
    """Sum of a step's shares, from the trace, over the same step by the host's clock, in %."""
    parts = [r.samples for r in run.where("share_s") if r.layout["rank"] == rank]
    sums = [sum(step) for step in zip(*parts, strict=True)]
    return measure.paired_ratio(sums, of_rank(run, "step_s", rank, mode="profiled").samples).scaled(100, "%")


def exposed_two_ways(run: Records, rank: int = 0) -> tuple[Estimate, Estimate]:
    """(exposed communication from the trace, step(DDP) - step(no_sync) by the clock) of `rank`, in s per step."""
    ddp, alone = (of_rank(run, "step_s", rank, mode=mode).samples for mode in ("ddp", "no_sync"))
    by_clock = measure.estimate([a - b for a, b in zip(ddp, alone, strict=True)], "s")
    return share_estimates(run, rank)["exposed communication"], by_clock


def price(run: Records, metric: Literal["cost_step_s", "cost_cpu_s"] = "cost_step_s") -> dict[str, Estimate]:
    """How many times as long a step takes (or computes) under each of SETTINGS but "off", paired by round."""
    off = run.one(metric, profiler="off").samples
    return {name: measure.paired_ratio(run.one(metric, profiler=name).samples, off) for name in list(SETTINGS)[1:]}


def share_table(run: Records) -> Iterator[tuple[str, list[str]]]:
    """(share, for each rank "ms, %") of `typical` steps; the step itself comes last."""
    every = {rank: typical(run, rank)[0] for rank in ranks(run)}
    sums = {rank: sum(found.values()) for rank, found in every.items()}
    for name in (s for s in SHARES if any(s in found for found in every.values())):  # idle: only on a GPU
        cells = [
            f"{1e3 * found[name]:8.2f} ms {100 * found[name] / sums[rank]:5.1f} %" if name in found else ""
            for rank, found in every.items()
        ]
        yield name, cells
    yield "the same steps by the host's clock", [f"{1e3 * typical(run, rank)[1]:8.2f} ms" for rank in every]


def answer(run: Records) -> Iterator[str]:
    """The largest share, whether shares sum to the step, what DDP exposes, what looking costs."""
    if run.where("share_s"):
        yield from _shares_text(run)
    if run.where("cost_step_s"):
        yield cost_text(run)
    if run.where("share_s"):
        heads = "".join(f"{f'rank {rank}':>20}" for rank in ranks(run))
        yield f"{'share of a step':24}{heads}"
        for name, cells in share_table(run):
            yield f"{name:24}" + "".join(f"{cell:>20}" for cell in cells)


def _shares_text(run: Records) -> Iterator[str]:
    found, _ = typical(run)
    name = max(found, key=found.__getitem__)
    yield (
        f"Rank 0 spends most in {name}: {100 * found[name] / sum(found.values()):.0f} % of a step, a mean over the "
        f"middle half of the steps; the median is {share_estimates(run)[name]}. The shares, from the trace, sum to "
        f"{covered(run)} of the step by the host's clock."
    )
    if run.where("step_s", mode="no_sync"):
        trace, clock = exposed_two_ways(run)
        agree = trace.low <= clock.high and clock.low <= trace.high
        why = "the two agree" if agree else "the two differ: what is hidden may still slow backward down, a guess"
        yield (
            f"Communication is exposed for {trace} by the trace; by the clock a step takes {clock} more than under "
            f"no_sync: {why}."
        )
    yield trap_text(run)


def trap_text(run: Records, rank: int = 0) -> str:
    """What comes out if a column of the table of operations is summed."""
    step = of_rank(run, "step_s", rank, mode="profiled").value
    own, total = (of_rank(run, f"ops_{kind}_s", rank).value for kind in ("self", "total"))
    return (
        f"Summed over all operations, self times make {own / step:.2f} of a step and totals {total / step:.2f}: "
        "the total of an operation holds those that it called, which have rows of their own."
    )


def cost_text(run: Records) -> str:
    """What looking costs, in a sentence."""
    times = price(run)
    sizes = {name: run.one("trace_bytes", profiler=name).value for name in times}
    told = ", ".join(f"{name} {ratio} ({sizes[name] / 1e3:.0f} kB of trace)" for name, ratio in times.items())
    cpu = price(run, "cost_cpu_s")
    most = max(cpu, key=lambda name: cpu[name].value)
    return (
        f"A step takes so many times as long as without a profiler: {told}. By the CPU time of the process, "
        f"without what other programs take: on {cpu['on']}, at most {cpu[most]} ({most})."
    )
