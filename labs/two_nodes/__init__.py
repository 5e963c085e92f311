"""What do two machines need to find each other, and what happens when one of them dies or freezes?

    python -m labs.two_nodes --nproc 1
    python -m labs.two_nodes --nproc 1 --parts settings

About 35 s on 2 CPU cores. It simulates two machines on this one with two torchruns, which use torch's own rendezvous
and agent over the loopback interface. Both are forked from a process that has loaded torch, so they start quickly.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge

from labs.kit import supervise
from labs.kit.errors import require
from labs.kit.rank import Rank, unpinned
from labs.kit.record import Record, Records
from labs.two_nodes.settings import WRONG

Part = Literal["settings", "deaths"]
FATES = ("killed", "frozen")
SMOKE = {"parts": ("settings",)}
OF_THIS_RANK = ("TORCHELASTIC_", "TORCH_NCCL_", "PET_", "RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_")


@dataclass(frozen=True)
class Config:
    """What to try."""

    parts: tuple[Part, ...] = ("settings", "deaths")
    """Wrong settings; a machine that dies or freezes during training."""
    steps: Annotated[int, Ge(2)] = 24
    """Optimizer steps of the training run."""
    at_step: Annotated[int, Ge(1)] = 17
    """Steps that are done when the second machine dies or freezes."""
    save_every: Annotated[int, Ge(1)] = 5
    """Steps between two checkpoints."""
    group_timeout_s: Annotated[float, Ge(1)] = 3.0
    """Timeout of the process group. torch's default is 30 minutes for gloo, 10 for NCCL."""
    smoke: bool = False
    """Try only two wrong settings."""

    def __post_init__(self) -> None:
        require(bool(self.parts), "parts must hold settings, deaths or both")
        require(self.at_step < self.steps, f"at_step must be less than steps = {self.steps}, not {self.at_step}")


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield records of each wrong setting, then of each fate of the second machine."""
    if rank.rank != 0:
        return
    rows = []
    request = {name: getattr(config, name) for name in ("steps", "at_step", "save_every", "group_timeout_s")}
    request["settings"] = (2 if config.smoke else len(WRONG)) if "settings" in config.parts else 0
    request["fates"] = FATES if "deaths" in config.parts else ()
    expected = request["settings"] + (1 + len(FATES) if request["fates"] else 0)
    with drills(rank, request) as (process, log):
        for line in process.stdout:
            rows.append(row := json.loads(line))
            rank.progress(len(rows), expected, row.get("setting") or row["fate"] or "undisturbed")
            yield from setting_records(row, rank) if "setting" in row else death_records(row, rows, rank)
        if process.wait():
            raise RuntimeError(log.read_text().strip().splitlines()[-1])


@contextmanager
def drills(rank: Rank, request: dict[str, Any]) -> Iterator[tuple[subprocess.Popen, Path]]:
    """Start the process that plays both machines. Yield it and its log; whatever it started ends with the block."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith(OF_THIS_RANK)}
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    with supervise.watched_folder(sockets=True) as root, unpinned(rank), (root / "drills.log").open("wb") as log:
        (announced := root / "run-0").mkdir()
        environment = outside | {
            supervise.ANNOUNCE: str(announced),
            "TMPDIR": str(root),
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONPATH": os.pathsep.join(p for p in path if p),
        }
        command = [sys.executable, "-m", "labs.two_nodes.drills", str(root), json.dumps(request)]
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": log, "text": True}
        with supervise.started(command, env=environment, root=announced, **streams) as process:
            yield process, root / "drills.log"


def setting_records(row: dict[str, Any], rank: Rank) -> Iterator[Record]:
    """Yield how many ranks computed with a wrong setting, each machine's message, and seconds to the first error."""
    wrong = next(w for w in WRONG if w.name == row["setting"])
    case = {"setting": wrong.name, "fix": wrong.fix, "default_wait": wrong.default_wait}
    about = {"machine_0": row["machines"][0], "machine_1": row["machines"][1], "of": row["of"]}
    yield rank.record("computed", "ranks", row["computed"], rank=0, **case, **about)
    if row["error_s"]:
        yield rank.record("error_s", "s", min(row["error_s"]), rank=0, **case)


def death_records(row: dict[str, Any], rows: list[dict[str, Any]], rank: Rank) -> Iterator[Record]:
    """Yield a run's losses and, after a death, when rank 0 noticed, steps redone, and whether the result is equal."""
    case = {"fate": row["fate"] or "none"}
    yield rank.record("loss", "nats", row["losses"], rank=0, **case)
    if row["fate"]:
        whole = next(r for r in rows if r.get("fate") == "")
        same = row["losses"] == whole["losses"] and row["weights"] == whole["weights"]
        yield rank.record("noticed_s", "s", row["noticed_s"], rank=0, error=row["error"], **case)
        yield rank.record("back_s", "s", row["back_s"], rank=0, **case)
        yield rank.record("redone", "steps", row["redone"], rank=0, **case)
        yield rank.record("same_bits", "1", float(same), rank=0, **case)


def category(run: Records) -> str:
    """Say which settings compute, and how each fate is noticed and ends."""
    parts = [f"{r.case['setting']}: {'computes' if r.value else 'error'}" for r in run.where("computed")]
    timeout = run[0].config["group_timeout_s"]
    for r in run.where("noticed_s"):
        case = {"fate": r.case["fate"]}
        when = "after the timeout" if r.value > 0.9 * timeout else "at once" if r.value < timeout / 4 else "between"
        redone, same = (run.one(name, **case).value for name in ("redone", "same_bits"))
        parts.append(f"{r.case['fate']}: {when}, {redone:g} redone, same bits {same:g}")
    return "; ".join(parts)


def answer(run: Records) -> Iterator[str]:
    """Yield which wrong settings compute without an error, and how long a dead machine stays unnoticed."""
    yield "Two torchruns on this machine play two machines."
    if len(tried := run.where("computed")):
        silent = [r.case["setting"] for r in tried if r.value]
        yield f"Ranks computed with {len(silent)} of {len(tried)} wrong settings: {', '.join(silent) or 'none'}."
    for r in run.where("noticed_s"):
        case = {"fate": r.case["fate"]}
        bits = "equal bit for bit to" if run.one("same_bits", **case).value else "DIFFERENT from"
        yield (
            f"Machine 1 {r.case['fate']}: rank 0 got an error after {r.value:.1f} s. "
            f"{run.one('redone', **case).value:.0f} steps were done twice; the result is {bits} the undisturbed one."
        )
