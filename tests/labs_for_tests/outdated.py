"""What becomes of a deprecation that our own code causes?

python -m labs_for_tests.outdated
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from labs.kit import cli
from labs.kit.rank import Rank
from labs.kit.record import Record

KINDS = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
OURS, OTHERS = ("labs", "labs.timing", "labs.kit", "labs.kit.rank", "__main__"), ("labs_of_others", "torch")


@dataclass(frozen=True)
class Config:
    """Nothing to choose."""

    smoke: bool = False
    """It is short already."""


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """One record, unless a deprecation is an error here."""
    call_from("labs.timing")
    yield rank.record("ranks", "1", rank.world_size)


def old(kind: type[Warning] = DeprecationWarning) -> None:
    """Something deprecated, which tells so of its caller."""
    warnings.warn("old() is deprecated", kind, stacklevel=2)


def call_from(module: str, kind: type[Warning] = DeprecationWarning) -> None:
    """Call old() from code of the module of that name."""
    exec("old(kind)", {"__name__": module, "old": old, "kind": kind})


def not_as_wanted() -> list[str]:
    """Modules of ours in which a deprecation passes, and others in which it is an error, with the kind of warning."""
    return [f"{m} {k.__name__}" for m in OURS + OTHERS for k in KINDS if _is_error(m, k) != (m in OURS)]


def _is_error(module: str, kind: type[Warning]) -> bool:
    try:
        with warnings.catch_warnings(record=True):  # it keeps the filters, and shows nothing
            call_from(module, kind)
    except kind:
        return True
    return False


if __name__ == "__main__":
    print("not as wanted:", not_as_wanted())
    cli.main()
