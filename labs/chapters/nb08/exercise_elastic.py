"""Exercise 08.2: the entry point of a training that survives: kills, other numbers of ranks, late files, a notice."""

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

from labs.kit.answers import on_ranks
from labs.kit.check import Mistake
from labs.kit.failure import RankFailed

Function = Callable[..., Any]
SAMPLES, BATCH, EPOCHS, SAVE_EVERY = 72, 12, 3, 4
PER_EPOCH = SAMPLES // BATCH
STEPS = EPOCHS * PER_EPOCH
KILL_BEFORE = 10  # this step of the first start is never done: in the second epoch, and not where one is saved
NOTICE_AT = 6  # after so many steps one rank is told to stop: not where one is saved either
RTOL = 1e-9  # of weights in FP64, added up in another order


@dataclass(frozen=True)
class Plan:
    """What happens to one start of a job."""

    folder: str
    start: int = 0
    kill_rank: int = -1
    late_rank: int = -1
    """This rank does not see the newest file yet, as on a network file system."""
    notice_rank: int = -1


class Job:
    """A training on this rank: linear regression with momentum. What it does is written down."""

    epochs, steps_per_epoch, batch, save_every = EPOCHS, PER_EPOCH, BATCH, SAVE_EVERY

    def __init__(self, plan: Plan) -> None:
        self._plan, self._folder = plan, Path(plan.folder)
        draw = torch.Generator().manual_seed(8)
        self._x = torch.randn(SAMPLES, 5, generator=draw, dtype=torch.float64)
        self._y = self._x @ torch.arange(1.0, 6.0, dtype=torch.float64) + 1
        self._weights = torch.zeros(5, dtype=torch.float64)
        self._speed = torch.zeros(5, dtype=torch.float64)
        self._log = (self._folder / f"log-{plan.start}-{dist.get_rank()}.jsonl").open("a", buffering=1)
        self._done = 0

    def order(self, epoch: int) -> list[int]:
        """The numbers of all samples in the order of this epoch, the same on every rank."""
        return order_of(epoch)

    def train(self, samples: list[int]) -> None:
        """One step; `samples` is this rank's part of the batch. Collective: gradients are added up over the ranks."""
        if self._plan.kill_rank == dist.get_rank() and self._done + 1 == KILL_BEFORE:
            (self._folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        rows = torch.tensor([int(s) for s in samples], dtype=torch.long)
        x, y = self._x[rows], self._y[rows]
        gradient = x.T @ (x @ self._weights - y) / BATCH
        dist.all_reduce(gradient)
        self._speed = 0.8 * self._speed + gradient
        self._weights = self._weights - 0.1 * self._speed
        self._done += 1
        self._write("train", samples=[int(s) for s in rows])

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of the model's and the optimizer's state on this rank."""
        return {"weights": self._weights.clone(), "speed": self._speed.clone()}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Go on with this state."""
        self._weights, self._speed = state["weights"].clone(), state["speed"].clone()
        self._write("load")

    def save(self, step: int, state: dict[str, torch.Tensor]) -> None:
        """Write a checkpoint, whole at any time. `step`: how many steps of the whole training are in it."""
        self._write("save", step=int(step))
        new = self._folder / f"new-{dist.get_rank()}-{step}"
        torch.save(state, new)
        os.replace(new, self._folder / f"step-{int(step):04d}.pt")

    def newest(self) -> tuple[int, dict[str, torch.Tensor]] | None:
        """(step, state) of the newest checkpoint that this rank sees, or None."""
        files = sorted(self._folder.glob("step-*.pt"))
        if self._plan.late_rank == dist.get_rank():
            files = files[:-1]
        return (int(files[-1].stem[5:]), torch.load(files[-1], weights_only=True)) if files else None

    def stopping(self) -> bool:
        """Whether this rank has been told to stop (SIGTERM). Others may hear of it later, or not at all."""
        return self._plan.notice_rank == dist.get_rank() and self._done >= NOTICE_AT

    def _write(self, event: str, **values: Any) -> None:
        self._log.write(json.dumps({"event": event, **values}) + "\n")


def order_of(epoch: int) -> list[int]:
    """A new order in every epoch."""
    numbers = list(range(SAMPLES))
    random.Random(f"epoch {epoch}").shuffle(numbers)
    return numbers


def batch_of(step: int) -> list[int]:
    """Samples of step `step`, counted from 0 over the whole training, in ascending order."""
    epoch, k = divmod(step, PER_EPOCH)
    return sorted(order_of(epoch)[k * BATCH : (k + 1) * BATCH])


def _body(f: Function, plan: Plan) -> list[float]:
    torch.set_num_threads(1)
    job = Job(plan)
    f(job)
    return job.state()["weights"].tolist()


@dataclass(frozen=True)
class Start:
    """What one start did: batches (of all ranks together), each rank's number of steps, who saved what."""

    batches: list[list[int]]
    steps: list[int]
    saves: list[tuple[int, int]]
    loads: list[int]
    weights: list[list[float]]


def _start(f: Function, plan: Plan, ranks: int, when: str) -> Start:
    """One start of the job; a kill that was planned is no error."""
    weights: list[list[float]] = []
    try:
        weights = on_ranks(_body, ranks, f, plan, when=when)
    except (RankFailed, Mistake):
        if plan.kill_rank < 0 or not (Path(plan.folder) / "killed").exists():
            raise
    logs = [_log(plan, r) for r in range(ranks)]
    trained = [[row["samples"] for row in log if row["event"] == "train"] for log in logs]
    batches = [sorted(n for part in parts for n in part) for parts in zip(*trained, strict=False)]
    saves = [(r, row["step"]) for r, log in enumerate(logs) for row in log if row["event"] == "save"]
    loads = [sum(row["event"] == "load" for row in log) for log in logs]
    return Start(batches, [len(t) for t in trained], saves, loads, weights)


def _log(plan: Plan, rank: int) -> list[dict[str, Any]]:
    path = Path(plan.folder) / f"log-{plan.start}-{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check_survive(f: Function) -> None:
    """A job that nobody disturbs; one that is killed and goes on in four ways; one that is told to stop."""
    with tempfile.TemporaryDirectory(prefix="labs-elastic-") as root:
        whole = _undisturbed(f, _folder(root, "whole"))
        folder = _folder(root, "killed")
        saved = _killed(f, folder)
        for name in ("late", "fewer"):
            shutil.copytree(folder, Path(root) / name)
        _resumed(f, Plan(folder, start=1), 2, saved, whole, "after a rank was killed")
        _finished(f, folder)
        late = Plan(str(Path(root) / "late"), start=1, late_rank=1)
        _resumed(f, late, 2, saved, whole, "when rank 1 does not see the newest file yet")
        _resumed(f, Plan(str(Path(root) / "fewer"), start=1), 1, saved, whole, "on 1 rank, after 2 had begun")
        _notice(f, _folder(root, "notice"), whole)


def _folder(root: str, name: str) -> str:
    (Path(root) / name).mkdir()
    return str(Path(root) / name)


def _undisturbed(f: Function, folder: str) -> list[float]:
    start = _start(f, Plan(folder), 2, "in a job that nobody disturbs")
    _check_batches(start, 0, "in a job that nobody disturbs")
    if others := sorted({rank for rank, _ in start.saves if rank}):
        raise Mistake(
            f"rank {others[0]} saves, too: two ranks write the same file",
            "all ranks hold the same weights: one of them saves, if dist.get_rank() == 0",
        )
    steps = [step for _, step in start.saves]
    due = [s for s in range(1, STEPS + 1) if s % SAVE_EVERY == 0 or s == STEPS]
    if missing := [s for s in due if s not in steps]:
        if not steps:
            raise Mistake("nothing is ever saved", f"job.save(step, job.state()) every {SAVE_EVERY} steps")
        raise Mistake(
            f"after step {missing[0]} nothing was saved under that number; you saved {steps}",
            "save after every job.save_every steps of the whole training, and after the last one; `step` is the "
            "number of steps that are in the state",
        )
    return start.weights[0]


def _killed(f: Function, folder: str) -> int:
    """The step of the checkpoint that a kill in the middle of the second epoch leaves."""
    _start(f, Plan(folder, kill_rank=1), 2, "before a rank is killed")
    files = sorted(Path(folder).glob("step-*.pt"))
    return int(files[-1].stem[5:]) if files else 0


def _check_batches(start: Start, first: int, when: str) -> None:
    """Mistake unless the ranks together trained on the batches of all steps from `first` on, each sample once."""
    if len(set(start.steps)) > 1:
        raise Mistake(f"{when} ranks do different numbers of steps: {start.steps}", "all begin and end at one step")
    for k, got in enumerate(start.batches):
        step = first + k
        if step >= STEPS:
            raise Mistake(f"{when} you train on after the last of {STEPS} steps", "stop at epochs * steps_per_epoch")
        if got == batch_of(step):
            continue
        epoch = step // PER_EPOCH
        if k == 0 and first and got == batch_of(0):
            raise Mistake(
                f"{when} the training begins again at its first step, {first} steps are in the checkpoint",
                "newest() gives (step, state): go on at that step, of that epoch",
            )
        if k == 0 and first and got == batch_of(epoch * PER_EPOCH):
            raise Mistake(
                f"{when} the epoch begins again from its first batch: samples that were trained on come twice",
                "of the epoch divmod(step, steps_per_epoch) names, leave out the batches that are done",
            )
        if k == 0 and first and got in (batch_of(first - 1), batch_of(first + 1)):
            raise Mistake(
                f"{when} the first batch is that of a step {'before' if got == batch_of(first - 1) else 'after'} the "
                f"right one",
                "a checkpoint of step n holds n steps, and the next one is step n, counted from 0",
            )
        if sorted(set(got)) == batch_of(step) and len(got) > BATCH:
            raise Mistake(
                f"{when} every rank trains on the whole batch of {BATCH}: each sample counts {len(got) // BATCH} times",
                "rank r takes its part, batch[rank::ranks]",
            )
        old = sorted(order_of(0)[step % PER_EPOCH * BATCH : (step % PER_EPOCH + 1) * BATCH])
        if got == old:
            raise Mistake(
                f"{when} epoch {epoch} has the order of epoch 0",
                "ask job.order(epoch) in every epoch, also after a start",
            )
        raise Mistake(
            f"{when} step {step} (counted from 0) trains on {len(got)} samples of all ranks that are not its batch",
            "a step is one batch of job.batch samples, from order[k * batch] on, split among the ranks there are now",
        )
    if len(start.batches) < STEPS - first:
        raise Mistake(
            f"{when} {len(start.batches)} steps are done, {STEPS - first} were left to do",
            "go on to the end of the last epoch",
        )


def _resumed(f: Function, plan: Plan, ranks: int, saved: int, whole: list[float], when: str) -> None:
    """Mistake unless this start does the rest, and ends with the weights of the job that nobody disturbed."""
    try:
        start = _start(f, plan, ranks, when)
    except Mistake:
        loads = [_first_batch(plan, r) for r in range(ranks)]
        if plan.late_rank >= 0 and len({str(x) for x in loads}) > 1:
            _late()
        raise
    if plan.late_rank >= 0 and start.batches and start.batches[0] != batch_of(saved):
        _late()
    _check_batches(start, saved, when)
    if ranks > 1 and start.weights[1] != start.weights[0]:
        raise Mistake(
            f"{when} ranks end with other weights than each other",
            "every rank calls load_state with the same state: rank 0's, sent by dist.broadcast_object_list",
        )
    if plan.late_rank >= 0 and start.weights[0] != whole:
        _late()
    if not torch.allclose(torch.tensor(start.weights[0]), torch.tensor(whole), rtol=RTOL):
        raise Mistake(
            f"{when} the weights at the end are not those of the job that nobody disturbed",
            "load all of the state, on every rank: the optimizer's is in it",
        )
    if ranks == 2 and start.weights[0] != whole:
        raise Mistake(f"{when} the weights are not those bit for bit", "the same split of a batch in every start")


def _first_batch(plan: Plan, rank: int) -> list[int]:
    return next((row["samples"] for row in _log(plan, rank) if row["event"] == "train"), [])


def _late() -> None:
    raise Mistake(
        "rank 1 does not see the newest file yet, and goes on from an older one than rank 0: their models and steps "
        "are not the same, and no error tells",
        "one rank looks, and tells the others: dist.broadcast_object_list([found])",
    )


def _finished(f: Function, folder: str) -> None:
    """Mistake if a job that has ended trains on."""
    start = _start(f, Plan(folder, start=2), 2, "in a job that has ended")
    if start.batches:
        raise Mistake(
            f"a job that has ended is started again, and trains {len(start.batches)} more steps",
            "a checkpoint of the last step leaves nothing to do",
        )


def _notice(f: Function, folder: str, whole: list[float]) -> None:
    """Rank 1 alone is told to stop."""
    when = "when rank 1 alone is told to stop"
    try:
        start = _start(f, Plan(folder, notice_rank=1), 2, when)
    except (Mistake, RankFailed):
        done = [len([e for e in _log(Plan(folder), r) if e["event"] == "train"]) for r in (0, 1)]
        if done[1] < STEPS:
            raise Mistake(
                f"rank 1 is told to stop, and leaves after {done[1]} steps; rank 0 does not know, and waits for it",
                "agree in every step: dist.all_reduce of 1.0 or 0.0, and stop on all ranks if the sum is above 0",
            ) from None
        raise
    done = start.steps[0]
    if done == STEPS:
        raise Mistake(
            "rank 1 is told to stop, and the job trains on to its end: it is killed in a few seconds",
            "look at job.stopping() after each step, on all ranks",
        )
    if done > NOTICE_AT + 1:
        raise Mistake(
            f"rank 1 is told to stop after {NOTICE_AT} steps, and the job does {done}",
            "look after each step: nobody knows how long the next one takes",
        )
    if (0, done) not in start.saves:
        raise Mistake(
            f"the job stops after step {done} and does not save it: you saved {[s for _, s in start.saves]}",
            "when all agree to stop, rank 0 saves, then all return",
        )
    _resumed(f, Plan(folder, start=1), 2, done, whole, "after a stop")
