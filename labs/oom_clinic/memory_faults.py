"""Programs that run out of memory, each by another cause, its guilty line marked with `<-`; and the lines of cures.

A program is a generator: it has done one more step each time that it is asked. `run_out(cause, cure)` is the program
with the cure's line in place of the guilty one.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from labs.common.traps.datasets import Blocks, Items, Objects

MIB = 2**20
BATCH_ROWS, FEW, WIDE = 8_000, 64, 320  # rows of a large and of a small batch; width of a model with large states


class Job(Protocol):
    """What a program works with; labs.oom_clinic.memory_end makes it."""

    size: float
    """How large all is, 1.0 as a rule."""
    folder: Path

    def build(self, width: int) -> None:
        """A model of this width, and AdamW for it."""

    def model(self, x: Tensor) -> Tensor:
        """Forward: (rows, width) -> (rows, labels)."""

    def batches(self, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A fresh batch for each step: x (rows, width), y (rows,)."""

    def load(self, dataset: Dataset, batch_size: int | None, workers: int, prefetch: int) -> Iterator[Any]:
        """From a DataLoader, a batch for each step."""

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """A scalar."""

    def train(self, x: Tensor, y: Tensor) -> None:
        """One training step: forward, backward, optimizer, zero_grad."""


def healthy(job: Job) -> Iterator[None]:
    """Nothing is wrong: a small batch, a small model, nothing kept."""
    job.build(width=32)
    for x, y in job.batches(rows=512):
        job.train(x, y)
        yield


def batch(job: Job) -> Iterator[None]:
    """Autograd keeps what the layers compute, for every row, until backward has used it."""
    job.build(width=32)
    for x, y in job.batches(rows=int(BATCH_ROWS * job.size)):  # <-
        job.train(x, y)
        yield


def states(job: Job) -> Iterator[None]:
    """16 bytes per parameter: FP32 parameter, gradient, and two numbers of Adam. No batch changes that."""
    job.build(width=int(WIDE * job.size**0.5))  # <-
    for x, y in job.batches(rows=FEW):
        job.train(x, y)
        yield


def graph(job: Job) -> Iterator[None]:
    """A validation loss is added up without no_grad: the sum keeps the graph of each step, with its activations."""
    job.build(width=32)
    total = torch.zeros(())
    for x, y in job.batches(rows=int(2_500 * job.size)):
        job.train(x, y)
        loss = job.loss(job.model(x), y)
        total = total + loss  # <-
        yield


def outputs(job: Job) -> Iterator[None]:
    """Outputs of each step are kept for a metric at the end of the epoch."""
    job.build(width=32)
    kept = []
    for x, y in job.batches(rows=int(8_000 * job.size)):
        with torch.no_grad():
            output = job.model(x)
        kept.append(output)  # <-
        job.train(x[:64], y[:64])
        yield


def closure(job: Job) -> Iterator[None]:
    """A function for later remembers the batch of its step. Without `x=x` all would share the last one: no leak."""
    job.build(width=32)
    later = []
    for x, y in job.batches(rows=int(50_000 * job.size)):
        later.append(lambda x=x: x.mean().item())  # <-
        job.train(x[:64], y[:64])
        yield


def python_objects(job: Job) -> Iterator[None]:
    """A log in plain Python: a float object of 24 bytes and a pointer of 8 for each number, and no tensor at all."""
    job.build(width=32)
    log = []
    for x, y in job.batches(rows=int(8_000 * job.size)):
        log.append(x.tolist())  # <-
        job.train(x[:64], y[:64])
        yield


def worker_objects(job: Job) -> Iterator[None]:
    """Reading a Python object counts a reference in it, so that a forked worker copies every page that it reads."""
    data = Objects(parts=4, held="list of str", objects=int(150_000 * job.size))  # <-
    job.build(width=32)
    every_worker_reads_all = [part for part in range(2, 6) for _ in range(2)]
    for _, (x, y) in zip(
        job.load(Chosen(data, every_worker_reads_all), None, workers=2, prefetch=1), job.batches(rows=FEW), strict=False
    ):
        job.train(x, y)
        yield


