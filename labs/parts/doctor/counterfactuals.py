"""What a step would take if one thing were otherwise: each is an upper bound of what a cure of that thing gives."""

from __future__ import annotations

from labs.parts.doctor.facts import Facts
from labs.parts.doctor.hooks import Hooks


class SameBatch:
    """No wait for data: each batch is the one before."""

    name, settle, samples_factor, needs_restore = "same batch again", 1, 1.0, True

    def why_not(self, hooks: Hooks, facts: Facts) -> str:
        return "" if hooks.loader is not None else "its data comes from no DataLoader"

    def enter(self, hooks: Hooks) -> None:
        hooks.same_batch = True

    def leave(self, hooks: Hooks) -> None:
        hooks.same_batch = False


MODES = {mode.name: mode for mode in (SameBatch(),)}
