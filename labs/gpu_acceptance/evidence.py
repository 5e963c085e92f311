"""What a step of the acceptance has found, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from labs.kit.record import Records


@dataclass(frozen=True)
class Setting:
    """Where a step runs, and how much it may take."""

    device: Literal["cuda", "cpu"] = "cuda"
    gpus: int = 1
    """GPUs that torch can use."""
    long: bool = False
    pretend: bool = False
    """No GPU: labs run on CPU cores, and what only a GPU gives is made up. Never kept as a record."""


@dataclass
class Evidence:
    """Records of the labs that a step has launched, by a name of its own, and facts that no lab records."""

    device: str
    """The kind of device on which all records must have been taken: "cuda", or "cpu" when pretending."""
    runs: dict[str, Records] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    """Plain JSON values."""


@dataclass(frozen=True)
class Verdict:
    """One line about a step."""

    word: Literal["pass", "fail", "cannot"]
    reason: str


class Cannot(Exception):
    """This machine has not what the step needs; the text says what that is."""


def passed(reason: str) -> Verdict:
    """The criterion is met; `reason` holds the numbers."""
    return Verdict("pass", reason)


def failed(reason: str) -> Verdict:
    """The criterion is not met; `reason` says by what."""
    return Verdict("fail", reason)
