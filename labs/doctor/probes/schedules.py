"""Detect learning rate schedules that are stepped more than once per optimizer step, or that fade far too soon."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from labs.doctor.bottlenecks import Match, matched
from labs.doctor.probes.scene import Scene, planned

FEWEST = 3
MOSTLY = 0.8  # Minimum share of the optimizer's steps with several calls
SHORT = 0.9  # Share of the planned calls; a shorter schedule ends before training does
FADED, EARLY = 1e-4, 0.25
"""A rate below FADED times the highest one changes little: a fault within the first EARLY of the planned calls."""
RETURNING = ("CosineAnnealingWarmRestarts", "CyclicLR")


class Schedule:
    """What is known about one schedule."""

    def __init__(self, scheduler: Any) -> None:
        self.kind, self.ref = type(scheduler).__name__, weakref.ref(scheduler)
        self.calls: list[tuple[tuple[str, int], int]] = []
        """Calls since the optimizer's last step: line, and number of backward passes so far."""
        self.windows = self.repeated = self.most = 0
        self.lines: set[tuple[str, int]] = set()
        self.interleaved = self.by_library = self.looked = False
        self.planned: float | None = None
        self.length: float | None = None
        self.called, self.highest, self.is_small = 0, 0.0, False
        self.faded: Match | None = None


class Schedules:
    """Count calls of scheduler.step() between two optimizer steps."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.seen, self.depth, self.backwards = scene, {}, 0, 0

    def install(self) -> None:
        """Observe `step` of each PyTorch schedule that defines it."""
        module = sys.modules["torch.optim.lr_scheduler"]
        for kind in {k for k in vars(module).values() if isinstance(k, type) and issubclass(k, module.LRScheduler)}:
            if "step" in vars(kind):
                self.scene.replace(kind, "step", self._stepping)

    def _stepping(self, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        self.depth += 1
        try:
            return original(scheduler, *args, **kwargs)
        finally:
            self.depth -= 1
            by = sys._getframe(2)
            if not self.depth and by.f_code.co_name != "_initial_step" and not self.scene.away():
                self.scene.guarded(self._note, scheduler, by)

    def _note(self, scheduler: Any, by: Any) -> None:
        of = self.seen.get(id(scheduler))
        if of is None or of.ref() is not scheduler:
            of = self.seen[id(scheduler)] = Schedule(scheduler)
        of.called += 1
        rate = optimizer_of(scheduler).param_groups[0]["lr"]
        if isinstance(rate, float) and of.kind not in RETURNING and not of.is_small:
            of.highest = max(of.highest, rate)
            of.is_small = rate < FADED * of.highest
            if of.is_small and of.called < EARLY * (planned(list(self.scene.frames(by))) or 0):
                words = {"highest": of.highest, "rate": rate, "calls": of.called}
                of.faded = matched("schedule-fades", self.scene.line(by), **words)
        if len(of.calls) < 100:
            of.calls.append((self.scene.line(by), self.backwards))
        if len(of.calls) == 2 and of.windows >= 1 and not of.looked:
            of.looked = True
            of.by_library = "accelerate" in by.f_code.co_filename
            of.planned = planned(list(self.scene.frames(by)))
            of.length = _length(scheduler, of.planned)

    def after_backward(self, losses: list[Any]) -> None:
        """Count backward passes: calls with one between them belong to different micro-batches."""
        self.backwards += 1

    def resumed(self) -> None:
        """Forget the step that a counterfactual interrupted."""
        for of in self.seen.values():
            of.calls = []

    def before_step(self, optimizer: Any, number: int) -> None:
        """End the window of each schedule of this optimizer."""
        for of in self.seen.values():
            scheduler = of.ref()
            if scheduler is None or optimizer_of(scheduler) is not optimizer:
                continue
            of.windows += 1
            if len(of.calls) > 1 and of.windows > 1:  # before its first step, a script may fast-forward its schedule
                of.repeated += 1
                of.most = max(of.most, len(of.calls))
                of.lines |= {line for line, _ in of.calls}
                of.interleaved = of.interleaved or len({b for _, b in of.calls}) > 1
            of.calls = []

    def findings(self) -> list[Match]:
        """Return a finding for each schedule that certainly runs too fast."""
        return [row for of in self.seen.values() if (row := self._judge(of)) is not None]

    def _judge(self, of: Schedule) -> Match | None:
        if of.faded is not None:
            return of.faded
        if of.repeated < FEWEST or of.repeated < MOSTLY * (of.windows - 1) or of.by_library:
            return None
        known = of.planned is not None and of.length is not None
        if known and of.length >= SHORT * of.planned:
            return None  # it is long enough for all these calls
        endless = of.kind in ("StepLR", "MultiStepLR", "ExponentialLR", "MultiplicativeLR", "ReduceLROnPlateau")
        if not known and (of.interleaved or not (len(of.lines) > 1 or endless)):
            return None
        place, *others = sorted(of.lines)
        also = [f"{f.rpartition('/')[2]}:{n}" for f, n in others]
        if not known:
            return matched("schedule-too-fast", place, also, calls=of.most)
        steps, whole = round(of.length / of.most), round(of.planned / of.most)
        return matched("schedule-ends-early", place, also, calls=of.most, steps=steps, planned=whole)


def optimizer_of(scheduler: Any) -> Any:
    """Return the schedule's optimizer, unwrapped from any library's wrapper."""
    optimizer = getattr(scheduler, "optimizer", None)
    while "optimizer" in getattr(optimizer, "__dict__", {}):
        optimizer = optimizer.optimizer
    return optimizer


def _length(scheduler: Any, calls: float | None) -> float | None:
    """Return the number of calls after which the schedule ends; None if it has no known end."""
    if getattr(scheduler, "_milestones", None) and getattr(scheduler, "_schedulers", None):
        last = _length(scheduler._schedulers[-1], calls)
        return None if last is None else scheduler._milestones[-1] + last
    for name in ("total_steps", "T_max", *(["total_iters"] if type(scheduler).__name__ == "PolynomialLR" else [])):
        if isinstance(of := getattr(scheduler, name, None), int | float):
            return float(of)
    factors = getattr(scheduler, "lr_lambdas", None)
    if not factors or calls is None or not 1 < calls < 1e9:
        return None
    try:
        if any(f(int(calls)) for f in factors):
            return None
        low, high = 0, int(calls)  # the factor is 0 at `high`
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if any(f(middle) for f in factors) else (low, middle)
        return float(high)
    except Exception:
        return None
