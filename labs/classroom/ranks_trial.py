"""The preflight's trial of the ranks: the fork server loads torch, ranks start, exchange a sum, and end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from labs.classroom import system_checks
from labs.kit import preflight, timeouts
from labs.kit.preflight import Check, Facts, reason

LAB = "hardware_probe"
RANKS_LIMIT_S = 30.0
SEE_MORE = "run: python -m labs.hardware_probe --smoke (it shows what the ranks say)"
SLOW = "put .venv on a local disk, close other programs, and run this again"


class RanksTrial:
    """Ranks as a notebook starts them."""

    def __init__(self, warm_limit_s: float = timeouts.IMPORT_S) -> None:
        self.start, self.start_s, self.warm_limit_s = time.monotonic(), time.time(), warm_limit_s
        self.about: dict[str, Any] = dict.fromkeys(("n", "device", "backend", "first_launch_s", "launch_s"))
        self.problem: Exception | None = None
        try:
            import torch  # noqa: F401  needed here, too: the fork server is then a fork of this process (on Linux)

            from labs.kit.fork_server import start_fork_server

            self.server = start_fork_server(lean=True, forked=True)
        except Exception as e:
            self.problem = e

    def run(self, facts: Facts | None, require_gpus: int = 0) -> list[Check]:
        """Launch ranks and judge what they computed; `about` then holds what the report says of them."""
        try:
            if self.problem:
                raise self.problem
            warm_s = self._wait_until_warm()
            if warm_s is None:
                detail = f"torch was not loaded within {self.warm_limit_s:g} s, so none were started"
                return [Check("ranks", "fail", detail, SLOW)]
            found = self._launches(facts, require_gpus)
        except Exception as e:
            return [failed(e)]
        self.about["first_launch_s"] = round(warm_s + self.about["launch_s"], 2)
        return [*found, system_checks.first_launch(warm_s, self.about["launch_s"])]

    def _launches(self, facts: Facts | None, require_gpus: int) -> list[Check]:
        from labs.kit.display import View
        from labs.kit.launch import launch

        found: list[Check] = []
        for nproc, device in plans(facts.gpus_for_torch if facts else 0, require_gpus):
            with _alone():
                run = launch(
                    LAB,
                    nproc,
                    timeout_s=RANKS_LIMIT_S,
                    device=device,
                    oversubscribe=True,
                    view=View(),
                    parts=("correctness",),
                )
            found += preflight.rank_checks(run, run.seconds, facts)
            layout = run[0].layout
            self.about |= {"n": nproc, "device": layout["device"], "backend": layout["backend"]}
            self.about |= {"launch_s": round(run.seconds, 2)}
        return found

    def _wait_until_warm(self) -> float | None:
        """Seconds until the fork server had loaded torch; None if it has not within the limit."""
        while not self.server.ready.exists():
            if time.monotonic() - self.start > self.warm_limit_s:
                return None
            time.sleep(0.02)
        return max(0.0, self.server.ready.stat().st_mtime - self.start_s)


def plans(gpus: int, require_gpus: int = 0) -> list[tuple[int, str]]:
    """The launches to try, as (ranks, device): two ranks or what is required; a single GPU also alone."""
    if gpus == 1:
        return [(2, "cpu"), (1, "cuda")]
    return [(min(max(2, require_gpus), gpus), "cuda")] if gpus else [(2, "cpu")]


def failed(error: Exception) -> Check:
    """Ranks that did not start or did not end as they should: the last line says which."""
    lines = str(error).strip().splitlines()
    return Check("ranks", "fail", lines[-1] if len(lines) > 1 else reason(error), SEE_MORE)


@contextmanager
def _alone() -> Iterator[None]:
    """Without a room: a trial is nothing to keep."""
    before = os.environ.pop("COURSE_ROOM", None)
    try:
        yield
    finally:
        if before is not None:
            os.environ["COURSE_ROOM"] = before
