"""Checks that wait run at the same time, each with a limit of its own; one that breaks is a warning, never a crash."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from labs.kit.checks import Check

Found = Check | list[Check]
GO_ON = "go on; if a notebook fails, show this line to your instructor"
DETAIL_CHARACTERS = 160


@dataclass(frozen=True)
class Trial:
    """One thing to try, in a thread of its own."""

    name: str
    run: Callable[[], Found]
    limit_s: float = 5.0
    too_late: Check | None = None
    """What it means that `run` has not returned after `limit_s`; default: a warning."""


class Started:
    """A trial that runs since now."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.found, self.until = trial, [], time.monotonic() + trial.limit_s
        self.thread = threading.Thread(target=self._run, name=trial.name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.found = guarded(self.trial.name, self.trial.run)

    def result(self) -> list[Check]:
        """What it found, or what it means that it still runs at its limit; it is then left to itself."""
        self.thread.join(max(0.0, self.until - time.monotonic()))
        if not self.thread.is_alive():
            return self.found
        late = f"no answer after {self.trial.limit_s:g} s"
        return [self.trial.too_late or Check(self.trial.name, "warn", late, GO_ON)]


def guarded(name: str, run: Callable[[], Found]) -> list[Check]:
    """The checks that `run` returns; if it raises, a warning with the name and the reason."""
    try:
        found = run()
    except Exception as e:
        return [unknown(name, e)]
    return found if isinstance(found, list) else [found]


def unknown(name: str, error: BaseException) -> Check:
    """A warning that `name` could not be checked: unknown is not wrong."""
    return Check(name, "warn", f"could not be checked: {reason(error)}", GO_ON)


def reason(error: BaseException) -> str:
    """The kind and first line of an exception; the home folder, which holds a user's name, is written ~."""
    first = next(iter(str(error).splitlines()), "")
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return text.replace(str(Path.home()), "~")[:DETAIL_CHARACTERS]
