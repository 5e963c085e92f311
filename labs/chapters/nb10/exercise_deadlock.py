"""Exercise 10.1: a training loop that hangs on uneven data, mended without losing a sample; tried on 2 and 3 ranks."""

from __future__ import annotations

import dis
import inspect
import itertools
import json
import linecache
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.chapters.nb10.solution_deadlock import train
from labs.kit import answers
from labs.kit.answers import on_ranks
from labs.kit.check import Exercise, Mistake
from labs.kit.failure import RankFailed

EPOCHS, BATCH, FEATURES = 2, 4, 3
RTOL = 1e-8  # of weights in FP64, added up in another order
LOG_RTOL = 1e-4  # of losses: a line of a log may be rounded, or added up in FP32
Function = Callable[..., Any]


@dataclass(frozen=True)
class Split:
    """How many samples each rank's files hold."""

    train: tuple[int, ...]
    valid: tuple[int, ...]

    def __str__(self) -> str:
        *first, last = map(str, self.train)
        return f"with {', '.join(first)} and {last} samples on the ranks"

    @property
    def batches(self) -> list[int]:
        """Of each rank in an epoch."""
        return [math.ceil(n / BATCH) for n in self.train]


SPLITS: dict[int, list[Split]] = {
    2: [Split((12, 12), (6, 6)), Split((13, 22), (9, 4))],
    3: [Split((9, 22, 14), (5, 3, 8)), Split((8, 0, 17), (0, 6, 5))],
}
"""{ranks: splits}. The first is even: what hangs there does not hang for want of data."""


class Job:
    """A training on this rank: a small network in FP64, momentum, files that hold what `split` says."""

    epochs = EPOCHS

    def __init__(self, split: Split, rank: int, write: Callable[..., None]) -> None:
        self._split, self._rank, self._write = split, rank, write
        self.model, self.optimizer = _start()
        self.optimizer.register_step_post_hook(lambda *_: write("step"))

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches (x, y) of this rank's own training samples; their number is known when the last one was read."""
        for numbers in batches_of(self._split, self._rank, epoch):
            yield samples(numbers)

    def validation(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches (x, y) of this rank's own validation samples."""
        self._write("validation")
        for numbers in _cut(_own(self._split.valid, self._rank, 1000)):
            yield samples(numbers)

    def loss(self, predicted: Tensor, y: Tensor) -> Tensor:
        """Sum of squared errors over the samples."""
        return _loss(predicted, y)

    def log(self, epoch: int, train_loss: float, valid_loss: float) -> None:
        """Write one line of the log: mean losses over the samples of all ranks."""
        self._write("log", epoch=int(epoch), train=float(train_loss), valid=float(valid_loss))


def _start() -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(10)
        model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)


def _loss(predicted: Tensor, y: Tensor) -> Tensor:
    return (predicted.squeeze(1) - y).square().sum()


def samples(numbers: list[int]) -> tuple[Tensor, Tensor]:
    """x (n, FEATURES) and y (n,) of the samples with these numbers. No two batches are alike."""
    n = torch.tensor(numbers, dtype=torch.float64)
    x = torch.stack([torch.sin(n * (k + 1.7)) for k in range(FEATURES)], 1)
    return x, x[:, 0] - 2 * x[:, 1] * x[:, 2] + 0.3 * torch.cos(n)


def _own(sizes: tuple[int, ...], rank: int, first: int) -> list[int]:
    begin = first + sum(sizes[:rank])
    return list(range(begin, begin + sizes[rank]))


def _cut(numbers: list[int]) -> list[list[int]]:
    return [numbers[k : k + BATCH] for k in range(0, len(numbers), BATCH)]


def batches_of(split: Split, rank: int, epoch: int) -> list[list[int]]:
    """Numbers of the samples in each of a rank's batches, in a new order in each epoch."""
    numbers = _own(split.train, rank, 0)
    random.Random(f"epoch {epoch} of rank {rank}").shuffle(numbers)
    return _cut(numbers)


# -- what must come out: all ranks' samples in one process, right or with one mistake


@dataclass(frozen=True)
class Trained:
    """What a whole training gives: the weights after it, the steps, and (train, valid) of each epoch's log."""

    weights: list[float]
    steps: int
    log: list[tuple[float, float]]


