"""The doctor's static rules on a function of a cell: what a reader of the source would object to."""

from __future__ import annotations

import inspect
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labs.doctor import static_rules
from labs.doctor.static_rules import Match
from labs.kit.check import Prediction
from labs.kit.display import say


def hits(f: Callable[..., Any]) -> list[Match]:
    """Of this function's source alone; nothing is run."""
    with tempfile.TemporaryDirectory(prefix="labs-reading-") as folder:
        path = Path(folder) / "your_function.py"
        path.write_text(textwrap.dedent(inspect.getsource(f)))
        return static_rules.check(path)


def read(f: Callable[..., Any], guess: Prediction | None = None) -> None:
    """Print each line that a rule objects to, why, and what to write instead."""
    found = hits(f)
    for hit in found:
        print(f"line {hit.line}: {hit.code}")
        print(textwrap.indent(textwrap.fill(f"{hit.kind} ({hit.rule}): {hit.what}", 108), "    "))
        print(textwrap.indent(textwrap.fill(hit.fix, 108), "    "))
    if not found:
        print("No rule objects to this function.")
    if guess is not None:
        say(f"* {guess.against(len(found), 'counted')}")
