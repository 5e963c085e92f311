"""One run of something on n ranks: the elastic agent in a thread, and the loop that watches it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle

from labs.kit import guardian, turns
from labs.kit.agent import Agent
from labs.kit.backstage import start_fork_server
from labs.kit.failure import Watch
from labs.kit.monitor import Monitor, Trace
from labs.kit.rank import RunLab
from labs.kit.signals import signals_held
from labs.kit.view import View

POLL_S = 0.02
ONE_AT_A_TIME = threading.Lock()  # two runs of one kernel would share cores and spoil each other's timings


class Job:
    """Runs `body(rank)`, a picklable callable, on a rank for each device in `placement`.

    With COURSE_QUEUE it waits for its turn among all launches of this machine: see labs.kit.turns. BadInput if that
    cannot work.
    """

    def __init__(self, body: Callable, placement: list, timeout_s: float, view: View) -> None:
        is_lab = isinstance(body, RunLab)
        self.turn = turns.turn(body.lab if is_lab else "run_on_ranks", placement, check=not is_lab)
        self.body, self.placement, self.timeout_s, self.view = cloudpickle.dumps(body), placement, timeout_s, view
        self.trace: Trace | None = None
        self.seconds, self.printed = 0.0, ""
        self.results: list[Any] = []

    def run(self) -> list[Any]:
        """What `body` returned, by rank; raises RankFailed or RankTimeout. Leaves no process, port or file behind."""
        with signals_held() as self.noted:
            backstage = start_fork_server()
            backstage.wait_until_warm(self._check)  # before the turn: nobody waits for another's import of torch
            with self._turn():
                self.watch = Watch(backstage.run_folder(), backstage.server_pid())
                try:
                    self._watched()
                finally:
                    self._end()
        return self.results

    @contextmanager
    def _turn(self) -> Iterator[None]:
        while not ONE_AT_A_TIME.acquire(timeout=0.1):
            self._check()
        try:
            with self.turn.taken(self._wait):
                self.view.waiting("")
                yield
        finally:
            self.view.waiting("")
            ONE_AT_A_TIME.release()

    def _wait(self, text: str) -> None:
        self._check()
        self.view.waiting(text)

    def _check(self) -> None:
        if self.noted:
            raise KeyboardInterrupt

    def _watched(self) -> None:
        start = time.monotonic()
        self.agent = Agent(self.body, self.placement, self.watch.folder, self.timeout_s)
        self.agent.start()
        with Monitor(self.watch.pids) as monitor:
            self.view.watch(monitor, self.watch.folder / "progress")
            try:
                self._poll_until(start + self.timeout_s)
            finally:
                self.seconds = time.monotonic() - start
                self.view.read()  # how far it came, while that can still be read
        self.trace = monitor.trace
        results = [self.watch.folder / f"result-{rank}" for rank in range(len(self.placement))]
        if self.agent.failed or not all(r.exists() for r in results):
            raise self.watch.failure(self.agent.exit_codes, self.agent.error)
        self.results = [cloudpickle.loads(r.read_bytes()) for r in results]

    def _poll_until(self, deadline: float) -> None:
        while self.agent.is_alive():
            self.agent.join(POLL_S)
            self._check()
            if time.monotonic() > deadline:
                raise self.watch.timeout(self.timeout_s, len(self.placement))
            self.view.refresh()
            if self.watch.is_lost():
                self.watch.kill()  # the agent sees it at once, and ends

    def _end(self) -> None:
        """Kill what is left, remove the folder, wait for the agent, which then has nothing left to do."""
        self.printed = self.watch.output()
        guardian.clear(self.watch.folder)
        if hasattr(self, "agent"):
            self.agent.join(timeout=10)
