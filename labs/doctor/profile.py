"""What was measured on one rank, as plain numbers for JSON. The whole report is computed from these."""

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
data: the DataLoader's `next`; copy: `.to`, `.cuda`; prepare: the script's own code, from a step's start to its first
forward; forward, backward, optimizer: these calls; exchange: collectives that the script calls, and waits for its sends
and receives (DDP's collectives are in backward); evaluation: a model called without gradients; synchronise: calls that
wait for the device (`.item()`); print, save: print and torch.save; rest: the script's own code after the first forward;
device: the doctor's wait at a step's end for what a GPU is still computing."""
AS_IS = "as it is"
NOW_AND_THEN, IN_MOST_STEPS = ("evaluation", "save", "print"), 0.9
"""A kind that fewer steps have than that share is rare: short turns miss it, so its mean over all steps prices it."""


@dataclass
class Line:
    """The cost of a line of the script, or of a module that it imports from its folder."""

    kind: str
    """ "synchronise", "print", "save", "copy" or "exchange"; for sampled lines "prepare", "model" (in
    "prepare", in a forward that the hooks don't see), "loss" (in "rest", before the first backward) or "rest"."""
    what: str  # The call: "item", "print", ...; "" if sampled
    file: str
    line: int
    code: str  # The line's text, stripped
    calls: float  # Per step; 0 if sampled
    ms: float  # Per step, on the host


@dataclass
class Loader:
    """A DataLoader that the training took batches from."""

    batch_size: int | None  # None: the script's own batch_sampler sets it, or there are no batches
    workers: int
    prefetch: int  # Batches that each worker has ready; 0 without workers
    dataset: str
    by_batch_ms: float | None = None
    """Time of one index for a whole batch, if samples are rows of tensors or arrays that the dataset holds."""
    item: str = ""  # Where the dataset's __getitem__ is in the script: "file:line  code"


@dataclass
class Profile:
    """The measurements of one rank, in s and bytes unless a name says otherwise. Empty where nothing was seen."""

    script: str
    argv: list[str]
    rank: int = 0
    ranks: int = 1
    local_ranks: int = 1
    device: str = "cpu"
    device_name: str = ""

    ended: str = "running"
    """"done" (all was measured), "script ended", "exit", "error", "killed", "silent" (no step for too long), "stopped"
    (from outside, by the signal in `error`)."""
    exit_code: int | None = None
    error: str = ""  # Last line of the script's error, with file and line
    output: list[str] = field(default_factory=list)  # Last lines that the script printed, unless it ran to its end
    stage: str = "start"  # How far it got: "start", "warm-up", "as it is", "in turn", "done"
    steps: int = 0  # Optimizer steps that were seen, warm-up included
    wall_s: float = 0.0  # From the start of the script's process to its end

    step_s: list[float] = field(default_factory=list)
    """Each unchanged step. On a GPU, this is by the GPU's clock, from the end of one step to the end of the next."""
    spans_s: dict[str, list[float]] = field(default_factory=dict)
    """By kind, for each of these steps, by the host's clock: they sum to the step on the host."""
    device_s: dict[str, list[float]] = field(default_factory=dict)
    """On a GPU, by its own clock: by kind, a list with one value, the mean time per step."""
    micro_batches: float = 1.0  # Backward passes per optimizer step
    samples: float | None = None  # Per step and rank
    lines: list[Line] = field(default_factory=list)  # Costliest first
    loader: Loader | None = None
    restarts: list[int] = field(default_factory=list)
    """Indices into `step_s` of the steps in which an epoch restarted the workers."""
    probes: list[dict[str, Any]] = field(default_factory=list)  # Findings of labs.doctor.probes

    interleaved_s: dict[str, list[list[float]]] = field(default_factory=dict)
    """By mode ("as it is" and each counterfactual): one list per round, with the mean step of its turn,
    without rare parts. The modes' turns are interleaved."""
    not_tried: dict[str, str] = field(default_factory=dict)  # By mode: why it was not tried here, or would show nothing
    seconds: float | None = None  # Time limit for these turns

    training: dict[str, Any] = field(default_factory=dict)  # About model and trainer: see hooks.describe
    memory: dict[str, Any] = field(default_factory=dict)
    """free (bytes); series: [steps so far, bytes in use] after each unchanged step and each turn of such
    steps; on a CPU also tensors_growth and tensor_bytes_growth, per step."""
    machine: dict[str, Any] = field(default_factory=dict)  # cores (usable), threads (torch's)
    compiles: list[int] = field(default_factory=list)  # Graphs that torch.compile made in each unchanged step
    unseen: list[str] = field(default_factory=list)  # Sentences on what the doctor couldn't see

    def save(self, path: Path) -> None:
        """Write the profile atomically: a reader sees all of it or the previous one."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)))
        part.replace(path)


def without_colours(text: str) -> str:
    """Return a text without colours and other terminal escape sequences."""
    return re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", text).replace("\x1b", "")


def load(path: Path) -> Profile:
    """Read a profile that `save` wrote."""
    return from_json(json.loads(path.read_text()))


def from_json(row: dict[str, Any]) -> Profile:
    """Return the profile that `asdict` turned into `row`."""
    loader = Loader(**row["loader"]) if row["loader"] else None
    return Profile(**row | {"lines": [Line(**line) for line in row["lines"]], "loader": loader})


def rare_kinds(profile: Profile) -> list[str]:
    """Return the kinds of NOW_AND_THEN that some steps have, but less than IN_MOST_STEPS of them."""
    return [kind for kind in NOW_AND_THEN if 0 < share_of_steps(profile, kind) < IN_MOST_STEPS]


def share_of_steps(profile: Profile, kind: str) -> float:
    """Return the share of unchanged steps that have a part of this kind."""
    seen = profile.spans_s.get(kind, [])
    return sum(s > 0 for s in seen) / len(seen) if seen else 0.0
