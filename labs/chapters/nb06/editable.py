"""The editable round of notebook 06: a step over two ranks, checked against one process; a deadlock ends in seconds."""

from __future__ import annotations

import datetime
import linecache
import sys
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.kit.launch import RankTimeout, run_on_ranks

Step = Callable[[nn.Module, Tensor, Tensor], object]
FEATURES, HIDDEN, CLASSES, ROWS = 32, 64, 10, 16
NEAR = 1e-5  # rounding in FP32; a step that is wrong differs by far more
WAIT_S, RUN_S = 5.0, 60.0  # for a message; for the whole step with the start of its ranks


class Waits(NamedTuple):
    """Where a rank was when it gave up waiting for another."""

    peer: int
    file: str
    line: int


class _GivenUp(Exception):
    """Carries a Waits out of the learner's step."""


def try_step(step: Step) -> None:
    """Print whether `step(half, x, y)` on two ranks leaves the gradients of one process in both halves.

    Rank 0 has the first half, rank 1 the second. A message that does not come is waited for WAIT_S.
    """
    try:
        found = run_on_ranks(_try, 2, step, timeout_s=RUN_S)
    except RankTimeout:
        print(f"Given up after {RUN_S:g} s: the step does not end, and waits for no message.")
        return
    waiting = {rank: w for rank, w in enumerate(found) if isinstance(w, Waits)}
    wrong = [f"rank {rank}'s half" for rank, error in enumerate(found) if rank not in waiting and not error < NEAR]
    for rank, w in waiting.items():
        words = linecache.getline(w.file, w.line).partition("#")[0].strip()
        print(f"Given up after {WAIT_S:g} s: rank {rank} waits for rank {w.peer} in line {w.line}, {words}")
    if len(waiting) == 2:
        print("Each waits for the other, and would for ever: a deadlock.")
    elif waiting:
        print("The other rank has ended its step, and would never have answered.")
    elif wrong:
        print(f"The step ends, and the gradient in {' and '.join(wrong)} is not that of one process.")
    else:
        print("Both halves have the gradients of one process.")


def _try(step: Step) -> float | Waits:
    """||g - G|| / ||G|| of this rank's half, infinity if a parameter has no gradient; or where the rank waited."""
    torch.manual_seed(0)  # the same model on both ranks
    halves = [nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU()), nn.Linear(HIDDEN, CLASSES)]
    x, y = torch.randn(ROWS, FEATURES), torch.randint(CLASSES, (ROWS,))
    mine = halves[dist.get_rank()]
    nn.functional.cross_entropy(halves[1](halves[0](x)), y).backward()
    wanted = torch.cat([p.grad.flatten() for p in mine.parameters()])
    mine.zero_grad(set_to_none=True)
    dist.barrier()  # who was quick so far does not wait for the other one in its step
    try:
        with mock.patch.multiple(dist, send=_impatient(dist.isend), recv=_impatient(dist.irecv)):
            step(mine, x, y)
    except _GivenUp as e:
        return e.args[0]
    if any(p.grad is None for p in mine.parameters()):
        return float("inf")
    found = torch.cat([p.grad.flatten() for p in mine.parameters()])
    return float((found - wanted).norm() / wanted.norm())


def _impatient(start: Callable[..., dist.Work]) -> Callable[..., None]:
    """`send` or `recv` that waits for WAIT_S only: gloo's own limit is set once, for the whole group."""

    def call(tensor: Tensor, *args: int, **kwargs: int) -> None:
        work = start(tensor, *args, **kwargs)
        try:
            work.wait(datetime.timedelta(seconds=WAIT_S))
        except RuntimeError:
            frame = sys._getframe(1)
            raise _GivenUp(Waits(1 - dist.get_rank(), frame.f_code.co_filename, frame.f_lineno)) from None

    return call
