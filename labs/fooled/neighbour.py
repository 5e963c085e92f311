"""Way 4: first all of A, then all of B, and a neighbour moves in between."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import torch

from labs.kit import measure, supervise

BUSY = "import os, sys\nprint(flush=True)\nwhile os.getppid() == int(sys.argv[1]): pass"
"""A program that computes for as long as its parent lives, whose process id it is given."""
SIDE = 4096  # of the matrices that a GPU's neighbour multiplies


def one_after_the_other(
    step: Callable[[], object], rounds: int, device: torch.device, neighbour: Callable, seed: int
) -> tuple[float, float]:
    """(fooled, honest) time of `step` over its own time: the truth is 1. The neighbour is there half of the time."""
    a = measure.time_steps(step, rounds, device)
    with neighbour(device):
        b = measure.time_steps(step, rounds, device)
    blocked = statistics.median(b) / statistics.median(a)

    quiet = measure.interleave({"A": step, "B": step}, rounds // 2, device, seed=seed)
    with neighbour(device):
        loud = measure.interleave({"A": step, "B": step}, rounds // 2, device, seed=seed + 1)
    pairs = zip(quiet["A"] + loud["A"], quiet["B"] + loud["B"], strict=True)
    in_turn = statistics.median(b / a for a, b in pairs)
    return blocked, in_turn


@contextlib.contextmanager
def neighbour_on(device: torch.device) -> Iterator[None]:
    """Somebody else's work meanwhile: a busy process on this process's CPU cores, or a stream of products on its GPU.

    Both have ended when the block has. Should this process be killed, its neighbour ends by itself.
    """
    if device.type != "cpu":
        with _products_on(device):
            yield
        return
    command = [sys.executable, "-I", "-S", "-c", BUSY, str(os.getpid())]
    with supervise.started(command, stdout=subprocess.PIPE) as process:  # on the same cores
        process.stdout.read(1)  # it is at work
        yield


@contextlib.contextmanager
def _products_on(device: torch.device) -> Iterator[None]:
    """A thread that multiplies matrices in a stream of its own: a second process would first load CUDA for seconds."""
    leave, at_work = threading.Event(), threading.Event()

    def live() -> None:
        stream = torch.Stream(device)
        with stream:
            x = torch.randn(SIDE, SIDE, device=device)
            out = torch.empty_like(x)
            while not leave.is_set():
                torch.mm(x, x, out=out)
                stream.synchronize()  # one at a time: a long queue would make everyone wait for all of it
                at_work.set()

    thread = threading.Thread(target=live, name="neighbour", daemon=True)
    thread.start()
    try:
        at_work.wait(timeout=30)
        yield
    finally:
        leave.set()
        thread.join()
