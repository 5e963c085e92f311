"""GO or NO-GO: what the preflight for a room says in a terminal, and what it writes for a program. No torch needed."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from labs.kit.preflight import Check

SCHEMA = 1
MARKS = {"pass": "ok  ", "warn": "WARN", "fail": "FAIL"}
COLOURS = {"GO": "\033[1;30;42m", "NO-GO": "\033[1;37;41m"}
NARROW, WIDE = 72, 110  # columns: readable from the back row, and not one endless line
NAME_COLUMNS = 18


@dataclass(frozen=True)
class Report:
    """Everything that was found, for a person and for a program."""

    checks: Sequence[Check]
    course: str | None = None
    name: str | None = None
    utc: str = ""
    seconds: float = 0.0
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    ranks: dict[str, Any] = field(default_factory=dict)

    def of(self, status: str) -> list[Check]:
        """The checks that stand so."""
        return [c for c in self.checks if c.status == status]

    @property
    def verdict(self) -> str:
        """ "GO" unless a check failed: warnings do not stop a course."""
        return "NO-GO" if self.of("fail") else "GO"

    def as_json(self) -> str:
        """One JSON object; for instructors, `python -m labs.classroom` reads it."""
        reasons = [f"{c.name}: {c.detail}" for c in self.of("fail")]
        head = {"schema": SCHEMA, "verdict": self.verdict, "reasons": reasons, "warnings": len(self.of("warn"))}
        rest = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "checks"}
        checks = [dataclasses.asdict(c) for c in self.checks]
        return json.dumps({**head, "checks": checks, **rest}, indent=2) + "\n"


def sentence(report: Report) -> str:
    """The verdict in one line: "NO-GO: 2 things to mend: memory, data"."""
    warnings = len(report.of("warn"))
    after = f", with {_count(warnings, 'warning')}" if warnings else ""
    failed = report.of("fail")
    if not failed:
        return f"GO: ready for the course{after}"
    names = list(dict.fromkeys(c.name for c in failed))
    return f"NO-GO: {_count(len(failed), 'thing')} to mend: {', '.join(names)}{after}"


def as_text(report: Report, columns: int = 80, colour: bool = False, saved: str = "") -> str:
    """The verdict, what is wrong in full, what is well in short, where the report is, the verdict again."""
    width = max(NARROW, min(columns, WIDE))
    facts = [f"course {report.course or 'unknown'}", report.name, f"{report.seconds:.1f} s"]
    wrong = [line for c in (*report.of("fail"), *report.of("warn")) for line in _in_full(c, width)]
    banner = _banner(report, width, colour)
    lines = [banner, "  ".join(f for f in facts if f), *wrong, *_in_short(report.of("pass"), width)]
    return "\n".join([*lines, *([f"report: {saved}"] if saved else []), banner]) + "\n"


def _banner(report: Report, width: int, colour: bool) -> str:
    text = f" {sentence(report)} "
    if colour:
        return f"{COLOURS[report.verdict]}{text.ljust(width)}\033[0m"
    return text.center(width, "=") if len(text) < width - 4 else f"=={text}=="


def _in_full(check: Check, width: int) -> list[str]:
    """A check that did not pass, and below it what to do; commands are never broken into lines."""
    start = f"{MARKS[check.status]}  {check.name:<{NAME_COLUMNS}} "
    indent = " " * len(start)
    detail = textwrap.wrap(check.detail, width, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False)
    return [*(detail or [start.rstrip()]), f"{indent}-> {check.remedy}"]


def _in_short(passed: Sequence[Check], width: int) -> list[str]:
    items = [f"{c.name}: {c.detail}".replace(" ", "\N{NO-BREAK SPACE}") for c in passed]  # an item is not broken
    lines = textwrap.wrap(
        "  ".join(f"{i};" for i in items).removesuffix(";"),
        width,
        initial_indent="ok    ",
        subsequent_indent=" " * 6,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("" if n == 1 else "s")