def trained(split: Split, wrong: str = "") -> Trained:
    """One process trains on what all ranks have in each step. `wrong`: a mistake of SLIPS."""
    model, optimizer = _start()
    ranks, steps, log = range(len(split.train)), 0, []
    for epoch in range(EPOCHS):
        parts = [batches_of(split, rank, epoch) for rank in ranks]
        if wrong == "full only":
            parts = [[batch for batch in part if len(batch) == BATCH] for part in parts]
        longest = (min if wrong == "shortest" else max)(map(len, parts))
        if wrong == "again":
            parts = [[part[k % len(part)] for k in range(longest)] if part else [] for part in parts]
        if wrong == "last again":
            parts = [part + part[-1:] * (longest - len(part)) for part in parts]
        total = count = 0.0
        for k in range(longest):
            now = [part[k] for part in parts if k < len(part)]
            x, y = samples([n for batch in now for n in batch])
            before = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
            optimizer.zero_grad()
            loss = _loss(model(x), y)
            loss.backward()
            if wrong == "stale":
                for p, averaged in zip(model.parameters(), before, strict=True):
                    p.grad += (len(ranks) - len(now)) * averaged
            total, count = total + loss.item(), count + len(y)
            _divide(model, now, len(ranks), wrong)
            optimizer.step()
            steps += 1
        with torch.no_grad():
            x, y = samples([n for rank in ranks for n in _own(split.valid, rank, 1000)])
            log.append((total / count if count else math.nan, float(_loss(model(x), y)) / len(y)))
    return Trained(_flat(model), steps, log)


def _divide(model: nn.Module, now: list[list[int]], ranks: int, wrong: str) -> None:
    """Gradients of the sum over this step's batches -> those of the mean, rightly over all their samples."""
    count = sum(map(len, now))
    if wrong in ("world", "active"):  # means of the ranks' means
        total = [torch.zeros_like(p) for p in model.parameters()]
        for batch in now:
            x, y = samples(batch)
            grads = torch.autograd.grad(_loss(model(x), y) / len(y), list(model.parameters()))
            total = [t + g for t, g in zip(total, grads, strict=True)]
        for p, t in zip(model.parameters(), total, strict=True):
            p.grad = t / (ranks if wrong == "world" else len(now))
        return
    by = {"full": BATCH * ranks, "sum": 1}.get(wrong, count)
    for p in model.parameters():
        p.grad /= by


