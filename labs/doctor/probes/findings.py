"""What a probe found, on one rank as JSON holds it, and of all ranks."""

from __future__ import annotations

import linecache
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """A thing that makes training wrong, or (`wrong` is False) that deserves a look."""

    probe: str
    title: str
    """One sentence with its main numbers, without a full stop."""
    numbers: dict[str, Any]
    file: str
    line: int
    code: str
    fix: str
    also: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    wrong: bool = True

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
    file, line = place
    code = linecache.getline(file, line).strip() if file else ""
    return {
        "probe": probe,
        "title": title,
        "numbers": numbers or {},
        "file": file,
        "line": line,
        "source line": code,
        "fix": fix,
        "also": list(also),
        "wrong": wrong,
    }
