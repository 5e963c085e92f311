"""Ranks of a training agree on what they do next: through the store that their process group was made with."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any

from labs.kit import _compat

TIMEOUT = timedelta(seconds=30)  # Ranks that take part in this at all have ended the same step
KEY = "labs.doctor"


class Apart(RuntimeError):
    """Ranks do not take their steps together."""


def group() -> tuple[int, int] | None:
    """Rank and number of ranks in torch.distributed's own group; None without one."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size()


class Ranks:
    """Every rank makes the same calls in the same order, between the same steps. One rank alone: nothing happens."""

    def __init__(self, expected: int) -> None:
        """`expected`: how many ranks there are, by what has started them."""
        self.expected, self.calls = expected, 0
        self.alone = False  # Whether others train with this one and the doctor is not in them: nobody is asked

    def look(self) -> None:
        """Whether ranks answer that nothing has announced: the script may have started them, or another shell."""
        if (group() or (0, 1))[1] > self.expected:
            try:
                self.each_says(0)
            except Apart:
                self.alone = True

    def each_says(self, thing: Any) -> list[Any]:
        """What each rank says, by rank: anything that JSON can hold."""
        rank, ranks = (0, 1) if self.alone else group() or (0, 1)
        if ranks == 1:
            return [thing]
        store = _compat.default_store()
        self.calls += 1
        keys = [f"{KEY}/{self.calls}/{number}" for number in range(ranks)]
        store.set(keys[rank], json.dumps(thing))
        try:
            store.wait(keys, TIMEOUT)
        except RuntimeError as e:  # torch's DistStoreError is one
            raise Apart(f"ranks do not take their steps together ({type(e).__name__})") from e
        return [json.loads(store.get(key).decode()) for key in keys]

    def first_says(self, thing: Any) -> Any:
        """What rank 0 says."""
        return self.each_says(thing)[0]

    def part(self) -> None:
        """Nothing is said any more. Rank 0, whose process may be the store's, goes last."""
        rank, ranks = (0, 1) if self.alone else group() or (0, 1)
        if rank:
            _compat.default_store().set(f"{KEY}/gone/{rank}", "")
        elif ranks > 1:
            with suppress(RuntimeError):
                _compat.default_store().wait([f"{KEY}/gone/{number}" for number in range(1, ranks)], TIMEOUT)