def _flat(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


SLIPS = {
    "shortest": (
        "all ranks stop with the one that has the fewest batches: the others' last batches are never trained on",
        "go on until no rank has a batch left; a rank without one takes part with nothing to add",
    ),
    "again": (
        "a rank that has run out of batches begins its own again: these samples count more often than the others",
        "it takes part with no samples: a gradient of 0 and a count of 0",
    ),
    "last again": (
        "a rank that has run out of batches repeats its last one: its samples count more often than the others",
        "it takes part with no samples: a gradient of 0 and a count of 0",
    ),
    "stale": (
        "a rank that has run out of batches hands in the averaged gradient of the step before once more",
        "job.optimizer.zero_grad() in every step, also without a batch",
    ),
    "full only": ("batches that are not full are never trained on", "a rank's last batch is smaller, and counts"),
    "world": (
        "you average over the ranks: a sample in a small batch counts more than one in a large batch, and a rank "
        "without a batch pulls the gradient towards 0",
        "divide the sum of gradients by the number of samples that all ranks have in this step",
    ),
    "active": (
        "you average over the ranks that have a batch: a sample in a small batch counts more than one in a large batch",
        "divide the sum of gradients by the number of samples that all ranks have in this step",
    ),
    "full": (
        "you divide by the samples of full batches, also where batches are small or missing",
        "divide by the number of samples that all ranks have in this step",
    ),
    "sum": ("the gradients are added up over samples and never divided", "the mean over the step's samples is asked"),
}
"""Ways to train on something else than the mean over all samples, each simulated by `trained`."""


# -- on the ranks: everything is written down at once, since a rank that hangs returns nothing


def _body(f: Function, splits: list[Split], folder: str) -> list[list[float]]:
    torch.set_num_threads(1)
    weights, rank = [], dist.get_rank()
    own = code.co_filename if (code := _code(f)) else ""
    for k, split in enumerate(splits):
        with (Path(folder) / f"{k}-{rank}.jsonl").open("w", buffering=1) as file:

            def write(event: str, file: Any = file, **values: Any) -> None:
                file.write(json.dumps({"event": event, **values}) + "\n")

            job = Job(split, rank, write)
            began = time.monotonic()
            try:
                with _collectives(own, write):
                    f(job)
            except BaseException as error:
                write("raised", error=f"{type(error).__name__}: {error}"[:300])
                time.sleep(0.3)  # the first error ends all ranks: the others write down theirs, too
                raise
            write("returned", seconds=time.monotonic() - began, waits=answers.WAIT_S)
            weights.append(_flat(job.model))
            # Slower to give up than a collective, so that the first error is that of the learner's line.
            dist.monitored_barrier(timeout=timedelta(seconds=answers.WAIT_S + 1.0))  # or a rank would begin the next
    return weights


@contextmanager
def _collectives(own: str, write: Callable[..., None]) -> Iterator[None]:
    """Writes down each collective that is called, with the line of the file `own` that leads to it."""
    c10d = dist.distributed_c10d
    known = {getattr(f, "__wrapped__", f).__code__ for name in NAMES if (f := getattr(c10d, name, None))}

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in known:
            above: FrameType | None = frame
            while above and above.f_code.co_filename != own:
                above = above.f_back
            line = above.f_lineno if above else 0
            write("call", name=frame.f_code.co_name, line=line, source=linecache.getline(own, line).strip())

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


NAMES = (
    "all_reduce",
    "broadcast",
    "barrier",
    "all_gather",
    "reduce",
    "gather",
    "scatter",
    "monitored_barrier",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "all_gather_into_tensor",
    "reduce_scatter",
    "all_to_all",
    "reduce_scatter_tensor",
    "send",
    "recv",
)


# -- the checks


@dataclass(frozen=True)
class Seen:
    """What one rank wrote down about one split."""

    events: list[dict[str, Any]]

    def of(self, event: str) -> list[dict[str, Any]]:
        """Its events of one kind."""
        return [e for e in self.events if e["event"] == event]

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return len(self.of("step"))

    @property
    def stuck_after_wait(self) -> bool:
        """It has returned, but only after a collective gave up."""
        return any(e["seconds"] >= e["waits"] for e in self.of("returned"))

    def where(self) -> str:
        """Where it is, for a learner."""
        steps = f"after {self.steps} step{'' if self.steps == 1 else 's'}"
        calls = self.of("call")
        if self.of("returned"):
            return f"has returned {steps}"
        if not calls:
            return f"calls no collective {steps}"
        last = calls[-1]
        source = f", {last['source']}" if last["source"] else ""
        line = f" (line {last['line']}{source})" if last["line"] else ""
        return f"is in {last['name']} {steps}{line}"


def check_train(f: Function) -> None:
    """Even shards first, then uneven ones, on 2 and 3 ranks: it ends, trains on all there is, and logs it."""
    with tempfile.TemporaryDirectory(prefix="labs-deadlock-") as root:
        for ranks, splits in SPLITS.items():
            folder = Path(root) / str(ranks)
            folder.mkdir()
            try:
                weights = on_ranks(_body, ranks, f, splits, str(folder), when="")
            except (Mistake, RankFailed) as error:
                _explain_hang(f, splits, ranks, folder, error)
                raise
            for k, split in enumerate(splits):
                seen = [_read(folder, k, rank) for rank in range(ranks)]
                _check_split(f, split, seen, [w[k] for w in weights])


def _read(folder: Path, k: int, rank: int) -> Seen:
    path = folder / f"{k}-{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return Seen([json.loads(line) for line in lines if line.endswith("}")])


def _explain_hang(f: Function, splits: list[Split], ranks: int, folder: Path, error: Mistake | RankFailed) -> None:
    """Mistake that says where each rank is. Returns if the ranks did not wait for each other."""
    k = max((k for k in range(len(splits)) if _read(folder, k, 0).events), default=0)
    seen, split = [_read(folder, k, rank) for rank in range(ranks)], splits[k]
    _check_swallowed(f, split, seen)
    if not isinstance(error, Mistake) or "wait for each other" not in error.what:
        return
    places = "; ".join(f"rank {rank} {s.where()}" for rank, s in enumerate(seen))
    even = len(set(split.batches)) == 1
    raise Mistake(
        f"{split}, they wait for each other for ever: {places}",
        "all ranks have as many batches here, so look for a collective that not every rank calls, also within the "
        "functions that are called under `if dist.get_rank() == 0`"
        if even
        else "all ranks must do as many steps: one that has no batch left still has to take part in each collective of "
        "a step; how do the others learn that it is the last one?",
    )


def _check_swallowed(f: Function, split: Split, seen: list[Seen]) -> None:
    late = [rank for rank, s in enumerate(seen) if s.stuck_after_wait]
    if late and (code := _code(f)) and _catches(code):
        raise Mistake(
            f"{split}, rank {late[0]} waited until its collective gave up, and your `except` went on as if it had "
            "worked: what it trained on then is not the average, and the group is broken",
            "a timeout is the message, not the illness: make all ranks call the same collectives",
        )


def _code(f: Function) -> CodeType | None:
    """Of the learner's own function; None if it is something else that can be called."""
    inner = inspect.unwrap(f) if inspect.isfunction(f) else None
    return getattr(inner, "__code__", None) if inspect.isroutine(inner) else None


