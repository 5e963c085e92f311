"""Square matrix products by size and number format: where 16 bits overtake FP32, or never do."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TypeVar

import torch

from labs.common.precision.amp import precision, tf32
from labs.common.timing import probing
from labs.common.timing.roofline import matmul_work
from labs.kit import measure
from labs.kit.measure import Estimate
from labs.kit.record import Records

Step = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)
Arm = tuple[str, bool]
"""(format, casts): with casts it is autocast that gets FP32 matrices, without them they are in the format already."""


def usual_sides(device: torch.device) -> tuple[int, ...]:
    """Sides of the matrices, small to large."""
    return (32, 64, 128, 256, 512) if device.type == "cpu" else (256, 512, 1024, 2048, 4096, 8192)


def in_turn(
    steps: Mapping[Name, Step], rounds: int | measure.Budget, least_s: float, device: torch.device
) -> dict[Name, list[float]]:
    """Seconds per call, one sample per round; calls that are shorter than `least_s` are repeated."""
    inner = {}
    for name, step in steps.items():
        seconds = min(measure.time_steps(step, 2, device))  # the first one may allocate or compile
        inner[name] = max(1, min(1000, math.ceil(least_s / max(seconds, 1e-7))))
    turns = {name: _repeated(step, inner[name]) for name, step in steps.items()}
    seconds = measure.interleave(turns, rounds, device)
    return {name: [s / inner[name] for s in samples] for name, samples in seconds.items()}


def _repeated(step: Step, times: int) -> Step:
    return lambda: [step() for _ in range(times)]


def climb(
    sides: tuple[int, ...],
    formats: list[str],
    rounds: int | measure.Budget,
    least_s: float,
    longest_s: float,
    device: torch.device,
) -> Iterator[tuple[int, Arm, list[float], bool]]:
    """(side, arm, seconds, whether measured) of each product, the arms of a side in turn.

    An arm whose product would take more than `longest_s` at the rate it had on the side before is not run: its
    seconds are then the one modelled number.
    """
    rate: dict[Arm, float] = {}
    for n in sides:
        flop, fits = matmul_work(n, 4).flop, {}
        for arm, step in products(n, formats, device).items():
            modelled = flop / rate[arm] if arm in rate else 0.0
            if modelled > longest_s:
                yield n, arm, [modelled], False
            else:
                fits[arm] = step
        with tf32(False):  # the products switch it as they need it; afterwards it is as it was
            found = in_turn(fits, rounds, least_s, device)
        for arm, seconds in found.items():
            rate[arm] = flop / min(seconds)
            yield n, arm, seconds, True


def products(n: int, formats: list[str], device: torch.device) -> dict[Arm, Step]:
    """Products of two n x n matrices."""
    a, b = torch.randn(n, n, device=device), torch.randn(n, n, device=device)

    def with_casts(name: str) -> object:
        with precision(name, device):
            return a @ b

    steps: dict[Arm, Step] = {(f, False): probing.matmul_step(f, n, device) for f in formats}
    return steps | {(f, True): lambda f=f: with_casts(f) for f in formats if f in ("bf16", "fp16")}


def ladder(records: Records, name: str, casts: bool = False) -> dict[int, Estimate]:
    """Time of an FP32 product over that in format `name`, by side; sides that were left out are not there."""
    found = {}
    for r in records.where("step_s", part="matmul", precision=name, casts=casts):
        base = records.one("step_s", part="matmul", precision="fp32", casts=False, side=r.case["side"])
        found[r.case["side"]] = measure.paired_ratio(base.samples, r.samples)
    return found


def crossing(found: Mapping[int, Estimate]) -> int | None:
    """The smallest side from which on every ratio of `found` is above 1 with its whole interval; None if none is."""
    best = None
    for side in sorted(found, reverse=True):
        if found[side].low <= 1:
            break
        best = side
    return best
