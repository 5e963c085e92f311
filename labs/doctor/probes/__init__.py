"""Eight probes for training that runs and is wrong: they observe a script, and are silent when they can't decide."""

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
"""The probes, most severe first."""
KEPT_AT = (5, 55, 144, 377, 987)
"""Steps at which findings are kept, for scripts that end soon and take their objects with them."""


class Probes:
    """All probes of one rank, which the hooks call. An error in one of them ends that probe and nothing else."""

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
        self.functions: dict[str, list[tuple[Any, Callable]]] = {}  # Of all probes, by event
        scene.keep = self.findings
        self.last: list[dict[str, Any]] = []  # Findings while the script's optimizers were alive

    def install(self) -> None:
        """Take part in the script from here on. Call it once torch is imported, before other hooks."""
        os.register_at_fork(after_in_child=self.scene.forked)
        for probe in self.probes:
            if hasattr(probe, "install"):
                probe.install()

    def remove(self) -> None:
        """Put back all that was replaced."""
        self.scene.undo.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Observe nothing: steps of a counterfactual are not the script's."""
        self.scene.paused = True
        try:
            yield
        finally:
            self.scene.paused = False
            self.notice("resumed")

    def notice(self, event: str, *args: Any) -> None:
        """Have all probes observe an event in the script's thread."""
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
        """Observe an optimizer that begins its step."""
        scene, key = self.scene, id(optimizer)
        if not scene.paused:
            if scene.optimizers.get(key) is not optimizer:
                scene.optimizers[key], scene.steps_of[key] = optimizer, 0
            self.notice("before_step", optimizer, scene.steps_of[key] + 1)

    def after_step(self, optimizer: Any) -> None:
        """Observe what its step has changed."""
        scene, key = self.scene, id(optimizer)
        if not scene.paused:
            scene.step += 1
            scene.steps_of[key] = number = scene.steps_of[key] + 1
            self.notice("after_step", optimizer, number)
            if number in KEPT_AT:
                self.findings()

    def forward(self, module: Any, *args: Any) -> None:
        """Observe that the script calls an outermost model: with gradients, within backward, and its arguments."""
        self.scene.roots.setdefault(id(module), module)
        self.notice("forward", module, *args)

    def findings(self) -> list[dict[str, Any]]:
        """Return what is found so far, as JSON holds it. Once the script has dropped its objects that is final."""
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
    """Put the findings of all ranks together, most severe first; compare what they say about data and replicas."""
    seen = [Match(**row) for of in per_rank for row in of if not row["probe"].startswith("_")]
    seen += replicas.compare(per_rank) + data.compare(per_rank)
    first: dict[tuple, Match] = {}
    for match in seen:
        first.setdefault((match.probe, match.file, match.line, match.fix), match)
    return sorted(first.values(), key=lambda m: (not m.wrong, SEVERITY.index(m.probe)))
