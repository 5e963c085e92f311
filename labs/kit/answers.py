"""What a checker asks of a learner's function: one number, numbers for several cases, an answer from ranks.

Each raises Mistake with the slip by name where it is known. On ranks, a hang is noticed soon and explained.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import linecache
import math
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch.distributed as dist

from labs.kit import _compat
from labs.kit.check import FRAME, Mistake
from labs.kit.failure import RankFailed, RankTimeout
from labs.kit.fork_server import start_fork_server
from labs.kit.launch import run_on_ranks
from labs.kit.monitor import family


def number(value: Any, example: str) -> float:
    """`value` as a float. Mistake, which shows `example`, if it is none or not finite."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        size = f"a {type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else f"{value!r:.60}"
        raise Mistake(f"you return {size}, not a number", f"return one number, such as {example}") from None
    if not math.isfinite(found):
        raise Mistake(f"you return {found}", f"return a finite number, such as {example}")
    return found


Slip = tuple[Callable[[Any], float], str, str]
"""What a mistake makes of a case, what the mistake is, and a hint."""


@dataclass(frozen=True)
class Question:
    """One number, asked for several cases."""

    name: str
    cases: Sequence[Any]
    slips: Sequence[Slip]
    facts: Callable[[Any], str]
    """A case in words, for answers that no slip explains."""
    hint: str

    def judge(self, got: Sequence[float], want: Sequence[float]) -> None:
        """Mistake unless all of `got` are `want`, to a part in a thousand; zeros and infinities exactly."""
        if _alike(got, want):
            return
        for wrong, what, hint in self.slips:
            if _alike(got, [wrong(case) for case in self.cases]):
                raise Mistake(what, hint)
        first = next(i for i in range(len(got)) if not _alike(got[i], want[i]))
        raise Mistake(
            f"{self.facts(self.cases[first])}: {self.name} is {want[first]:.6g}, and you return {got[first]:.6g}",
            self.hint,
        )


def _alike(a: Any, b: Any, rtol: float = 1e-3) -> bool:
    return bool(np.allclose(a, b, rtol=rtol, atol=0))


WAIT_S = 4.0
"""How long a rank waits for the others. Start-up is not part of it. On a rank, read it when it is needed."""
RUN_S = 30.0
"""How long a run may take in all; the import of torch is not part of it."""
MORE = 4
"""So many times WAIT_S the ranks wait for each other when they have given up one that was still at work."""
GAVE_UP = r"[Tt]imed ?out|monitoredBarrier|[Cc]onnection (was )?(closed|reset)|Broken pipe|killed by SIGABRT"
NOISE = re.compile(r"ProcessGroupGloo|gloo::|preamble\.length")


def on_ranks(body: Callable[..., Any], ranks: int, *args: Any, when: str) -> list[Any]:
    """`body(*args)` on every rank; what each returned, in rank order. RankFailed if one raises.

    Mistake if a rank waits for a collective that another one never calls, or calls with another size; `when`
    ends its first sentence.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            with _Work() as work:
                try:
                    return run_on_ranks(_impatient, ranks, WAIT_S, body, args, timeout_s=RUN_S)
                except RankFailed as e:  # on a busy machine a rank may only be late
                    if isinstance(e, RankTimeout) or not re.search(GAVE_UP, str(e)) or not work.went_on():
                        raise
            return run_on_ranks(_impatient, ranks, MORE * WAIT_S, body, args, timeout_s=RUN_S + MORE * WAIT_S)
    except RankTimeout:
        raise Mistake(f"your code did not finish within {RUN_S:g} s", "look for a loop that never ends") from None
    except RankFailed as e:
        if not re.search(GAVE_UP, str(e)):
            raise
        raise Mistake(
            f"the ranks wait for each other for ever {when}{_where(str(e))}",
            "every rank must make the same collective calls, in the same order, with tensors of the same size",
        ) from None
    finally:
        lines = printed.getvalue().splitlines()
        print("".join(f"{line}\n" for line in lines if not NOISE.search(line)), end="")


class _Work(threading.Thread):
    """Looks, while it is entered, whether a rank computes, or would if it had a core.

    Ranks that wait for each other sleep, all of them.
    """

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
        """Whether there was work in a third of the last looks, as many as fit into WAIT_S: ending takes a part, too."""
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
    WAIT_S = wait_s  # this rank's own
    # torch has no public way to change the timeout of the group that a rank is already in.
    _compat.set_group_timeout(datetime.timedelta(seconds=WAIT_S))
    result = body(*args)
    # Point to point, so that it cannot be taken for the collective that another rank still waits in; and slower
    # to give up, so that the traceback is that of the learner's line.
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=WAIT_S + 1.5))
    return result


def _where(text: str) -> str:
    """The learner's line that a rank was waiting in, from its traceback."""
    own = [
        m for m in FRAME.finditer(text) if not re.search(r"site-packages|/labs/(kit|chapters|exercises)/", m["file"])
    ]
    rank = re.search(r"^rank (\d+) on .* failed first", text, re.MULTILINE)
    if not own or not rank:
        return ""
    line = linecache.getline(own[-1]["file"], int(own[-1]["line"])).strip()
    return f": rank {rank[1]} was in line {own[-1]['line']}, {line}"
