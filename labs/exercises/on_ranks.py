"""Run a learner's function on ranks in such a way that a hang is noticed soon and explained."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from labs.kit.check import Mistake
from labs.kit.failure import RankFailed
from labs.kit.launch import run_on_ranks

WAIT_S = 2.0
"""How long a rank waits for the others. Start-up is not part of it."""
GAVE_UP = r"[Tt]imed ?out|monitoredBarrier|[Cc]onnection (was )?(closed|reset)|Broken pipe|preamble\.length"


class Hang(Exception):
    """A rank waited for a collective that another one never called, or called with another size."""


def on_ranks(body: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """`body(*args)` on every rank; what each returned. Hang if they wait for each other, RankFailed if one raises."""
    try:
        return run_on_ranks(_impatient, ranks, body, args, timeout_s=20)
    except RankFailed as e:
        if re.search(GAVE_UP, str(e)):
            raise Hang(str(e)) from None
        raise


def _impatient(body: Callable[..., Any], args: tuple) -> Any:
    # torch has no public way to change the timeout of the group a rank is already in.
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=WAIT_S))
    result = body(*args)
    # Point to point, so that it cannot be taken for the collective that another rank still waits in; and slower
    # to give up, so that the traceback is that of the learner's line.
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=WAIT_S + 1.5))
    return result


def waits(hang: Hang, when: str) -> Mistake:
    """The feedback for a hang, with the ranks that were seen waiting."""
    return Mistake(
        f"the ranks wait for each other for ever {when}",
        "every rank must make the same collective calls in the same order, with tensors of the same size",
    )
