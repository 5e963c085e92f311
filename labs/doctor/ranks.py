"""Ranks of a training agree on what they do next: through the store that their process group was made with."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any

from labs.kit import _compat

TIMEOUT_S = timedelta(seconds=60)
TIMEOUT_UNEXPECTED_S = timedelta(seconds=20)
"""With ranks that nothing has announced: they have ended the same step, if they take part in this at all."""
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
        if (group() or (0, 1))[1] <= self.expected:
            return
        try:
            self.each_says(0, TIMEOUT_UNEXPECTED_S)
        except Apart:
            self.alone = True

    def _store(self) -> Any:
        self.rank, self.ranks = (0, 1) if self.alone else group() or (0, 1)
        return None if self.ranks == 1 else _compat.default_store()

    def first_says(self, words: str) -> str:
        """Rank 0's words."""
        store = self._store()
        if store is None:
            return words
        self.calls += 1
        if self.rank == 0:
            store.set(f"{KEY}/{self.calls}", words)
            return words
        return self._heard(store, f"{KEY}/{self.calls}")

    def each_says(self, thing: Any, timeout: timedelta = TIMEOUT_S) -> list[Any]:
        """What each rank says, by rank: anything that JSON can hold."""
        store = self._store()
        if store is None:
            return [thing]
        self.calls += 1
        keys = [f"{KEY}/{self.calls}/{rank}" for rank in range(self.ranks)]
        store.set(keys[self.rank], json.dumps(thing))
        return [json.loads(self._heard(store, key, timeout)) for key in keys]

    def wait(self) -> None:
        """Until all have come here."""
        self.each_says(0)

    def part(self) -> None:
        """Nothing is said any more. Rank 0, whose process may be the store's, goes last."""
        store = self._store()
        if store is None:
            return
        if self.rank:
            store.set(f"{KEY}/gone/{self.rank}", "")
            return
        with suppress(Apart):
            for rank in range(1, self.ranks):
                self._heard(store, f"{KEY}/gone/{rank}")

    def _heard(self, store: Any, key: str, timeout: timedelta = TIMEOUT_S) -> str:
        try:
            store.wait([key], timeout)
        except RuntimeError as e:  # torch's DistStoreError is one
            raise Apart(f"ranks do not take their steps together ({type(e).__name__})") from e
        return store.get(key).decode()
