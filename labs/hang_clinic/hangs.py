"""Small programs that hang or crash on 2 to 4 ranks, each by one line, and the same programs with the line put right.

Each is called on every rank of a gloo group. Rank `wrong` does the wrong thing in the last step; with cured=True the
situation is the same and the code is right. `<-` marks the line that a diagnosis has to name.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

STEPS = 4
LAST = STEPS - 1
BUSY_S = 30.0  # of a rank that does something else, longer than anybody waits here
Program = Callable[[int, int, bool], None]


@dataclass(frozen=True)
class Hang:
    """A program, what a right diagnosis of it names, and its cure in words."""

    program: Program
    collective: tuple[str, ...]
    """Names under which the recorder knows the call."""
    cure: str
    both: bool = False
    """Whether rank `wrong` and the one after it are equally at fault."""

    @property
    def lines(self) -> list[int]:
        """Line numbers, in this file, of what is marked."""
        text, first = inspect.getsourcelines(self.program)
        return [first + i for i, line in enumerate(text) if "# <-" in line]

    def ranks(self, wrong: int, ranks: int) -> tuple[int, ...]:
        """Whom a right diagnosis names."""
        return tuple(sorted({wrong, (wrong + 1) % ranks})) if self.both else (wrong,)


HANGS: dict[str, Hang] = {}


def hang(*collective: str, cure: str, both: bool = False) -> Callable[[Program], Program]:
    """Register a program under its name."""

    def register(program: Program) -> Program:
        HANGS[program.__name__] = Hang(program, collective, cure, both)
        return program

    return register


@hang("all_reduce", cure="call it on every rank, outside of the condition")
def skipped_collective(rank, wrong, cured):
    loss, gradient = torch.ones(1), torch.ones(1)
    for step in range(STEPS):
        if cured or rank != wrong or step < LAST:
            dist.all_reduce(loss)  # <- rank `wrong` never comes here: its next call meets this one instead
        dist.all_reduce(gradient)


@hang("all_reduce", "broadcast", cure="the same order on every rank: no sets, no dicts filled by arrival")
def other_order(rank, wrong, cured):
    a, b = torch.ones(4), torch.ones(4)
    for step in range(STEPS):
        if cured or rank != wrong or step < LAST:
            dist.all_reduce(a)
            dist.broadcast(b, src=0)
        else:
            dist.broadcast(b, src=0)  # <- the others are in all_reduce
            dist.all_reduce(a)


@hang("all_reduce", cure="pad or drop the last batch, or exchange a sum whose size is fixed")
def wrong_shape(rank, wrong, cured):
    for step in range(STEPS):
        rows = 3 if rank == wrong and step == LAST else 4  # the last batch of rank `wrong` is smaller
        scores = torch.ones(rows)
        if cured:
            scores = nn.functional.pad(scores, (0, 4 - rows))
        dist.all_reduce(scores)  # <- gloo ends one of the ranks: no exception, no dump


@hang("all_reduce", cure="one type for what is exchanged: .to(torch.float32) before the call")
def wrong_dtype(rank, wrong, cured):
    for step in range(STEPS):
        loss = torch.ones(4)
        if rank == wrong and step == LAST:
            loss = loss.double()  # a NumPy number got in
        dist.all_reduce(loss.float() if cured else loss)  # <- 8 bytes a number meet 4


@hang("all_reduce", cure="pass group= to all of them, or to none")
def wrong_group(rank, wrong, cured):
    everybody = dist.new_group()  # the same ranks, yet another group: calls count apart
    for step in range(STEPS):
        forgotten = rank == wrong and step == LAST and not cured
        dist.all_reduce(torch.ones(1), group=None if forgotten else everybody)  # <- in the default group, alone


@hang("all_reduce", cure="Join, drop_last, or DistributedSampler, which gives all ranks equally many")
def out_of_data(rank, wrong, cured):
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    batches = STEPS - (rank == wrong)
    with Join([ddp]) if cured else contextlib.nullcontext():
        for _ in range(batches):
            ddp(torch.ones(2, 4)).sum().backward()  # <- one rank has one batch less, and has left


@hang("all_reduce", cure="nothing in the code: find out who killed it (the kernel: dmesg; a scheduler: its log)")
def dead_peer(rank, wrong, cured):
    for step in range(STEPS):
        if rank == wrong and step == LAST and not cured:
            os.kill(os.getpid(), signal.SIGKILL)  # as the system does when memory runs out
        dist.all_reduce(torch.ones(1))  # <- the others wait here


@hang("recv", cure="one of the two sends first, or batch_isend_irecv", both=True)
def deadlocked_p2p(rank, wrong, cured):
    other = (wrong + 1) % dist.get_world_size()
    pair = {wrong: other, other: wrong}
    mine, theirs = torch.ones(4), torch.empty(4)
    if rank in pair:
        if cured and rank == wrong:
            dist.send(mine, pair[rank])
        dist.recv(theirs, pair[rank])  # <- both receive first
        if not cured or rank != wrong:
            dist.send(mine, pair[rank])
    dist.barrier()


class Fragile(Dataset):
    """Numbers; the worker that reads the last one is killed."""

    def __init__(self, kills: bool) -> None:
        self.kills = kills

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, i: int) -> torch.Tensor:
        if self.kills and i == LAST:
            time.sleep(0.2)  # the batches before it have been handed over
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(1) * i


@hang("all_reduce", cure="fewer workers, smaller batches, more memory or /dev/shm; dmesg shows an out-of-memory kill")
def dead_loader_worker(rank, wrong, cured):
    data = Fragile(kills=rank == wrong and not cured)
    loader = DataLoader(data, num_workers=1, prefetch_factor=1, multiprocessing_context="fork")
    for batch in loader:  # <- raises on this rank alone; the others wait in all_reduce
        dist.all_reduce(batch)


@hang("barrier", cure="decide together: all_reduce the decision, then all stop or none")
def early_stop(rank, wrong, cured):
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    for step in range(STEPS):
        bad = torch.tensor(float(rank == wrong and step == LAST))  # this rank's validation got worse
        if cured:
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad > 0:
            break
        ddp(torch.ones(2, 4)).sum().backward()
    dist.barrier()  # <- this rank is here while the others are in backward


@hang("broadcast", cure="validate with ddp.module, which exchanges nothing, or on all ranks")
def validation_on_one_rank(rank, wrong, cured):
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for step in range(STEPS):
        ddp(torch.ones(2, 4)).sum().backward()
        if rank == wrong and step == LAST - 1:
            model = ddp.module if cured else ddp
            model(torch.ones(2, 4))  # <- forward of DDP sends buffers around: a collective
    dist.barrier()


@hang("barrier", cure="a barrier on all ranks, or on none: rank 0 saves while the others go on")
def barrier_on_one_rank(rank, wrong, cured):
    for step in range(STEPS):
        dist.all_reduce(torch.ones(4))
        if rank == wrong and step == LAST - 1:  # "only one rank saves"
            time.sleep(0.01)  # torch.save(...)
            if not cured:
                dist.barrier()  # <- the others are in the next all_reduce


@hang("all_reduce", cure="let it raise: a rank that goes on alone does more harm than one that ends")
def swallowed_exception(rank, wrong, cured):
    total, count = torch.ones(1), torch.ones(1)
    for step in range(STEPS):
        value = "bad" if rank == wrong and step == LAST else "1.0"
        with contextlib.suppress(ValueError):
            number = 0.0 if cured and value == "bad" else float(value)
            dist.all_reduce(total * number)  # <- not called after the error that nobody saw
        dist.all_reduce(count)


@hang("all_reduce", cure="take the condition from a number that all ranks share")
def local_condition(rank, wrong, cured):
    for step in range(STEPS):
        loss = torch.tensor(9.0 if rank == wrong and step == LAST else 1.0)
        if cured:
            dist.all_reduce(loss, op=dist.ReduceOp.MAX)
        if loss < 5.0:  # skip steps whose loss is too large: this rank's own loss
            gradient = torch.ones(4)
            dist.all_reduce(gradient)  # <- this rank has skipped it
    time.sleep(0.0 if cured or rank != wrong else BUSY_S)  # it writes a long report, say
