"""Kill a rank with SIGKILL at a chosen moment. The process can't see it coming or clean up."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from labs.common.elastic.journal import Journal


class Fault:
    """Kills rank `rank` once, before step `step` or during the first save at or after it. `rank` -1: kills none.

    `while_` "training" or "saving" kills that rank only; "machine" also kills its torchrun, and so all of its ranks.
    """

    def __init__(self, rank: int, step: int, while_: str, journal: Journal) -> None:
        self.step, self.while_, self.journal = step, while_, journal
        self.armed = rank == journal.rank and journal.restart == 0

    def before_step(self, step: int) -> None:
        """Kill this rank if `step` is the chosen one. Call it before each step."""
        if self.armed and self.while_ != "saving" and step == self.step:
            self._die(step)

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Wrap a save, and kill this rank once the bytes are written, before they are flushed and renamed."""
        if not (self.armed and self.while_ == "saving" and step >= self.step):
            yield
            return
        with mock.patch("os.fsync", lambda descriptor: self._die(step)):
            yield

    def _die(self, step: int) -> None:
        self.journal("killed", step=step)
        if self.while_ == "machine":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
