"""SIGKILL at a chosen moment: nothing in the process can see it coming, or clean up."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from labs.common.elastic.journal import Journal


class Fault:
    """Kills rank `rank` once, before its step `step` or in the first save from then on. `rank` -1: no one.

    While "training" the rank alone, as "machine" the torchrun that started it, too, and with it all of its ranks.
    """

    def __init__(self, rank: int, step: int, while_: str, journal: Journal) -> None:
        self.step, self.while_, self.journal = step, while_, journal
        self.armed = rank == journal.rank and journal.restart == 0

    def before_step(self, step: int) -> None:
        """Called before each step."""
        if self.armed and self.while_ != "saving" and step == self.step:
            self._die(step)

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Around each save: dies when the bytes are written, but neither on the disk for sure nor named."""
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
