"""Published numbers that this course tests, each with its source."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from labs.kit.record import Records, load

TABLES = Path(__file__).parents[3] / "records" / "published"


@cache
def table(name: str) -> Records:
    """Load the table records/published/`name`.jsonl. Its provenance says where it was read, and how reliably."""
    return load(TABLES / f"{name}.jsonl")
