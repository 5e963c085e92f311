"""Way 1: the clock stops when the work is ordered, not when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable

from labs.fooled.streams import DeviceStream, EmulatedStream


def clock_stops_early(
    step: Callable[[], object], steps: int, stream: DeviceStream | EmulatedStream
) -> tuple[float, float]:
    """(fooled, honest) seconds per step: when all is ordered, and when all is done."""
    stream.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        stream.submit(step)  # comes back at once: a device works through a queue
    ordered_s = time.perf_counter() - start  # fooled: the queue is still full
    stream.synchronize()
    done_s = time.perf_counter() - start
    return ordered_s / steps, done_s / steps
