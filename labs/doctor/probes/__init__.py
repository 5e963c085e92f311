"""Eight probes for training that runs and is wrong: they observe a script, and are silent when they can't decide."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable
from typing import Any

from labs.doctor.probes.data import Data
from labs.doctor.probes.effect import Effect
from labs.doctor.probes.findings import Finding
from labs.doctor.probes.losses import Losses, Warnings
from labs.doctor.probes.merging import merge
from labs.doctor.probes.replicas import Replicas
from labs.doctor.probes.saving import Saving
from labs.doctor.probes.scene import Scene
from labs.doctor.probes.schedules import Schedules
from labs.doctor.probes.validation import Validation

__all__ = ["Finding", "Probes", "merge"]


KEPT_AT = (5, 55, 144, 377, 987)
"""Steps at which findings are kept, for scripts that end soon and take their objects with them."""


class Probes:
    """All probes of one rank. An error in one of them ends that probe and nothing else."""

    def __init__(self, folder: str, scratch: str) -> None:
        """`folder` is the script's; worker processes leave small files in `scratch`."""
        self.scene = scene = Scene(folder, scratch)
        losses, schedules, data = Losses(scene), Schedules(scene), Data(scene)
        self.probes: list[Any] = [
            Replicas(scene, data),
            schedules,  # before what a schedule that is too short leads to
            Effect(scene),
            losses,
            Warnings(scene, losses),
            data,
            Saving(scene, schedules),
            Validation(scene, data),
        ]
        self.functions: dict[str, list[tuple[Any, Callable]]] = {}
        """Of all probes, by event."""
        self.within: dict[int, Any] = {}
        """Frames in which optimizers' steps run, by id of the optimizer."""
        scene.keep = self.findings
        self.last: list[dict[str, Any]] = []
        """Findings while the script's optimizers were alive."""

    def install(self) -> None:
        """Take part in the script from here on. Call it once torch is imported, before other hooks."""
        import torch  # not at the top: the script may set variables before its own import
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self.scene.torch = torch
        os.register_at_fork(after_in_child=self.scene.forked)
        self.scene.undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self.scene.undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self.scene.replace(torch.autograd, "backward", self._backward)
        for probe in self.probes:
            if hasattr(probe, "install"):
                probe.install()

    def remove(self) -> None:
        """Put back all that was replaced."""
        self.scene.undo.close()

    @property
    def paused(self) -> bool:
        """Whether a counterfactual runs, whose steps are not the script's."""
        return self.scene.paused

    @paused.setter
    def paused(self, on: bool) -> None:
        self.scene.paused = on
        if not on:
            self._all("resumed")

    def _all(self, event: str, *args: Any) -> None:
        of = self.functions.get(event)
        if of is None:
            of = self.functions[event] = [(p, f) for p in self.probes if (f := getattr(p, event, None)) is not None]
        for probe, function in of:
            try:
                function(*args)
            except Exception:
                self._failed(probe)

    def _guarded(self, probe: Any, function: Callable, *args: Any) -> Any:
        try:
            return function(*args)
        except Exception:
            self._failed(probe)
            return []

    def _failed(self, probe: Any) -> None:
        if os.environ.get("DOCTOR_PROBES_RAISE"):
            raise
        self.probes.remove(probe)
        self.functions = {}

    # Events

    def _before_step(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        if self.scene.away():
            return
        begun = self.within.get(id(optimizer))
        if begun is not None and _runs(begun):  # a subclass's step that calls its parent's
            return
        self.within[id(optimizer)] = sys._getframe(1)
        if self.scene.optimizers.get(id(optimizer)) is not optimizer:
            self.scene.optimizers[id(optimizer)] = optimizer
            self.scene.steps_of[id(optimizer)] = 0
        number = self.scene.steps_of[id(optimizer)] + 1
        self._all("before_step", optimizer, number)

    def _after_step(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        if self.scene.away() or self.within.get(id(optimizer)) is not sys._getframe(1):
            return
        del self.within[id(optimizer)]
        number = self.scene.steps_of[id(optimizer)] = self.scene.steps_of[id(optimizer)] + 1
        self.scene.step += 1
        self._all("after_step", optimizer, number)
        if number in KEPT_AT:
            self.findings()

    def _backward(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self.scene.away():
                return original(tensors, *args, **kwargs)
            self._all("before_backward", tensors)
            result = original(tensors, *args, **kwargs)
            self._all("after_backward", tensors)
            return result

        return backward

    def forward(self, module: Any, training: bool, again: bool, args: Any, kwargs: Any) -> None:
        """Hear that the script calls an outermost model; `again`: within backward, for a checkpoint."""
        if not self.scene.away():
            self.scene.roots.setdefault(id(module), module)
            self._all("forward", module, training, again, args, kwargs)

    def findings(self) -> list[dict[str, Any]]:
        """Return what is found so far, as JSON holds it. Once the script has dropped its objects that is final."""
        if self.scene.optimizers or not self.last:
            rows = [row for probe in list(self.probes) for row in self._guarded(probe, probe.findings)]
            self.last = _finite(rows)
        return self.last


def _finite(tree: Any) -> Any:
    """Return it with 0 for numbers that JSON doesn't have."""
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    return 0.0 if isinstance(tree, float) and not math.isfinite(tree) else tree


def _runs(frame: Any) -> bool:
    here = sys._getframe(1)
    while here is not None and here is not frame:
        here = here.f_back
    return here is not None
