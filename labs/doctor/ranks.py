"""Let ranks agree on what to do next, through the store of their process group."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any

from labs.kit import _compat

TIMEOUT = timedelta(seconds=30)  # Enough, because all ranks that take part have just ended the same step
KEY = "labs.doctor"


class Apart(RuntimeError):
    """The ranks don't step together."""


def group() -> tuple[int, int] | None:
    """Return (rank, number of ranks) in torch.distributed's default group; None without one."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size()


class Ranks:
    """Exchange values between ranks, which must make the same calls in the same order, between the same steps."""

    def __init__(self, expected: int) -> None:
        """`expected`: the number of ranks that the launcher reports."""
        self.expected, self.calls = expected, 0
        self.alone = False  # Whether the other ranks run without the doctor, so that none is asked

    def look(self) -> None:
        """Set `alone` if there are more ranks than expected and they don't answer: the script started them itself."""
        if (group() or (0, 1))[1] > self.expected:
            try:
                self.each_says(0)
            except Apart:
                self.alone = True

    def each_says(self, thing: Any) -> list[Any]:
        """Return each rank's `thing`, by rank: anything that JSON can hold. Raises Apart if a rank doesn't answer."""
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
        """Return rank 0's `thing`."""
        return self.each_says(thing)[0]

    def part(self) -> None:
        """End the exchange. Rank 0 waits for the others, because its process may host the store."""
        rank, ranks = (0, 1) if self.alone else group() or (0, 1)
        if rank:
            _compat.default_store().set(f"{KEY}/gone/{rank}", "")
        elif ranks > 1:
            with suppress(RuntimeError):
                _compat.default_store().wait([f"{KEY}/gone/{number}" for number in range(1, ranks)], TIMEOUT)
