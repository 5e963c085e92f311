"""A GPU's stream of work, and an emulated one for a CPU, where every operator returns when it is done."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from labs.kit import measure


def open_stream(device: torch.device) -> DeviceStream | EmulatedStream:
    """The current stream of a GPU; on a CPU an emulated one. Close it with contextlib.closing."""
    return EmulatedStream() if device.type == "cpu" else DeviceStream(device)


Result = Any
"""What `submit` returns: on a GPU what the work returned, a tensor that may not be computed yet."""


class DeviceStream:
    """A GPU's current stream: `submit` returns as soon as the kernels of the work are launched."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._events: list[torch.Event] = []

    def to_device(self, x: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy to the device. Blocking, it waits for the whole stream; non_blocking from pinned memory, for nothing."""
        return x.to(self.device, non_blocking=non_blocking)

    def submit(self, work: Callable[..., Result], *args: Any) -> Result:
        """Launch `work(*args)`."""
        return work(*args)

    def item(self, result: Result) -> float:
        """The number in a tensor of the device: waits for the whole stream."""
        return result.item()

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
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(self._events)]  # elapsed_time is in ms

    def close(self) -> None:
        """Nothing to end."""


class EmulatedStream:
    """Emulates a CUDA stream on a CPU: a thread does what was submitted, in order.

    As with a stream, `submit` and non_blocking copies return at once, blocking copies and `item` wait until the queue
    is empty, and an exception surfaces where one waits; what was submitted after it is skipped. Unlike a GPU, the work
    takes its time from the core that also submits.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._ticks: list[float] = []
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._serve, args=(torch.get_num_threads(),), daemon=True)
        self._thread.start()

    def to_device(self, x: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy `x` in its turn; blocking, wait for it and so for all work before it, as CUDA does."""
        copy = torch.empty_like(x)
        self.submit(copy.copy_, x)
        if not non_blocking:
            self.synchronize()
        return copy

    def submit(self, work: Callable[..., Result], *args: Any) -> list[Result]:
        """Queue `work(*args)`; what it returns will be in the list."""
        result: list[Result] = []
        self._queue.put(lambda: self._error or result.append(work(*args)))
        return result

    def item(self, result: list[Result]) -> float:
        """The number in a result of `submit`: waits for all that was submitted."""
        self.synchronize()
        return result[0].item()

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
