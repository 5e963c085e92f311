"""The editable round of notebook 01: a learner's clock beside the device's own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch

from labs.kit.launch import run_on_ranks
from labs.parts.timing.streams import DeviceStream, HostStream, open_stream

Clock = Callable[[Callable[[], object], "DeviceStream | HostStream"], float]


def compare_clocks(clock: Clock, ranks: int) -> None:
    """Print what `clock(step, stream)` says that a step takes, in s, on each rank, and what the device noted itself.

    `step` is a product of two matrices. Ranks run on CPU cores, where the queue of a GPU is emulated by a thread.
    """
    for rank, (told, noted) in enumerate(run_on_ranks(_both, ranks, clock)):
        print(f"rank {rank}: your clock says {told * 1e3:.3g} ms per step, the device {noted * 1e3:.3g} ms: ", end="")
        if told < 0.5 * noted:
            print("you timed how fast work can be ordered.")
        elif told > 1.5 * noted:
            print("you timed something besides the steps.")
        else:
            print("you timed the work.")


def _both(clock: Clock) -> tuple[float, float]:
    """Seconds per step by the learner's clock, and by times that the device notes between the same steps."""
    a = torch.randn(512, 512)
    with contextlib.closing(open_stream(torch.device("cpu"))) as stream:
        for _ in range(3):
            stream.submit(torch.mm, a, a)
        stream.synchronize()

        def step() -> None:
            times.append(time.perf_counter())
            torch.mm(a, a)
            times.append(time.perf_counter())

        times: list[float] = []
        told = clock(step, stream)
        stream.synchronize()
    return told, (times[-1] - times[0]) / (len(times) // 2) if times else 0.0
