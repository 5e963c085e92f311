"""The editable round of notebook 01: a learner's clock beside the device's own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch

from labs.common.timing.streams import DeviceStream, EmulatedStream, open_stream
from labs.kit.launch import run_on_ranks

Clock = Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor, "DeviceStream | EmulatedStream"], float]


def compare_clocks(clock: Clock, ranks: int) -> None:
    """Print what `clock(step, batch, stream)` says that a step takes, in s, on each rank, and what the queue noted.

    `step` is a product of two matrices and returns a tensor of one number; `batch` lies on the host. Ranks run on CPU
    cores, where the queue of a GPU is emulated by a thread.
    """
    for rank, (told, noted) in enumerate(run_on_ranks(_both, ranks, clock)):
        print(
            f"rank {rank}: your clock says {told * 1e3:.3g} ms per step, the emulated device {noted * 1e3:.3g} ms: ",
            end="",
        )
        if told < 0.5 * noted:
            print("you timed how fast work can be ordered.")
        elif told < 0.98 * noted:
            print("you timed nearly all of the work: what was in the queue at the end is missing.")
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

        def step(x: torch.Tensor) -> torch.Tensor:
            times.append(time.perf_counter())
            loss = torch.mm(a, x).mean()
            times.append(time.perf_counter())
            return loss

        times: list[float] = []
        told = clock(step, a, stream)
        stream.synchronize()
    return told, (times[-1] - times[0]) / (len(times) // 2) if times else 0.0
