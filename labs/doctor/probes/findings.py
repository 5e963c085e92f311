"""What a probe found, on one rank as JSON holds it, and of all ranks."""

from __future__ import annotations

import linecache
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """A thing that makes training wrong, or (`wrong` is False) that deserves a look."""

    probe: str
    title: str
    """One sentence with its main numbers, without a full stop."""
    file: str
    line: int
    code: str
    fix: str
    numbers: dict[str, Any]
    also: Sequence[str] = ()
    wrong: bool = True
    ranks: Sequence[int] = ()

    @property
    def where(self) -> str:
        """Return "train.py:51  code"; "" without a line."""
        return f"{os.path.basename(self.file)}:{self.line}  {self.code}" if self.file else ""


def found(
    probe: str,
    title: str,
    place: tuple[str, int],
    fix: str,
    numbers: dict[str, Any] | None = None,
    also: Sequence[str] = (),
    wrong: bool = True,
) -> dict[str, Any]:
    """Return a finding of one rank as JSON holds it."""
    code = linecache.getline(*place).strip() if place[0] else ""
    return vars(Finding(probe, title, *place, code, fix, numbers or {}, list(also), wrong))