def worker_buffers(job: Job) -> Iterator[None]:
    """Each worker makes a table of its own when it starts; there are as many tables as workers."""
    data = WithTable(count=64, table_bytes=int(12 * MIB * job.size))
    job.build(width=32)
    for _, (x, y) in zip(job.load(data, None, workers=4, prefetch=1), job.batches(rows=FEW), strict=False):  # <-
        job.train(x, y)
        yield


def prefetch(job: Job) -> Iterator[None]:
    """Workers are ahead by prefetch_factor batches each, and what is ready waits in shared memory."""
    data = Blocks(count=256, size=int(MIB * job.size))
    job.build(width=32)
    for _, (x, y) in zip(job.load(data, 4, workers=2, prefetch=8), job.batches(rows=FEW), strict=False):  # <-
        job.train(x, y)
        time.sleep(0.03)  # a step that is slower than the loading of a batch
        yield


def shared_memory(job: Job) -> Iterator[None]:
    """Batches travel through /dev/shm, which is small in a container: 64 MB unless told otherwise."""
    data = Blocks(count=64, size=int(MIB * job.size))
    job.build(width=32)
    for _, (x, y) in zip(job.load(data, 8, workers=1, prefetch=2), job.batches(rows=FEW), strict=False):  # <-
        job.train(x, y)
        time.sleep(0.03)
        yield


def address_space(job: Job) -> Iterator[None]:
    """A file is mapped into memory. It takes addresses, hardly any memory; `ulimit -v` counts addresses."""
    tokens = np.memmap(job.folder / "tokens.bin", np.uint8, "w+", shape=int(160 * MIB * job.size))  # <-
    job.build(width=32)
    for x, y in job.batches(rows=int(5_000 * job.size)):
        tokens[: len(x)].sum()
        job.train(x, y)
        yield


def limit_bytes(cause: str, size: float) -> int:
    """Above its start, where a program of this size is ended."""
    return FROM_THE_START.get(cause, 0) + int(size * ENDS[cause][1])


class Chosen(Dataset):
    """Items of another dataset, in an order of one's own."""

    def __init__(self, dataset: Dataset, order: list[int]) -> None:
        self.dataset, self.order = dataset, order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, item: int) -> Any:
        return self.dataset[self.order[item]]


class WithTable(Items):
    """Item: its number. Whichever process reads the first one makes a table for itself and keeps it."""

    def __init__(self, count: int, table_bytes: int) -> None:
        super().__init__(count)
        self.table_bytes, self.table = table_bytes, None

    def __getitem__(self, item: int) -> int:
        if self.table is None:
            self.table = np.ones(self.table_bytes, np.uint8)
        return item


PROGRAMS: dict[str, Callable[[Job], Iterator[None]]] = {
    "batch": batch,
    "states": states,
    "graph": graph,
    "outputs": outputs,
    "closure": closure,
    "python_objects": python_objects,
    "worker_objects": worker_objects,
    "worker_buffers": worker_buffers,
    "prefetch": prefetch,
    "shared_memory": shared_memory,
    "address_space": address_space,
}
End = Literal["none", "data", "addresses", "killer", "shm"]
"""What ends the process: nothing, RLIMIT_DATA, RLIMIT_AS, the watcher, a small /dev/shm."""
TRAINER: tuple[End, ...] = ("data", "killer")
ENDS: dict[str, tuple[tuple[End, ...], int]] = {
    "batch": (TRAINER, 22 * MIB),
    "states": (TRAINER, 30 * MIB),
    "graph": (TRAINER, 54 * MIB),
    "outputs": (TRAINER, 32 * MIB),
    "closure": (TRAINER, 40 * MIB),
    "python_objects": (TRAINER, 48 * MIB),
    "worker_objects": (("killer",), 32 * MIB),
    "worker_buffers": (("killer",), 24 * MIB),
    "prefetch": (("killer",), 50 * MIB),
    "shared_memory": (("shm",), 4 * MIB),
    "address_space": (("addresses",), 120 * MIB),
}
"""How a program can end, and at how many bytes above its start, for size 1 and without what is below."""
FROM_THE_START = {"worker_objects": 20 * MIB, "worker_buffers": 30 * MIB, "prefetch": 20 * MIB}
"""What forked workers have for themselves before they have done anything, some 9 MB each, at any size."""
STEPS = {"batch": 2, "states": 2, "address_space": 2, "worker_objects": 8}
"""Steps after which a program without limit has shown all that it takes; 5 of the others."""
LOADER = ("worker_objects", "worker_buffers", "prefetch", "shared_memory")
"""Causes with DataLoader workers."""
WHAT = {
    "batch": "the batch is too large: activations",
    "states": "parameters, gradients and the optimizer's state",
    "graph": "a graph that is kept from step to step",
    "outputs": "outputs that are kept in a list",
    "closure": "batches that a function remembers",
    "python_objects": "Python objects of the trainer",
    "worker_objects": "Python objects that workers copy",
    "worker_buffers": "too many workers, each with memory of its own",
    "prefetch": "batches that workers have ready",
    "shared_memory": "/dev/shm is too small",
    "address_space": "a limit on addresses, not on memory",
}
"""What filled the memory, in words."""


