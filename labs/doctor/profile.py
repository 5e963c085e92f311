"""What was measured of one rank: plain numbers, as JSON. All that the report says is computed from these."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

KINDS = tuple(
    "data copy prepare forward backward exchange optimizer evaluation synchronise print save rest device".split()
)
"""Parts of a step. Each instant of the script's main thread belongs to one:
data: in the DataLoader's `next`; copy: in `.to`, `.cuda`; prepare: the script's own, from a step's start to its first
forward; forward, backward, optimizer: in these calls; exchange: in collectives that the script calls, and waits for
what it has sent and received (DDP's collectives are in backward); evaluation: a model called without gradients;
synchronise: in calls that wait for the device (`.item()`); print, save: in print and torch.save; rest: the script's
own, after the first forward; device: what a GPU still works on at a step's end, for which the doctor waits."""
AS_IS = "as it is"
NOW_AND_THEN, IN_MOST_STEPS = ("evaluation", "save", "print"), 0.9
"""What fewer steps have than that is rare: short turns miss it, and its mean over the steps prices it."""


@dataclass
class Line:
    """A line of the script, or of what it imports from its folder, that waits, prints, saves or copies."""

    kind: str
    """ "synchronise", "print", "save", "copy" or "exchange"; of lines seen by sampling "prepare", "model" (in
    "prepare", in a forward that the hooks do not see), "loss" (in "rest", before the first backward) or "rest"."""
    what: str  # The call: "item", "print", ...; "" by sampling
    file: str
    line: int
    code: str  # The line itself, without spaces around it
    calls: float  # Per step; 0 by sampling
    ms: float  # Per step, on the host


@dataclass
class Loader:
    """A DataLoader that the training took batches from."""

    batch_size: int | None  # None: a batch_sampler of the script's own makes batches
    workers: int
    prefetch: int  # Batches that each worker has ready; 0 without workers
    dataset: str
    by_batch_ms: float | None = None
    """Of one index for a whole batch, where samples are rows of tensors or arrays that the dataset holds."""
    item: str = ""  # Where the dataset's __getitem__ is in the script: "file:line  code"


@dataclass
class Profile:
    """Of one rank. Times in s, sizes in bytes, unless a name says otherwise. Empty where nothing was seen."""

    script: str
    argv: list[str]
    rank: int = 0
    ranks: int = 1
    local_ranks: int = 1
    device: str = "cpu"
    device_name: str = ""

    ended: str = "running"
    """"done" (all was measured), "script ended", "exit", "error", "killed", "silent" (no step for too long), "stopped"
    (from outside, by the signal that `error` names)."""
    exit_code: int | None = None
    error: str = ""  # Last line of the script's error, with file and line
    output: list[str] = field(default_factory=list)  # Last lines that the script printed, if it did not come to its end
    stage: str = "start"  # How far it came: "start", "warm-up", "as it is", "in turn", "done"
    steps: int = 0  # Optimizer steps that were seen, warm-up included
    wall_s: float = 0.0  # From the start of the script's process to its end

    step_s: list[float] = field(default_factory=list)
    """Each step that was measured as it is: on a GPU by its own clock, from the end of one step to that of the next."""
    spans_s: dict[str, list[float]] = field(default_factory=dict)
    """By kind, for each of these steps: they sum to the step."""
    device_s: dict[str, list[float]] = field(default_factory=dict)
    """On a GPU: by kind, one mean time per step, by its own clock. `spans_s` is the host's."""
    micro_batches: float = 1.0  # Backward passes per optimizer step
    samples: float | None = None  # Per step and rank
    lines: list[Line] = field(default_factory=list)  # Costliest first
    loader: Loader | None = None
    restarts: list[int] = field(default_factory=list)
    """Of these steps those in which workers were started anew, for an epoch."""
    probes: list[dict[str, Any]] = field(default_factory=list)  # What labs.doctor.probes has seen of wrong results

    interleaved_s: dict[str, list[list[float]]] = field(default_factory=dict)
    """By mode ("as it is" and each counterfactual): one list per round, with the mean step of its turn, taken in turn
    with the others. Rare parts are not in it."""
    not_tried: dict[str, str] = field(default_factory=dict)  # By mode: why it was not tried here, or would show nothing
    seconds: float | None = None  # That were given for them

    training: dict[str, Any] = field(default_factory=dict)  # What it consists of: see hooks.describe
    memory: dict[str, Any] = field(default_factory=dict)
    """free (bytes); series: [steps so far, bytes in use] after each step as it is and after each turn of such
    steps; on a CPU tensors_growth (per step) and tensor_bytes_growth."""
    machine: dict[str, Any] = field(default_factory=dict)  # cores (usable), threads (torch's)
    compiles: list[int] = field(default_factory=list)  # Graphs that torch.compile made in each step as it is
    unseen: list[str] = field(default_factory=list)  # What this training does that the doctor cannot see, in words

    def save(self, path: Path) -> None:
        """Atomically: a reader sees all of it or what was there before."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)))
        part.replace(path)


def without_colours(text: str) -> str:
    """And without other orders to a terminal."""
    return re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", text).replace("\x1b", "")


def load(path: Path) -> Profile:
    """What `save` has written."""
    return from_json(json.loads(path.read_text()))


def from_json(row: dict[str, Any]) -> Profile:
    """What `asdict` has made of a profile."""
    loader = Loader(**row["loader"]) if row["loader"] else None
    return Profile(**row | {"lines": [Line(**line) for line in row["lines"]], "loader": loader})


def rare_kinds(profile: Profile) -> list[str]:
    """Kinds of NOW_AND_THEN that some steps have, and fewer than IN_MOST_STEPS."""
    return [kind for kind in NOW_AND_THEN if 0 < share_of_steps(profile, kind) < IN_MOST_STEPS]


def share_of_steps(profile: Profile, kind: str) -> float:
    """How many of the steps as they are have a part of this kind."""
    seen = profile.spans_s.get(kind, [])
    return sum(s > 0 for s in seen) / len(seen) if seen else 0.0
