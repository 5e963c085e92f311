"""What the doctor can name: the texts of texts.toml, and the lines of a script that they are about."""

from __future__ import annotations

import linecache
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WRONG, SLOW, RISK, OPTION, UNPRICED = "wrong result", "slow", "at risk", "option", "not priced"
"""Kinds of findings, in the order of a report. An option is what a healthy script may use; UNPRICED was seen, and
what it costs isn't known."""
KINDS = (WRONG, SLOW, RISK, OPTION, UNPRICED)
TEXTS = tomllib.loads(Path(__file__).with_name("texts.toml").read_text("utf-8"))


@dataclass(frozen=True)
class Bottleneck:
    """One row of the table."""

    name: str
    what: str
    fix: str
    notebook: str
    mode: str = ""  # The counterfactual that takes it away
    part: str = ""  # Kind of the spans that would be gone, and of the lines that show it
    calls: Sequence[str] = ()  # Names whose first call in the script is the line to change, where no line was noted


BOTTLENECKS = tuple(Bottleneck(name, **row) for name, row in TEXTS["bottleneck"].items())
BY_NAME = {b.name: b for b in BOTTLENECKS}
TRAINERS = TEXTS["trainer_of"]  # By the module that has called the optimizer. Trainers that call others come first
PARTS = TEXTS["part"]  # What a learner calls the kinds of profile.KINDS, and what a GPU's step has besides


@dataclass(frozen=True)
class Match:
    """What a probe or a rule has seen at a line: training is wrong, or (`wrong` is False) it deserves a look."""

    probe: str  # Or the rule's name
    what: str  # One sentence with its main numbers, without a full stop
    fix: str
    file: str
    line: int
    code: str
    words: dict[str, Any]  # With which the sentence was filled in
    also: Sequence[str] = ()
    wrong: bool = True
    notebook: str = ""

    @property
    def where(self) -> str:
        """Return "train.py:51  code"; "" without a line."""
        return f"{os.path.basename(self.file)}:{self.line}  {self.code}" if self.file else ""


def matched(name: str, place: tuple[str, int], /, also: Sequence[str] = (), wrong: bool = True, **words: Any) -> Match:
    """Return what texts.toml says of [probe.NAME], with these words in it, about a line."""
    code = linecache.getline(*place).strip() if place[0] else ""
    text = TEXTS["probe"][name]
    what, fix = (text[part].format(**words) for part in ("what", "fix"))
    return Match(text["probe"], what, fix, *place, code, words, also, wrong, text.get("notebook", ""))


def option(trainer: str, finding: str) -> str:
    """What fixes it in a trainer, as " - in Lightning: ..."; "" where that is what fixes it anywhere."""
    words = TEXTS["trainer"].get(trainer, {}).get(finding, "")
    place = "TrainingArguments" if trainer == "transformers" else trainer
    return f" - in {place}: {words}" if words else ""
