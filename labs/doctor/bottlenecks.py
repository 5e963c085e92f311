"""What the doctor can report: the texts of texts.toml, and the lines of a script that they refer to."""

from __future__ import annotations

import linecache
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WRONG, SLOW, RISK, OPTION, UNPRICED = "wrong result", "slow", "at risk", "option", "not priced"
"""Kinds of findings, in a report's order. An OPTION is a speedup that a healthy script may use as well. UNPRICED was
seen, but its cost isn't known."""
KINDS = (WRONG, SLOW, RISK, OPTION, UNPRICED)
TEXTS = tomllib.loads(Path(__file__).with_name("texts.toml").read_text("utf-8"))


@dataclass(frozen=True)
class Bottleneck:
    """A [bottleneck.NAME] table of texts.toml."""

    name: str
    what: str
    fix: str
    notebook: str
    mode: str = ""  # The counterfactual that removes it
    part: str = ""  # Kind of the spans that a fix removes, and of the lines that show it
    calls: Sequence[str] = ()  # The first call of one of these is the line to change, if no line was recorded


BOTTLENECKS = tuple(Bottleneck(name, **row) for name, row in TEXTS["bottleneck"].items())
BY_NAME = {b.name: b for b in BOTTLENECKS}
TRAINERS = TEXTS["trainer_of"]  # By the module that called the optimizer. A trainer comes before those it calls
PARTS = TEXTS["part"]  # Display names of profile.KINDS, and of what only a GPU's step has


@dataclass(frozen=True)
class Match:
    """What a probe or a rule found at a line: a wrong result, or with `wrong` False, a risk."""

    probe: str  # The probe's name, or the rule's
    what: str  # One sentence with its main numbers, without a full stop
    fix: str
    file: str
    line: int
    code: str
    words: dict[str, Any]  # The values filled into the sentence
    also: Sequence[str] = ()
    wrong: bool = True
    notebook: str = ""

    @property
    def where(self) -> str:
        """Return "train.py:51  code"; "" without a line."""
        return f"{os.path.basename(self.file)}:{self.line}  {self.code}" if self.file else ""


def matched(name: str, place: tuple[str, int], /, also: Sequence[str] = (), wrong: bool = True, **words: Any) -> Match:
    """Return a match at `place` (file, line), with the texts of [probe.NAME] in texts.toml and `words` filled in."""
    code = linecache.getline(*place).strip() if place[0] else ""
    text = TEXTS["probe"][name]
    what, fix = (text[part].format(**words) for part in ("what", "fix"))
    return Match(text["probe"], what, fix, *place, code, words, also, wrong, text.get("notebook", ""))


def option(trainer: str, finding: str) -> str:
    """Return the fix for a finding in this trainer, as " - in Lightning: ..."; "" if it has no special one."""
    words = TEXTS["trainer"].get(trainer, {}).get(finding, "")
    place = "TrainingArguments" if trainer == "transformers" else trainer
    return f" - in {place}: {words}" if words else ""
