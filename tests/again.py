"""Facts that a neighbour's moment can spoil, asked of more than one measurement."""

from collections.abc import Callable
from typing import TypeVar

Measured = TypeVar("Measured")
TRIES = 4


def holds_soon(fact: Callable[[Measured], bool], first: Measured, again: Callable[[], Measured]) -> bool:
    """Whether `fact` holds for `first`, or for one of a few measurements more that `again` makes.

    For facts that disturbed measurements seldom show by chance: a neighbour spoils one, a fault in the code spoils all.
    """
    return bool(fact(first)) or any(fact(again()) for _ in range(TRIES - 1))
