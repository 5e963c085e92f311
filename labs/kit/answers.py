"""Check what a learner's function does on ranks.

A mistake that is recognised raises Mistake. A hang is detected within seconds.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import linecache
import re
import threading
from collections.abc import Callable
from typing import Any

import psutil
import torch.distributed as dist

from labs.kit import _compat
from labs.kit.check import FRAME, Mistake
from labs.kit.failure import RankFailed, RankTimeout
from labs.kit.fork_server import start_fork_server
from labs.kit.launch import run_on_ranks
from labs.kit.monitor import family

WAIT_S = 4.0
"""Seconds that a rank waits for the others, start-up excluded. `_impatient` sets it per rank: read it when needed."""
RUN_S = 30.0
"""Seconds a whole run may take; importing torch isn't included."""
MORE = 4
"""Factor on WAIT_S for the second try, after the ranks gave up on one that was still working."""
GAVE_UP = r"[Tt]imed ?out|monitoredBarrier|[Cc]onnection (was )?(closed|reset)|Broken pipe|killed by SIGABRT"
NOISE = re.compile(r"ProcessGroupGloo|gloo::|preamble\.length")


def on_ranks(body: Callable[..., Any], ranks: int, *args: Any, when: str) -> list[Any]:
    """Run `body(*args)` on every rank and return the results in rank order. Raises RankFailed if one raises.

    Raises Mistake if a rank waits for a collective that another never calls, or calls with another size. `when` ends
    its first sentence.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            with _Work() as work:
                try:
                    return run_on_ranks(_impatient, ranks, WAIT_S, body, args, timeout_s=RUN_S)
                except RankFailed as e:  # on a busy machine a rank may just be late
                    if isinstance(e, RankTimeout) or not re.search(GAVE_UP, str(e)) or not work.went_on():
                        raise
            return run_on_ranks(_impatient, ranks, MORE * WAIT_S, body, args, timeout_s=RUN_S + MORE * WAIT_S)
    except RankTimeout:
        raise Mistake(f"your code did not finish within {RUN_S:g} s", "look for a loop that never ends") from None
    except RankFailed as e:
        if not re.search(GAVE_UP, str(e)):
            raise
        raise Mistake(
            f"the ranks wait for each other forever {when}{_where(str(e))}",
            "every rank must make the same collective calls, in the same order, with tensors of the same size",
        ) from None
    finally:
        lines = printed.getvalue().splitlines()
        print("".join(f"{line}\n" for line in lines if not NOISE.search(line)), end="")


class _Work(threading.Thread):
    """Samples, while entered, whether any rank computes or is ready to; ranks that wait for each other all sleep."""

    EVERY_S = 0.1

    def __init__(self) -> None:
        super().__init__(name="work", daemon=True)
        self.server = start_fork_server().server_pid()
        self.seen: list[bool] = []
        self.over = threading.Event()

    def run(self) -> None:
        while self.server and not self.over.wait(self.EVERY_S):
            if ranks := family(self.server)[1:]:
                self.seen.append(any(map(_is_at_work, ranks)))

    def went_on(self) -> bool:
        """Return whether a third of the samples of the last WAIT_S saw work; the rest allows for shutting down."""
        last = self.seen[-round(WAIT_S / self.EVERY_S) :]
        return sum(last) > len(last) / 3

    def __enter__(self) -> _Work:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.over.set()
        self.join()


def _is_at_work(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
    except psutil.Error:  # it has ended
        return False


def _impatient(wait_s: float, body: Callable[..., Any], args: tuple) -> Any:
    global WAIT_S
    WAIT_S = wait_s  # in this rank's process
    # torch has no public way to change the timeout of the group that a rank is already in.
    _compat.set_group_timeout(datetime.timedelta(seconds=WAIT_S))
    result = body(*args)
    # Point to point, so it can't match the collective that another rank still waits in. Its longer timeout makes the
    # learner's line fail first, so the traceback shows that line.
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=WAIT_S + 1.5))
    return result


def _where(text: str) -> str:
    """Return the learner's line in which the failing rank waited; "" if unknown."""
    own = [m for m in FRAME.finditer(text) if not re.search(r"site-packages|/labs/(kit|exercises)/", m["file"])]
    rank = re.search(r"^rank (\d+) on .* failed first", text, re.MULTILINE)
    if not own or not rank:
        return ""
    line = linecache.getline(own[-1]["file"], int(own[-1]["line"])).strip()
    return f": rank {rank[1]} was in line {own[-1]['line']}, {line}"
