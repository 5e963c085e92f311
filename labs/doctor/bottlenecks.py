"""What the doctor can name besides the probes' findings: the texts of texts.toml, and the names of a step's parts."""

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
TRAINERS = {
    "transformers.trainer": "transformers",
    "lightning.pytorch": "Lightning",
    "pytorch_lightning": "Lightning",
    "accelerate.optimizer": "Accelerate",
}
"""Module that has called the optimizer, and whose options are named. Trainers that call others come first."""
PARTS = {
    "data": "waiting for data",
    "copy": "copy to device",
    "prepare": "own code between steps",
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "exchange": "exchange",
    "optimizer": "optimizer",
    "evaluation": "evaluation",
    "synchronise": "waiting for device",
    "print": "print",
    "save": "save",
    "rest": "own code within the step",
    "device": "the doctor's wait for the device",
    "idle": "other work, waits for the host",
}
"""What a learner calls the kinds of profile.KINDS; "idle" is what a GPU's step has besides its parts."""


def option(trainer: str, finding: str) -> str:
    """What fixes it in a trainer, as " - in Lightning: ..."; "" where that is what fixes it anywhere."""
    words = TEXTS["trainer"].get(trainer, {}).get(finding, "")
    place = "TrainingArguments" if trainer == "transformers" else trainer
    return f" - in {place}: {words}" if words else ""
