"""How long the cells of an executed notebook took, as papermill noted it in their metadata."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import nbformat

from labs.kit.course_page import heading

CELL_LIMIT_S, COURSE_LIMIT_S = 30.0, 600.0
"""What a cell, and all notebooks together, may take on 2 CPU cores: longer, and a room waits."""


@dataclass(frozen=True)
class CellTime:
    """What one code cell took."""

    notebook: str
    number: int
    """As in its prompt: [14]"""
    seconds: float
    section: str
    """The "## " heading it stands under; before the first one the notebook's title"""
    source: str
    """Its first line"""

    def __str__(self) -> str:
        return f"{self.notebook} cell [{self.number}]: {self.seconds:.1f} s  {self.source}"


@dataclass(frozen=True)
class Section:
    """One section of a notebook, all its cells together; `cells` are those that ran."""

    section: str
    seconds: float = 0.0
    cells: int = 0


def cell_times(executed: Path) -> list[CellTime]:
    """The code cells of an executed notebook that ran, in order. Empty if papermill did not run it."""
    return [time for _, times in _walk(executed) for time in times]


def sections(executed: Path) -> list[Section]:
    """The notebook's sections in order, those without code too: reading takes time as well, but none is measured."""
    return [Section(name, round(sum(t.seconds for t in times), 3), len(times)) for name, times in _walk(executed)]


def _walk(executed: Path) -> list[tuple[str, list[CellTime]]]:
    found: list[tuple[str, list[CellTime]]] = [(executed.stem, [])]
    for cell in nbformat.read(executed, as_version=4).cells:
        if cell.cell_type == "markdown":
            if len(found) == 1 and (title := heading(cell.source, 1)):
                found[0] = (title, found[0][1])
            if name := heading(cell.source, 2):
                found.append((name, []))
        seconds = cell.metadata.get("papermill", {}).get("duration")
        if cell.cell_type == "code" and cell.execution_count and seconds is not None:
            first = next((line for line in cell.source.splitlines() if line.strip()), "")
            name = found[-1][0]
            found[-1][1].append(CellTime(executed.stem, cell.execution_count, seconds, name, first.strip()))
    return found


def slowest(times: list[CellTime], count: int) -> list[CellTime]:
    """The `count` slowest cells, the slowest first."""
    return sorted(times, key=lambda t: t.seconds, reverse=True)[:count]


def over_the_limits(times: list[CellTime], course_s: float) -> list[str]:
    """One line for each cell and for the course, where it took longer than the course promises."""
    lines = [f"over {CELL_LIMIT_S:.0f} s: {time}" for time in slowest(times, len(times)) if time.seconds > CELL_LIMIT_S]
    if course_s > COURSE_LIMIT_S:
        lines.append(f"over {COURSE_LIMIT_S / 60:.0f} min: all notebooks together took {course_s / 60:.1f} min")
    return lines
