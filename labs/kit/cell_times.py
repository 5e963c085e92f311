"""How long the cells of an executed notebook took, as papermill noted it in their metadata."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import nbformat

from labs.kit.course_page import heading

CELL_LIMIT_S, COURSE_LIMIT_S = 30.0, 600.0
"""What a cell, and all notebooks together, may take on 2 quiet CPU cores: longer, and a room waits."""
REFERENCE_STEPS = 4_000_000
REFERENCE_S = 0.16
"""What `reference_s` took on the cores these limits are for."""
TOLD = 1.2  # a machine that is this much slower is worth a sentence


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
    return [found for _, times in _walk(executed) for found in times]


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


def reference_s() -> float:
    """Seconds that a fixed piece of Python takes now: on a slow or busy machine as many times more as cells do."""
    start = time.perf_counter()
    total = 0
    for i in range(REFERENCE_STEPS):
        total += i * i % 7
    return time.perf_counter() - start


def slowness(references_s: Sequence[float]) -> float:
    """How many times slower than the cores of the limits this machine was; 1 if it was faster, or nothing is known.

    The median of what `reference_s` took between the notebooks.
    """
    return max(1.0, statistics.median(references_s) / REFERENCE_S) if references_s else 1.0


def over_the_limits(times: list[CellTime], course_s: float, slower: float = 1.0) -> list[str]:
    """One line for each cell and for the course, where it took longer than the course promises.

    On a machine that is `slower` times slower the limits are as many times longer, and a line says so.
    """
    cell_s, all_s = CELL_LIMIT_S * slower, COURSE_LIMIT_S * slower
    lines = [f"over {cell_s:.0f} s: {cell}" for cell in slowest(times, len(times)) if cell.seconds > cell_s]
    if course_s > all_s:
        lines.append(f"over {all_s / 60:.0f} min: all notebooks together took {course_s / 60:.1f} min")
    longest = max((t.seconds for t in times), default=0.0)
    if slower >= TOLD and (longest > CELL_LIMIT_S or course_s > COURSE_LIMIT_S):
        lines.append(
            f"This machine was {slower:.1f} times slower than the one the limits are for ({CELL_LIMIT_S:.0f} s a cell, "
            f"{COURSE_LIMIT_S / 60:.0f} min in all): here they are {cell_s:.0f} s and {all_s / 60:.0f} min."
        )
    return lines
