"""What the doctor can name besides the probes' findings: the texts of texts.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

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
    calls: (
        tuple[str, ...] | list[str]
    ) = ()  # Names whose first call in the script is the line to change, where no line was noted


BOTTLENECKS = tuple(Bottleneck(name, **row) for name, row in TEXTS["bottleneck"].items())
BY_NAME = {b.name: b for b in BOTTLENECKS}
TRAINERS = TEXTS["trainer_of"]  # By the module that has called the optimizer. Trainers that call others come first
PARTS = TEXTS["part"]  # What a learner calls the kinds of profile.KINDS, and what a GPU's step has besides


def option(trainer: str, finding: str) -> str:
    """What fixes it in a trainer, as " - in Lightning: ..."; "" where that is what fixes it anywhere."""
    words = TEXTS["trainer"].get(trainer, {}).get(finding, "")
    place = "TrainingArguments" if trainer == "transformers" else trainer
    return f" - in {place}: {words}" if words else ""
