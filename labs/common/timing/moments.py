"""Moments within a step, taken without waiting: the host's clock, or events in a GPU's streams."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> object:
    """This moment: of the host's clock, or on a GPU of the current stream, without waiting for it."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def seconds_between(start: object, end: object) -> float:
    """Seconds from one moment to the other. A GPU must have been synchronised since."""
    return end - start if isinstance(start, float) else 1e-3 * start.elapsed_time(end)