@dataclass(frozen=True)
class Cure:
    """What a cure changes."""

    conditions: dict[str, Any] = field(default_factory=dict)
    """Of the training step: keywords of labs.common.oracle.step.Conditions."""
    rows: float = 1.0
    """Rows of each batch, as a share of those before."""
    trim: bool = False
    """After each step collect garbage, and have glibc give back what is free: malloc_trim."""
    loader: dict[str, int] = field(default_factory=dict)
    """num_workers or prefetch_factor."""
    lines: dict[str, tuple[str, str]] = field(default_factory=dict)
    """{cause: (guilty line, cured line)}; where it has no line, there is nothing to try."""
    from_articles: bool = False
    """Named by the articles (B33, B34, B41, D22 and D24 of the claims)."""

    def applies(self, cause: str) -> bool:
        """Whether it changes anything about that program. What the articles name is tried on all."""
        if self.lines:
            return cause in self.lines
        if self.loader:
            return cause in LOADER
        return self.from_articles or cause not in LOADER


NUMBER = "keep numbers only"
TRIM = "malloc_trim"
"""In place of empty_cache, which the articles name: that does nothing on a CPU."""
CURES: dict[str, Cure] = {
    "half the batch": Cure(rows=0.5, from_articles=True),
    "AMP (BF16)": Cure({"precision": "bf16"}, from_articles=True),
    "4 micro-batches": Cure({"micro_batches": 4}, from_articles=True),
    TRIM: Cure(trim=True, from_articles=True),
    "checkpointing": Cure({"policy": "block"}),
    "SGD, no momentum": Cure({"optimizer": "sgd"}),
    "set_to_none": Cure({"set_to_none": True}),
    "detach()": Cure(
        lines={
            "graph": ("total + loss", "total + loss.detach()"),
            "outputs": ("kept.append(output)", "kept.append(output.detach())"),
            "closure": ("lambda x=x:", "lambda x=x.detach():"),
        }
    ),
    NUMBER: Cure(
        lines={
            "graph": ("total + loss", "total + loss.item()"),
            "outputs": ("kept.append(output)", "kept.append(output.argmax(1).eq(y).sum().item())"),
            "closure": ("lambda x=x: x.mean().item()", "lambda mean=x.mean().item(): mean"),
            "python_objects": ("log.append(x.tolist())", "log.append(x.mean().item())"),
        }
    ),
    "one worker": Cure(loader={"workers": 1}),
    "prefetch_factor=1": Cure(loader={"prefetch": 1}),
    "array, no list": Cure(lines={"worker_objects": ('"list of str"', '"NumPy array"')}),
    "no memory map": Cure(
        lines={
            "address_space": (
                'np.memmap(job.folder / "tokens.bin", np.uint8, "w+", shape=int(160 * MIB * job.size))',
                "np.zeros(6_000, np.uint8)",
            ),
        }
    ),
}


def run_out(cause: str, cure: Cure | None = None) -> Callable[[Job], Iterator[None]]:
    """The program of a cause; with the line that the cure puts in place of the guilty one, if it has one."""
    program = PROGRAMS.get(cause, healthy)
    if cure is None or cause not in cure.lines:
        return program
    guilty, cured = cure.lines[cause]
    source = inspect.getsource(program)
    assert source.count(guilty) == 1, (cause, guilty)
    names = dict(globals())
    exec(compile(source.replace(guilty, cured), __file__, "exec"), names)
    return names[program.__name__]
