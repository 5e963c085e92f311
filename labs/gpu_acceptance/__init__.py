"""Does this GPU keep what the course promises of GPUs?

    python -m labs.gpu_acceptance                       # one line per step: pass, fail, or cannot with the reason
    python -m labs.gpu_acceptance --long                # larger models, more rounds: up to 40 minutes
    python -m labs.gpu_acceptance --only copies nccl    # some steps
    python -m labs.gpu_acceptance --pretend             # no GPU: every step on CPU cores, GPU numbers made up

Up to 10 minutes. Every step launches the course's own labs in a process of its own, with a time limit, and judges their
records by a criterion that can fail. The report and the records go into a folder as records/ wants them. Exit code: 0
nothing failed, 1 a step failed, 2 bad input, 3 no GPU here, 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labs.gpu_acceptance.evidence import Setting
from labs.gpu_acceptance.process import REQUEST, VERDICT, last_line
from labs.gpu_acceptance.steps import STEPS, Step
from labs.kit import cli, hardware, nvml, record, supervise, timeouts
from labs.kit.errors import did_you_mean, require
from labs.kit.supervise import watched_folder

PROG = "python -m labs.gpu_acceptance"
LISTED = "labs.gpu_acceptance.steps:STEPS"
BUDGET_S = {False: 600.0, True: 2400.0}
"""Of all steps together, for the short and the long form."""


@dataclass(frozen=True)
class Config:
    """Which steps, how long, and where the report goes."""

    only: tuple[str, ...] = ()
    """Steps to try; () is all."""
    long: bool = False
    """Larger models and more rounds, within 40 minutes."""
    pretend: bool = False
    """Without a GPU: labs run on CPU cores, GPU numbers are made up. To see that every step runs; no result."""
    out: Path = Path("build/gpu_acceptance")
    """The folder <machine>-<year>-<month>/acceptance with report and records is made in this one."""

    def __post_init__(self) -> None:
        for name in self.only:
            require(
                name in STEPS,
                f"only: there is no step {name!r}: {did_you_mean(name, STEPS)}The steps are {', '.join(STEPS)}",
            )
        require(len(set(self.only)) == len(self.only), "only must name each step once")
        there = next(p for p in (self.out.absolute(), *self.out.absolute().parents) if p.exists())
        writable = there.is_dir() and os.access(there, os.W_OK)
        require(writable, f"cannot write to {self.out}: choose another folder with --out")


@dataclass(frozen=True)
class Outcome:
    """How a step went."""

    step: str
    word: str
    """pass, fail or cannot."""
    reason: str
    seconds: float
    facts: dict[str, Any]

    @property
    def line(self) -> str:
        """For a terminal."""
        return f"{self.word:6}  {self.step:12} {self.seconds:5.0f} s  {self.reason}"


def attempts(
    names: list[str],
    setting: Setting,
    root: Path,
    steps: Mapping[str, Step] = STEPS,
    listed: str = LISTED,
    budget_s: float | None = None,
) -> Iterator[Outcome]:
    """Try the steps `names` one after the other, each in a process of its own and in a folder of `root`.

    A step that crashes, hangs or finds no time left has failed; the others go on. `root` is one of `watched_folder`: if
    this process dies, so do the steps. `listed` names `steps` to the new process, as "module:attribute".
    """
    until = time.monotonic() + (BUDGET_S[setting.long] if budget_s is None else budget_s)
    for name in names:
        start = time.monotonic()
        limit_s = min(steps[name].long_limit_s if setting.long else steps[name].limit_s, until - start)
        if limit_s < 1:
            found = {"word": "fail", "reason": "no time was left: the steps before took it all"}
        else:
            found = _attempt(name, setting, root, listed, limit_s)
        yield Outcome(name, found["word"], found["reason"], time.monotonic() - start, found.get("facts", {}))


def _attempt(name: str, setting: Setting, root: Path, listed: str, limit_s: float) -> dict[str, Any]:
    folder = root / name
    folder.mkdir()
    (folder / REQUEST).write_text(json.dumps({"setting": dataclasses.asdict(setting), "steps": listed}))
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "PYTHONUNBUFFERED": "1"}
    with (folder / "log").open("wb") as log:
        step = supervise.started(
            [sys.executable, "-m", "labs.gpu_acceptance.process", name, str(folder)],
            root=root,
            grace_s=timeouts.STOP_S,  # it ends its ranks
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        with step as process:
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return {"word": "fail", "reason": f"no answer after {limit_s:.0f} s: it was stopped"}
    try:
        return json.loads((folder / VERDICT).read_text())
    except OSError:
        said = last_line((folder / "log").read_text(errors="replace"))
        code = process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return {"word": "fail", "reason": f"its process {how} without a verdict: {said}"}


def machine_name(gpus: list[str]) -> str:
    """As folders of records/ are called, for example "4x-nvidia-a100-sxm4-80gb"."""
    slug = re.sub(r"[^a-z0-9]+", "-", gpus[0].lower()).strip("-")
    return f"{len(gpus)}x-{slug}" if len(gpus) > 1 else slug


def answer(outcomes: list[Outcome], where: str, pretend: bool) -> Iterator[str]:
    """What came out, in sentences."""
    words = {word: [o for o in outcomes if o.word == word] for word in ("pass", "fail", "cannot")}
    seconds = sum(o.seconds for o in outcomes)
    if pretend:
        yield "PRETEND: no GPU was used and its numbers are made up. This says that the steps run, nothing about a GPU."
    yield f"{len(words['pass'])} of {len(outcomes)} steps pass on {where}, in {seconds:.0f} s."
    if words["fail"]:
        yield f"{len(words['fail'])} fail: " + "; ".join(f"{o.step} ({o.reason})" for o in words["fail"]) + "."
    if words["cannot"]:
        yield f"{len(words['cannot'])} cannot be tried here: {', '.join(o.step for o in words['cannot'])}."


def report(config: Config, outcomes: list[Outcome], interrupted: bool) -> dict[str, Any]:
    """All that is known, as plain JSON values."""
    return {
        "pretend": config.pretend,
        "long": config.long,
        "interrupted": interrupted,
        "provenance": record.provenance() | ({"source": "--pretend: no GPU was used"} if config.pretend else {}),
        "steps": [dataclasses.asdict(o) | {"question": STEPS[o.step].question} for o in outcomes],
    }


def keep(found: dict[str, Any], root: Path, config: Config, gpus: list[str]) -> Path:
    """Write the report, and copy the records of the steps beside it, and what failed steps printed.

    Of a pretended run the report alone.
    """
    if config.pretend:
        return record.write_atomic(config.out / "pretend" / "pretended.json", json.dumps(found, indent=2, default=str))
    folder = config.out / f"{machine_name(gpus)}-{found['provenance']['utc'][:7]}" / "acceptance"
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(root.glob("*/*.jsonl")):
        shutil.copyfile(path, folder / path.name)
    for failed in (step["step"] for step in found["steps"] if step["word"] == "fail"):
        if (log := root / failed / "log").exists():  # not there if no time was left to begin it
            shutil.copyfile(log, folder / f"{failed}.log")
    text = json.dumps(found, indent=2, default=str).replace(f"{Path(__file__).parents[2]}{os.sep}", "")  # in tracebacks
    return record.write_atomic(folder / "acceptance.json", text)


def main() -> None:
    """Entry point of the command line."""
    config = cli.parse_config(Config, __doc__, PROG)
    gpus = [] if config.pretend else hardware.visible_gpu_names()
    if not gpus and not config.pretend:
        why = nvml.report(brief=True).problem or "torch or CUDA_VISIBLE_DEVICES hides those that are here"
        print(f"{PROG}: no GPU for torch here ({why}), so nothing was tried: see --pretend", file=sys.stderr)
        raise SystemExit(3)
    setting = Setting("cpu", 2, config.long, True) if config.pretend else Setting("cuda", len(gpus), config.long, False)
    names, outcomes, interrupted = [s for s in STEPS if s in (config.only or STEPS)], [], False
    with watched_folder(sockets=True) as root:
        try:
            for outcome in attempts(names, setting, root):
                outcomes.append(outcome)
                if sys.stderr.isatty():
                    print(f"{len(outcomes)} of {len(names)}: {outcome.line}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            interrupted = True
        try:
            path = keep(report(config, outcomes, interrupted), root, config, gpus) if outcomes else None
        except OSError as e:
            cli.fail(PROG, f"cannot write to {config.out} ({e.strerror}): choose another folder with --out")
    where = "CPU cores" if config.pretend else f"{len(gpus)} x {gpus[0]}"
    for sentence in answer(outcomes, where, config.pretend):
        print(sentence)
    for outcome in outcomes:
        print(f"{'PRETEND  ' if config.pretend else ''}{outcome.line}")
    if path:
        print(f"{'PRETEND  ' if config.pretend else ''}report{'' if config.pretend else ' and records'}: {path}")
    if interrupted:
        print("interrupted: the steps above are all that was tried", file=sys.stderr)
        raise SystemExit(130)
    raise SystemExit(int(any(o.word == "fail" for o in outcomes)))
