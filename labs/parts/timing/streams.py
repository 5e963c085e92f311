"""A GPU's stream of work, and what stands in for one on a CPU, where every operator returns when it is done."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from labs.kit import measure


def open_stream(device: torch.device) -> DeviceStream | HostStream:
    """The current stream of a GPU, or its stand-in. Close it with contextlib.closing."""
    return HostStream() if device.type == "cpu" else DeviceStream(device)


class DeviceStream:
    """A GPU's current stream: `submit` returns as soon as the kernels of the work are launched."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._events: list[torch.Event] = []

    def submit(self, work: Callable[..., object], *args: Any) -> None:
        """Launch `work(*args)`."""
        work(*args)

    def record_event(self) -> None:
        """Let the device note the time when it gets here."""
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        self._events.append(event)

    def synchronize(self) -> None:
        """Wait until all that was submitted is done. Raises what went wrong on the device."""
        measure.sync(self.device)

    def laps(self) -> list[float]:
        """Seconds from each recorded event to the next; `synchronize` first."""
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(self._events)]

    def close(self) -> None:
        """Nothing to end."""


class HostStream:
    """Stands in for a CUDA stream: a thread does what was submitted, in order.

    As with a stream, `submit` returns at once, and an exception surfaces at `synchronize`; what was submitted
    after it is skipped. Unlike a stream, the work takes its time from the core that also submits, and a copy of
    pageable host memory does not wait for the work before it: on a GPU it does, so that less is hidden there.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._ticks: list[float] = []
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._serve, args=(torch.get_num_threads(),), daemon=True)
        self._thread.start()

    def submit(self, work: Callable[..., object], *args: Any) -> None:
        """Queue `work(*args)`."""
        self._queue.put(lambda: self._error or work(*args))

    def record_event(self) -> None:
        """Let the thread note the time when it gets here."""
        self._queue.put(lambda: self._ticks.append(time.perf_counter()))

    def synchronize(self) -> None:
        """Wait until all that was submitted is done. Raises the first exception of it."""
        done = threading.Event()
        self._queue.put(done.set)
        done.wait()
        if self._error is not None:
            raise self._error

    def laps(self) -> list[float]:
        """Seconds from each recorded event to the next; `synchronize` first."""
        return [after - before for before, after in pairwise(self._ticks)]

    def close(self) -> None:
        """Drop what is queued and end the thread after the work that it is in."""
        self._closed = True
        self._queue.put(None)
        self._thread.join()

    def _serve(self, threads: int) -> None:
        torch.set_num_threads(threads)  # OpenMP counts per thread: a new one would take every core
        while (work := self._queue.get()) is not None and not self._closed:
            try:
                work()
            except BaseException as e:
                self._error = e
