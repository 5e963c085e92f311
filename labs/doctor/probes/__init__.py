"""Eight probes that detect training that runs but is wrong. They observe a script, and stay silent when unsure."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from labs.doctor.bottlenecks import Match
from labs.doctor.probes import data, replicas
from labs.doctor.probes.data import Data
from labs.doctor.probes.effect import Effect
from labs.doctor.probes.losses import Losses, Warnings
from labs.doctor.probes.replicas import Replicas
from labs.doctor.probes.saving import Saving
from labs.doctor.probes.scene import DONE, Scene
from labs.doctor.probes.schedules import Schedules
from labs.doctor.probes.validation import Validation

__all__ = ["Probes", "merge"]

SEVERITY = "replicas effect shapes data accumulation validation checkpoint workers warning".split()
"""Values of `Match.probe`, most severe first."""
KEPT_AT = (5, 55, 144, 377, 987)
"""An optimizer's steps after which findings are saved, because a script may drop its objects before it ends."""


class Probes:
    """All probes of one rank; the hooks call them. An error in a probe removes only that probe."""

    def __init__(self, folder: str, scratch: str) -> None:
        """`folder` holds the script; DataLoader workers write small files to `scratch`."""
        self.scene = scene = Scene(folder, scratch)
        losses, schedules, data = Losses(scene), Schedules(scene), Data(scene)
        self.probes: list[Any] = [
            Replicas(scene, data),
            schedules,  # before Effect: a schedule that ends early causes its findings
            Effect(scene),
            losses,
            Warnings(scene, losses),
            data,
            Saving(scene, schedules),
            Validation(scene, data),
        ]
        self.functions: dict[str, list[tuple[Any, Callable]]] = {}  # All probes' handlers, by event
        scene.keep = self.findings
        self.last: list[dict[str, Any]] = []  # Findings while the script's optimizers were alive

    def install(self) -> None:
        """Start observing the script. Call it after torch is imported and before other hooks are installed."""
        os.register_at_fork(after_in_child=self.scene.forked)
        for probe in self.probes:
            if hasattr(probe, "install"):
                probe.install()

    def remove(self) -> None:
        """Restore every replaced function."""
        self.scene.undo.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Observe nothing within the block, because a counterfactual's steps aren't the script's."""
        self.scene.paused = True
        try:
            yield
        finally:
            self.scene.paused = False
            self.notice("resumed")

    def notice(self, event: str, *args: Any) -> None:
        """Call each probe's handler of an event; a handler that returns DONE has seen enough."""
        if self.scene.paused:
            return
        of = self.functions.get(event)
        if of is None:
            of = self.functions[event] = [(p, f) for p in self.probes if (f := getattr(p, event, None)) is not None]
        for probe, function in tuple(of):
            try:
                if function(*args) is DONE:
                    of.remove((probe, function))
            except Exception:
                self._failed(probe)

    def _failed(self, probe: Any) -> None:
        if os.environ.get("DOCTOR_PROBES_RAISE"):
            raise
        self.probes.remove(probe)
        self.functions = {}

    # Events

    def before_step(self, optimizer: Any) -> None:
        """Observe an optimizer at the start of its step."""
        scene, key = self.scene, id(optimizer)
        if not scene.paused:
            if scene.optimizers.get(key) is not optimizer:
                scene.optimizers[key], scene.steps_of[key] = optimizer, 0
            self.notice("before_step", optimizer, scene.steps_of[key] + 1)

    def after_step(self, optimizer: Any) -> None:
        """Count the step, and observe what it changed."""
        scene, key = self.scene, id(optimizer)
        if not scene.paused:
            scene.step += 1
            scene.steps_of[key] = number = scene.steps_of[key] + 1
            self.notice("after_step", optimizer, number)
            if number in KEPT_AT:
                self.findings()

    def forward(self, module: Any, *args: Any) -> None:
        """Observe a call of an outermost model. `args`: with gradients? within backward? then the call's arguments."""
        self.scene.roots.setdefault(id(module), module)
        self.notice("forward", module, *args)

    def findings(self) -> list[dict[str, Any]]:
        """Return the findings so far as JSON values. They are final once the script has dropped its optimizers."""
        if self.scene.optimizers or not self.last:
            rows: list[Any] = []
            for probe in list(self.probes):
                try:
                    rows += probe.findings()
                except Exception:
                    self._failed(probe)
            said = json.dumps([asdict(row) if isinstance(row, Match) else row for row in rows])
            self.last = json.loads(said, parse_constant=lambda _: 0.0)
        return self.last


def merge(per_rank: Sequence[Sequence[dict[str, Any]]]) -> list[Match]:
    """Merge all ranks' findings without duplicates, most severe first, and compare the ranks' weights and inputs."""
    seen = [Match(**row) for of in per_rank for row in of if not row["probe"].startswith("_")]
    seen += replicas.compare(per_rank) + data.compare(per_rank)
    first: dict[tuple, Match] = {}
    for match in seen:
        first.setdefault((match.probe, match.file, match.line, match.fix), match)
    return sorted(first.values(), key=lambda m: (not m.wrong, SEVERITY.index(m.probe)))
