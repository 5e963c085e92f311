"""Exercises of notebook 08: an all-reduce over two speeds of links, and the entry point of a run that survives."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from labs.common.communication import wire
from labs.common.data_parallel.wire import sent_through
from labs.kit.answers import on_ranks
from labs.kit.check import Mistake
from labs.kit.exercise import Exercise, KnownMistake
from labs.kit.failure import RankFailed
from labs.kit.rank import Rank

Answer = Callable[..., Any]

# -- 08.1: an all-reduce over two speeds of links


def two_levels(
    x: Tensor, inside: dist.ProcessGroup, across: dist.ProcessGroup, inside_b_s: float, across_b_s: float
) -> float:
    """Sum `x` over all ranks in place; return the seconds that rings take, one phase after the other."""
    k, n = inside.size(), across.size()
    part = torch.empty_like(x[: len(x) // k])
    dist.reduce_scatter(part, list(x.clone().chunk(k)), group=inside)
    dist.all_reduce(part, group=across)
    dist.all_gather(list(x.chunk(k)), part, group=inside)  # the chunks are views, so x itself is written
    return 2 * (k - 1) / k * x.nbytes / inside_b_s + 2 * (n - 1) / n * x.nbytes / across_b_s


def _whole_vector(x: Tensor, inside: Any, across: Any, inside_b_s: float, across_b_s: float) -> float:
    dist.all_reduce(x, group=inside)
    dist.all_reduce(x, group=across)
    return 0.0


def _by_one_leader(x: Tensor, inside: Any, across: Any, inside_b_s: float, across_b_s: float) -> float:
    node = dist.get_process_group_ranks(inside)
    dist.reduce(x, node[0], group=inside)
    if dist.get_rank() == node[0]:
        dist.all_reduce(x, group=across)
    dist.broadcast(x, node[0], group=inside)
    return 0.0


def _not_in_place(x: Tensor, *about: Any) -> float:
    return two_levels(x.clone(), *about)


def _a_card_each(x: Tensor, inside: Any, across: Any, inside_b_s: float, across_b_s: float) -> float:
    return two_levels(x, inside, across, inside_b_s, across_b_s * inside.size())


LAYOUTS = ((2, 2), (2, 3), (3, 2))
"""(nodes, ranks per node)."""
NUMBERS = 49_152  # 192 KiB, far above gloo's headers; divisible by 2 and 3
SPEEDS = ((3e6, 3e6), (2e8, 2e7), (1e7, 9e8))
"""(bytes/s inside, across)."""
BASE = 8  # rank r gives BASE**r, so the sum's digits say whose numbers are in it


def observe_two_levels(answer: Answer) -> dict[str, Any]:
    """Return, for each layout, what x holds, what leaves a node, how many ranks send it, and the returned seconds."""
    seen = {}
    found = {
        layout: on_ranks(_sum_on_rank, layout[0] * layout[1], answer, *layout, when=_where(layout))
        for layout in LAYOUTS
    }
    for layout, ranks in found.items():
        seen[f"{_where(layout)}, rank r gives {BASE}^r: numbers in x afterwards on rank 0"] = ranks[0]["x"]
        seen[f"{_where(layout)}: all ranks have the same numbers"] = all(r["x"] == ranks[0]["x"] for r in ranks)
    for layout, ranks in found.items():
        out = [r["out"] for r in ranks]
        node = [sum(out[i : i + layout[1]]) for i in range(0, len(out), layout[1])]
        seen[f"{_where(layout)}: what leaves a node, in vectors"] = round(max(node), 1)
        seen[f"{_where(layout)}: ranks that send to another node"] = sum(share > 0.1 * max(out) for share in out)
    for layout, ranks in found.items():
        for (inside, across), seconds in zip(SPEEDS, ranks[0]["seconds"], strict=True):
            speeds = f"{inside / 1e6:g} MB/s inside, {across / 1e6:g} MB/s across"
            seen[f"{_where(layout)}, {speeds}, {4e-6 * NUMBERS:.2g} MB: seconds"] = seconds
    return seen


def _where(layout: tuple[int, int]) -> str:
    return f"{layout[0]} nodes of {layout[1]} ranks"


def _sum_on_rank(answer: Answer, nodes: int, per_node: int) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (nodes, per_node), mesh_dim_names=("across", "inside"))
    inside, across = mesh["inside"].get_group(), mesh["across"].get_group()
    x = torch.full((NUMBERS,), float(BASE**rank))
    answer(x, inside, across, *SPEEDS[0])
    zeros = torch.zeros(NUMBERS)
    links = wire.links(Rank(rank, ranks, rank, ranks, torch.device("cpu"), "gloo", ()))
    outwards = [fd for peer, fds in links.items() if peer // per_node != rank // per_node for fd in fds]
    dist.barrier()
    before = sent_through(outwards)
    answer(zeros, inside, across, *SPEEDS[0])
    out = (sent_through(outwards) - before) / zeros.nbytes
    seconds = [answer(zeros, inside, across, *speeds) for speeds in SPEEDS]
    return {
        "x": sorted(set(x.tolist()))[:4],
        "out": out,
        "seconds": [float(s) if isinstance(s, int | float) else f"{s!r:.30}" for s in seconds],
    }


# -- 08.2: the entry point of a run that survives


def survive(job: Job) -> None:
    """Train `job` to its end from wherever it is, on as many ranks as there are."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = [job.newest() if rank == 0 else None]
    dist.broadcast_object_list(found)  # one rank looks: other machines may see a new file later
    step = 0
    if found[0] is not None:
        step, state = found[0]
        job.load_state(state)
    end = job.epochs * job.steps_per_epoch
    while step < end:
        epoch, done = divmod(step, job.steps_per_epoch)
        batch = job.order(epoch)[done * job.batch : (done + 1) * job.batch]  # counted over all ranks
        job.train(batch[rank::ranks])
        step += 1
        stop = torch.tensor(float(job.stopping()))
        dist.all_reduce(stop)  # all leave after the same step
        if rank == 0 and (step % job.save_every == 0 or step == end or stop > 0):
            job.save(step, job.state())
        if stop > 0:
            return


