"""Timestamps within a step, taken without waiting: the host's clock, or events in a GPU's streams."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> object:
    """Return the current time on the host's clock, or an event in the GPU's current stream, without waiting."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def seconds_between(start: object, end: object) -> float:
    """Return seconds between two timestamps. The GPU must have been synchronised since."""
    return end - start if isinstance(start, float) else 1e-3 * start.elapsed_time(end)
