"""A GPU's stream of work, and an emulated one for a CPU, where every operator returns when it is done."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from labs.kit import measure


def open_stream(device: torch.device) -> DeviceStream | EmulatedStream:
    """The current stream of a GPU; on a CPU an emulated one. Close it with contextlib.closing."""
    return EmulatedStream() if device.type == "cpu" else DeviceStream(device)


class DeviceStream:
    """A GPU's current stream: `submit` returns as soon as the kernels of the work are launched."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def submit(self, work: Callable[[], object]) -> None:
        """Launch `work()`."""
        work()

    def synchronize(self) -> None:
        """Wait until all that was submitted is done."""
        measure.sync(self.device)

    def close(self) -> None:
        """Nothing to end."""


class EmulatedStream:
    """Emulates a CUDA stream on a CPU: a thread does what was submitted, in order.

    An exception surfaces where one waits; what was submitted after it is skipped. Unlike a GPU, the work takes its
    time from the core that also submits.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._serve, args=(torch.get_num_threads(),), daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], object]) -> None:
        """Queue `work()`."""
        self._queue.put(lambda: self._error or work())

    def synchronize(self) -> None:
        """Wait until all that was submitted is done. Raises the first exception of it."""
        done = threading.Event()
        self._queue.put(done.set)
        done.wait()
        if self._error is not None:
            raise self._error

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