class _Changed:
    """A job with some of its methods replaced."""

    def __init__(self, job: Job, **methods: Callable[..., Any]) -> None:
        self.__dict__.update(methods)
        self._job = job

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)


def _each_rank_looks(job: Job) -> None:
    broadcast, dist.broadcast_object_list = dist.broadcast_object_list, lambda found: found.__setitem__(0, job.newest())
    try:
        survive(job)
    finally:
        dist.broadcast_object_list = broadcast


def _epoch_begins_again(job: Job) -> None:
    def newest() -> Any:
        found = job.newest()
        return found and (found[0] // job.steps_per_epoch * job.steps_per_epoch, found[1])

    survive(_Changed(job, newest=newest))


def _position_of_two_ranks(job: Job) -> None:
    ranks = dist.get_world_size()
    half = job.batch // 2
    step = 0
    found = [job.newest() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    if found[0] is not None:
        step, state = found[0]
        job.load_state(state)
    while step < job.epochs * job.steps_per_epoch:
        epoch, done = divmod(step, job.steps_per_epoch)
        first = (done * ranks + dist.get_rank()) * half
        job.train(job.order(epoch)[first : first + half])
        step += 1
        if dist.get_rank() == 0 and (step % job.save_every == 0 or step == job.epochs * job.steps_per_epoch):
            job.save(step, job.state())


def _leaves_alone(job: Job) -> None:
    all_reduce, dist.all_reduce = dist.all_reduce, lambda x: None if x.dim() == 0 else all_reduce(x)
    try:
        survive(job)
    finally:
        dist.all_reduce = all_reduce


SAMPLES, BATCH, EPOCHS, SAVE_EVERY = 72, 12, 3, 4
PER_EPOCH = SAMPLES // BATCH
STEPS = EPOCHS * PER_EPOCH
KILL_BEFORE = 10  # step of the first start: in the second epoch, and not right after a save
NOTICE_AFTER = 6  # steps; also not right after a save


@dataclass(frozen=True)
class Plan:
    """What happens in one start of a job."""

    folder: str
    start: int = 0
    kill_rank: int = -1
    late_rank: int = -1
    """This rank doesn't see the newest file yet, as on a network file system."""
    notice_rank: int = -1


class Job:
    """One rank of a training run, a linear regression with momentum, that logs what it does."""

    epochs, steps_per_epoch, batch, save_every = EPOCHS, PER_EPOCH, BATCH, SAVE_EVERY

    def __init__(self, plan: Plan) -> None:
        self._plan, self._folder = plan, Path(plan.folder)
        generator = torch.Generator().manual_seed(8)
        self._x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
        self._y = self._x @ torch.arange(1.0, 6.0, dtype=torch.float64) + 1
        self._weights, self._speed = torch.zeros(2, 5, dtype=torch.float64)
        self._log = (self._folder / f"log-{plan.start}-{dist.get_rank()}.jsonl").open("a", buffering=1)
        self._done = 0

    def order(self, epoch: int) -> list[int]:
        """Return the numbers of all samples in this epoch's order, the same on every rank."""
        return order_of(epoch)

    def train(self, samples: list[int]) -> None:
        """Take one step with this rank's part of a batch. Collective: gradients are summed over all ranks."""
        if self._plan.kill_rank == dist.get_rank() and self._done + 1 == KILL_BEFORE:
            (self._folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        rows = torch.tensor([int(s) for s in samples], dtype=torch.long)
        gradient = self._x[rows].T @ (self._x[rows] @ self._weights - self._y[rows]) / BATCH
        dist.all_reduce(gradient)
        self._speed = 0.8 * self._speed + gradient
        self._weights = self._weights - 0.1 * self._speed
        self._done += 1
        self._write("train", rows.tolist())

    def state(self) -> dict[str, Tensor]:
        """Return a copy of this rank's model and optimizer state."""
        return {"weights": self._weights.clone(), "speed": self._speed.clone()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Resume from this state."""
        self._weights, self._speed = state["weights"].clone(), state["speed"].clone()

    def save(self, step: int, state: dict[str, Tensor]) -> None:
        """Write a checkpoint atomically. `step`: how many steps of the whole run it contains."""
        self._write("save", int(step))
        new = self._folder / f"new-{dist.get_rank()}-{step}"
        torch.save(state, new)
        os.replace(new, self._folder / f"step-{int(step):04d}.pt")

    def newest(self) -> tuple[int, dict[str, Tensor]] | None:
        """Return (step, state) of the newest checkpoint that this rank sees, or None."""
        files = sorted(self._folder.glob("step-*.pt"))
        if self._plan.late_rank == dist.get_rank():
            files = files[:-1]
        return (int(files[-1].stem[5:]), torch.load(files[-1], weights_only=True)) if files else None

    def stopping(self) -> bool:
        """Return whether this rank has received SIGTERM. Others may receive it later, or never."""
        return self._plan.notice_rank == dist.get_rank() and self._done >= NOTICE_AFTER

    def _write(self, event: str, value: Any) -> None:
        self._log.write(json.dumps([event, value]) + "\n")


def order_of(epoch: int) -> list[int]:
    """Return all sample numbers, in a different order for each epoch."""
    numbers = list(range(SAMPLES))
    random.Random(f"epoch {epoch}").shuffle(numbers)
    return numbers


def observe_survive(answer: Answer) -> dict[str, Any]:
    """Run a job undisturbed, one that is killed and restarted in three ways, and one whose rank 1 gets SIGTERM."""
    seen: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="labs-elastic-") as root:

        def start(name: str, copy_of: str = "", ranks: int = 2, number: int = 0, **events: int) -> list[float]:
            folder = Path(root) / (copy_of or name).replace(" ", "-")
            if copy_of and number == 1:
                folder = shutil.copytree(folder, Path(root) / name.replace(" ", "-"))
            folder.mkdir(exist_ok=True)
            return _start(answer, Plan(str(folder), number, **events), ranks, name, seen)

        whole = start("undisturbed")
        start("before rank 1 is killed", kill_rank=1)
        start("when rank 1 sees the newest file late", "before rank 1 is killed", number=1, late_rank=1)
        fewer = start("on 1 rank after 2", "before rank 1 is killed", ranks=1, number=1)
        again = start("after the kill", "before rank 1 is killed", number=1)
        for name, weights in (("after the kill", again), ("on 1 rank after 2", fewer)):
            same = len(whole) == len(weights) and torch.allclose(torch.tensor(weights), torch.tensor(whole), rtol=1e-9)
            seen[f"{name}: weights at the end are the undisturbed job's"] = bool(same)
        start("started again after its end", "undisturbed", number=2)
        start("when rank 1 alone gets SIGTERM", notice_rank=1)
    return seen


def _start(answer: Answer, plan: Plan, ranks: int, name: str, seen: dict[str, Any]) -> list[float]:
    """Run one start; add to `seen` its steps, who saved and how it ended. Return rank 0's weights, [] if it failed."""
    weights: list[list[float]] = []
    hangs = False
    try:
        weights = on_ranks(_job_on_rank, ranks, answer, plan, when=name)
    except (RankFailed, Mistake) as e:
        if plan.kill_rank < 0 or not (Path(plan.folder) / "killed").exists():
            if isinstance(e, RankFailed):  # the answer raised it
                raise
            hangs = True
    logs = [_log(plan, rank) for rank in range(ranks)]
    parts = [[value for event, value in log if event == "train"] for log in logs]
    batches = [sorted(s for part in ranks_parts for s in part) for ranks_parts in zip(*parts, strict=False)]
    by_number = {tuple(sorted(order_of(e)[k * BATCH : (k + 1) * BATCH])): e * PER_EPOCH + k
                 for e in range(EPOCHS) for k in range(PER_EPOCH)}  # fmt: skip
    steps = [by_number.get(tuple(batch), "no whole batch") for batch in batches]
    seen[f"{name}: steps that are trained, from 0, by their batches"] = _span(steps)
    seen[f"{name}: ranks that save"] = [r for r, log in enumerate(logs) if any(event == "save" for event, _ in log)]
    seen[f"{name}: saved after steps"] = [value for event, value in logs[0] if event == "save"]
    seen[f"{name}: ranks end with the same weights"] = all(w == weights[0] for w in weights)
    seen[f"{name}: ranks wait for each other for ever"] = hangs
    return weights[0] if weights else []


def _span(steps: list[Any]) -> str:
    """Write consecutive steps as "8 to 17", to keep the output short."""
    if steps and all(isinstance(s, int) for s in steps) and steps == list(range(steps[0], steps[0] + len(steps))):
        return f"{steps[0]} to {steps[-1]}"
    return ", ".join(map(str, steps[:8])) or "none"


def _job_on_rank(answer: Answer, plan: Plan) -> list[float]:
    torch.set_num_threads(1)
    job = Job(plan)
    answer(job)
    return job.state()["weights"].tolist()


def _log(plan: Plan, rank: int) -> list[list[Any]]:
    path = Path(plan.folder) / f"log-{plan.start}-{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


EXERCISES = {
    "08.1": Exercise(
        "08.1",
        15,
        "an all-reduce over two speeds, and its seconds",
        observe_two_levels,
        two_levels,
        (
            KnownMistake(
                "every rank sends a whole vector to the other nodes",
                "after a reduce-scatter inside, each rank holds one part of its node's sum: send only that",
                _whole_vector,
            ),
            KnownMistake(
                "one rank of each node sends for all of them",
                "let each rank carry its own part: reduce-scatter inside, not reduce",
                _by_one_leader,
            ),
            KnownMistake(
                "x still holds this rank's own numbers",
                "an all-gather writes into the tensors you give it: give it views of x",
                _not_in_place,
            ),
            KnownMistake(
                "you give each rank a network card of its own",
                "a node's ranks share one card and send at the same time: add up what they send",
                _a_card_each,
            ),
        ),
    ),
    "08.2": Exercise(
        "08.2",
        30,
        "an entry point that survives",
        observe_survive,
        survive,
        (
            KnownMistake(
                "rank 1 doesn't see the newest file yet and resumes from an older one, without an error",
                "let rank 0 look, and send what it found: dist.broadcast_object_list([found])",
                _each_rank_looks,
            ),
            KnownMistake(
                "after the kill, the epoch starts from its first batch again",
                "divmod(step, job.steps_per_epoch) gives the epoch and the batches of it that are done",
                _epoch_begins_again,
            ),
            KnownMistake(
                "on another number of ranks, a step is another batch",
                "take the whole batch first, then this rank's part of it: batch[rank::ranks]",
                _position_of_two_ranks,
            ),
            KnownMistake(
                "rank 1 leaves when it's told to stop; rank 0 doesn't know and waits for it",
                "agree after every step: all-reduce 1.0 or 0.0, and stop everywhere if the sum is positive",
                _leaves_alone,
            ),
        ),
        timeout_s=180.0,
    ),
}