def _catches(code: CodeType) -> bool:
    """Whether this code, or a function in it, has an `except` or a contextlib.suppress."""
    steps = [i.opname for i in dis.get_instructions(code)]
    bare = ("PUSH_EXC_INFO", "POP_TOP") in itertools.pairwise(steps)  # `with` and `finally` go on otherwise
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return bare or "CHECK_EXC_MATCH" in steps or "suppress" in code.co_names or any(map(_catches, inner))


def _check_split(f: Function, split: Split, seen: list[Seen], weights: list[list[float]]) -> None:
    want = trained(split)
    try:
        _check_weights(split, want, [s.steps for s in seen], weights)
        _check_log(split, want, seen)
    except Mistake:
        _check_swallowed(f, split, seen)  # the cause of what was found; on a busy machine a right answer waits, too
        raise


def _check_weights(split: Split, want: Trained, steps: list[int], weights: list[list[float]]) -> None:
    if not any(steps):
        raise Mistake("nothing is trained: job.optimizer.step() is never called", "keep the given loop")
    if all(_alike(w, weights[0]) for w in weights) and _alike(weights[0], want.weights):
        return
    if len(set(steps)) > 1:
        rank = steps.index(min(steps))
        raise Mistake(
            f"{split}, rank {rank} does {steps[rank]} optimizer steps and rank {steps.index(max(steps))} does "
            f"{max(steps)}: their weights are not the same any more",
            "job.optimizer.step() on every rank in every step, with the averaged gradient, also without a batch",
        )
    other = [rank for rank, w in enumerate(weights) if not _alike(w, weights[0])]
    if other:
        raise Mistake(
            f"{split}, rank {other[0]} ends with other weights than rank 0",
            "each step's gradient must be the same on all ranks: reduce it over all of them, then step",
        )
    for wrong, (what, hint) in SLIPS.items():
        found = trained(split, wrong)
        if _alike(weights[0], found.weights):
            raise Mistake(f"{split}: {what}", hint)
    if steps[0] != want.steps:
        raise Mistake(
            f"{split}, {steps[0]} steps are done, and {want.steps} are to be done: {max(split.batches)} in each of "
            f"{EPOCHS} epochs, as many as the longest has batches",
            "go on until no rank has a batch left, and no longer",
        )
    raise Mistake(
        f"{split}, {steps[0]} steps are done, as many as must be, and the weights are not those of the mean over all "
        "samples of each step",
        "step k trains on the k-th batch of every rank that has one: sum of gradients / number of samples",
    )


def _check_log(split: Split, want: Trained, seen: list[Seen]) -> None:
    logs = [s.of("log") for s in seen]
    if others := [rank for rank, log in enumerate(logs) if rank and log]:
        raise Mistake(f"rank {others[0]} writes the log, too", "all ranks compute the losses, rank 0 alone logs them")
    if [row["epoch"] for row in logs[0]] != list(range(EPOCHS)):
        raise Mistake(
            f"rank 0 logs the epochs {[row['epoch'] for row in logs[0]]}, and {EPOCHS} were trained",
            "job.log(epoch, train_loss, valid_loss) once after each epoch",
        )
    passed = [len(s.of("validation")) for s in seen]
    if not any(passed):
        raise Mistake("nothing is validated any more", "validate(job) after each epoch, on all ranks")
    for epoch, (row, (train_loss, valid_loss)) in enumerate(zip(logs[0], want.log, strict=True)):
        for name, found, right in (("training", row["train"], train_loss), ("validation", row["valid"], valid_loss)):
            if _alike([found], [right], LOG_RTOL):
                continue
            alone = name == "validation" and not all(passed)
            raise Mistake(
                f"{split}, the {name} loss of epoch {epoch} is {right:.6g} over the samples of all ranks, and you log "
                f"{found:.6g}" + (": only rank 0 has validated" if alone and passed[0] else ""),
                "add up losses and numbers of samples over all ranks, then divide; "
                "not the mean of the ranks' means, and not rank 0's own",
            )


def _alike(a: list[float], b: list[float], rtol: float = RTOL) -> bool:
    return torch.allclose(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64), rtol, rtol)


def shown_splits() -> str:
    """What the check trains on: samples and batches of each rank."""
    rows = ["ranks  training samples  batches in an epoch  validation samples"]
    rows += [
        f"{ranks:5}  {_row(s.train):16}  {_row(s.batches):19}  {_row(s.valid)}"
        for ranks, splits in SPLITS.items()
        for s in splits
    ]
    return "\n".join(rows)


def _row(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


EXERCISE = Exercise("a loop that hangs on uneven data", check_train, train)
