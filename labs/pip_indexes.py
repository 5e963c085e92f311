"""Which torch does pip install when there are two indexes, and when no version is named?

    python -m labs.pip_indexes                              # twelve lines, from an image of 2022 to another system
    python -m labs.pip_indexes --cases now pinned           # some of them

About 5 s on 2 CPU cores. Nothing is installed or downloaded. In a temporary folder stand small package indexes, whose
wheels have torch's names and nothing in them. pip itself, in a dry run, says what it would take from them; beside it
stands what a rule of five lines says. Then: which CUDA packages the installed torch asks for, which OpenMP runtimes it
loads, and what a second copy of one does. The ranks share the work.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.version import Version

from labs.kit import cli
from labs.kit.errors import did_you_mean, require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.parts.installing import runtimes
from labs.parts.installing.indexes import INDEXES, LINUX, MACOS, PLATFORMS, Wheel, origin, tag, write_index

PATIENCE_S = 60.0  # for one answer, which takes half a second
NOTHING_FITS = "No matching distribution found"  # pip's own words
NO_PIP = "This environment has no pip, and its Python brings none: python -m ensurepip, then once more."


@dataclass(frozen=True)
class Case:
    """A line that installs torch, and the machine that it is typed on."""

    index: str
    """Of INDEXES: what --index-url names. The main ones stand for the index that pip uses by default."""
    extra: str = ""
    """What --extra-index-url names."""
    requirement: str = "torch"
    constraint: str = ""
    """The line of a file for -c."""
    python: str = "3.8"
    """Version of the Python that torch is for; an image of Ubuntu 20.04 has 3.8."""
    system: str = LINUX
    """Of PLATFORMS."""

    @property
    def line(self) -> str:
        """As one would type it, with names of INDEXES for addresses; a main index is the default and not named."""
        own = "" if self.index.startswith("main") else f" --index-url {self.index}"
        extra = f" --extra-index-url {self.extra}" if self.extra else ""
        return f"{self.requirement}{own}{extra}" + f" -c FILE ({self.constraint})" * bool(self.constraint)

    @property
    def indexes(self) -> tuple[str, ...]:
        """Where pip may look."""
        return tuple(filter(None, (self.index, self.extra)))


CASES = {
    "then": Case("main-1.13", "cu116"),
    "now": Case("main-2.9", "cu116"),
    "swapped": Case("cu116", "main-2.9"),
    "pinned": Case("main-2.9", "cu116", "torch==1.13.1+cu116"),
    "one_index": Case("cu116"),
    "first_build": Case("main-2.9", python="3.11"),
    "second_build": Case("main-2.10", python="3.11"),
    "constrained": Case("main-2.10", constraint="torch==2.9.1", python="3.11"),
    "other_cuda": Case("cu126", python="3.11"),
    "other_system": Case("main-2.10", python="3.11", system=MACOS),
    "other_python": Case("main-2.10"),
    "no_wheel": Case("main-2.10", python="3.7"),
}
"""What is asked. `then` and `now` are the line of an article, before and after the main index went past 1.13.1."""

SMOKE = {"cases": ("now", "pinned")}


@dataclass(frozen=True)
class Config:
    """Which lines."""

    cases: tuple[str, ...] = tuple(CASES)
    """Of CASES."""
    smoke: bool = False
    """In a shell: two lines."""

    def __post_init__(self) -> None:
        require(len(self.cases) > 0, f"cases must hold some of {', '.join(CASES)}")
        require(len(set(self.cases)) == len(self.cases), "cases must name each once")
        for name in self.cases:
            hint = did_you_mean(name, CASES)
            require(name in CASES, f"cases: there is no {name!r}: {hint}there are {', '.join(CASES)}")


@dataclass(frozen=True)
class Choice:
    """What pip would install; "" three times where nothing fits. `failed`: why it gave no answer."""

    version: str = ""
    index: str = ""
    file: str = ""
    failed: str = ""


def newest_that_fits(case: Case, indexes: dict[str, tuple[Wheel, ...]] = INDEXES) -> Wheel | None:
    """The rule: look into all indexes alike, leave out what does not fit, take the highest version.

    Source: pip's documentation of `pip install`, "Finding Packages".
    """
    wheels = [wheel for name in case.indexes for wheel in indexes[name]]
    asked = [Requirement(line).specifier for line in (case.requirement, case.constraint) if line]
    fitting = [w for w in wheels if w.fits(case.python, case.system) and all(w.version in s for s in asked)]
    return max(fitting, key=lambda w: Version(w.version), default=None)


def predict(config: Config) -> dict[str, str]:
    """{case: version by the rule, "" if nothing fits}."""
    found = {name: newest_that_fits(CASES[name]) for name in config.cases}
    return {name: wheel.version if wheel else "" for name, wheel in found.items()}


def ask_pip(case: Case, urls: dict[str, str], pip: list[str], folder: Path, timeout_s: float = PATIENCE_S) -> Choice:
    """What pip would install, by its report of a dry run. `pip` is the command, `urls` those of the indexes.

    Neither the network nor anybody's settings take part: all addresses are of this disk, --isolated leaves out the
    user's variables and file, PIP_CONFIG_FILE the machine's file. `folder` is for the report and pip's own files.
    """
    command = [*pip, "install", case.requirement, "--index-url", urls[case.index], "--dry-run", "--ignore-installed"]
    command += ["--extra-index-url", urls[case.extra]] if case.extra else []
    if case.constraint:
        (folder / "constraints.txt").write_text(case.constraint)
        command += ["-c", str(folder / "constraints.txt")]
    for platform in PLATFORMS[case.system]:
        command += ["--platform", platform]
    command += ["--python-version", case.python, "--implementation", "cp", "--abi", tag(case.python)]
    command += ["--target", str(folder / "target"), "--only-binary", ":all:", "--no-deps", "--no-cache-dir"]
    command += ["--isolated", "--no-input", "--disable-pip-version-check", "--quiet"]
    command += ["--report", str(folder / "report.json")]
    settings = {"PIP_CONFIG_FILE": os.devnull, "TMPDIR": str(folder), "PYTHONWARNINGS": "ignore"}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | settings,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return Choice(failed=f"no answer after {timeout_s:g} s")
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return Choice() if NOTHING_FITS in done.stderr else Choice(failed=said[-1])
    (taken,) = json.loads((folder / "report.json").read_text("utf-8"))["install"]
    return Choice(taken["metadata"]["version"], *origin(taken["download_info"]["url"]))


def pip_command() -> tuple[list[str], str]:
    """How to start pip, and its version. Where it is not installed, the wheel that Python keeps for `ensurepip`.

    ([], "") where there is neither. pip itself is not looked for by importing: setuptools would take that for a build.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return [sys.executable, "-m", "pip"], importlib.metadata.version("pip")
    kept = importlib.util.find_spec("ensurepip")
    wheels = Path(kept.origin).parent.glob("_bundled/pip-*.whl") if kept and kept.origin else ()
    for wheel in wheels:
        return [sys.executable, str(wheel / "pip")], wheel.name.split("-")[1]
    return [], ""


def choose(case: Case) -> Choice:
    """What pip takes for a line of yours. RuntimeError if there is no pip, or it gives no answer."""
    with tempfile.TemporaryDirectory(prefix="pip ") as folder:
        ((_, choice),) = _asked([("yours", case)], Path(folder))
    if choice.failed:
        raise RuntimeError(choice.failed)
    return choice


def _asked(cases: Iterable[tuple[str, Case]], folder: Path) -> Iterator[tuple[str, Choice]]:
    """Make the indexes in `folder`, and ask for each case."""
    pip, _ = pip_command()
    urls = {name: write_index(folder / "indexes" / name, wheels) for name, wheels in INDEXES.items()}
    for name, case in cases:
        own = folder / name
        own.mkdir()
        yield name, ask_pip(case, urls, pip, own) if pip else Choice(failed=NO_PIP)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Each rank asks for its share of the lines; rank 0 records, and looks at the installed torch."""
    mine = [(name, CASES[name]) for name in config.cases[rank.rank :: rank.world_size]]
    # The launcher's folder, which goes even if this rank is killed. Under torchrun there is none: the system's.
    run_folder = multiprocessing.current_process()._config.get("tempdir")
    found = {}
    with tempfile.TemporaryDirectory(prefix="pip ", dir=run_folder) as folder:  # a space, as in many a home
        for done, (name, choice) in enumerate(_asked(mine, Path(folder)), start=1):
            found[name] = choice
            rank.progress(done, len(mine) + 1, name)
        together = {name: choice for share in rank.gather(found) for name, choice in share.items()}
        if rank.rank == 0:
            yield from choices(config, rank, together)
            yield from installed(rank, Path(folder))
    rank.barrier()


def choices(config: Config, rank: Rank, found: dict[str, Choice]) -> Iterator[Record]:
    """Of each line: wheels that pip would install (1, or 0 where nothing fits), which, and the version by the rule."""
    yield rank.record("pip_found", "1", float(bool(pip_command()[0])), version=pip_command()[1])
    by_rule = predict(config)
    for name in config.cases:
        case, choice = CASES[name], found[name]
        asked = {"asked": name, "line": case.line, "python": case.python, "system": case.system}
        if choice.failed:
            yield rank.record("no_answer", "1", 1.0, why=choice.failed, **asked)
        else:
            took = {"version": choice.version, "index": choice.index, "file": choice.file}
            yield rank.record("wheels", "1", float(bool(choice.file)), **asked, **took)
        yield rank.record(
            "wheels_by_rule", "1", float(bool(by_rule[name])), kind="modelled", asked=name, version=by_rule[name]
        )


def installed(rank: Rank, folder: Path) -> Iterator[Record]:
    """Of the torch that runs here: CUDA packages it asks for, OpenMP runtimes it loads, and who installed what."""
    needs = runtimes.cuda_packages()
    if needs is not None:
        yield rank.record("cuda_packages", "1", float(len(needs)), torch=torch.__version__, names=needs)
    for installer, packages in sorted(runtimes.installers().items()):
        yield rank.record("packages", "1", float(packages), installer=installer)
    loaded = runtimes.openmp_runtimes()
    if loaded is None:  # no Linux
        return
    yield rank.record("openmp_runtimes", "1", float(len(loaded)), files=[Path(f).name for f in loaded])
    pairs = runtimes.with_a_copy(loaded[0], folder) if loaded else ()
    for copies, pair in enumerate(pairs, start=1):
        if pair is not None:
            case = {"copies": copies, "runtimes": pair.runtimes, "ended": not pair.threads}
            yield rank.record("openmp_threads", "threads", pair.threads or (0.0,), **case)


def answer(run: Records) -> Iterator[str]:
    """What pip took and whether the rule says the same, what torch brings, and what a second copy does, in words."""
    took = {r.case["asked"]: r.case["version"] or "nothing" for r in run.where("wheels")}
    rule = {r.case["asked"]: r.case["version"] or "nothing" for r in run.where("wheels_by_rule")}
    failed = sorted({r.case["why"] for r in run.where("no_answer")})
    if failed:
        yield f"No answer to {len(run.where('no_answer'))} of {len(rule)} lines: {failed[0]}"
    if took:
        right = sum(took[name] == rule[name] for name in took)
        yield (
            f"pip {run.one('pip_found').case['version']} took what the rule names, the newest version of all "
            f"indexes that fits, in {right} of {len(took)} cases."
        )
        told = ", ".join(f"{name.replace('_', ' ')} {version}" for name, version in took.items())
        yield f"Taken: {told}."
    yield from of_the_installed(run)


def of_the_installed(run: Records) -> Iterator[str]:
    """What the torch of this environment brings and loads, in words."""
    for r in run.where("cuda_packages"):
        yield f"torch {r.case['torch']} asks for {r.value:.0f} CUDA packages on this system."
    for r in run.where("openmp_runtimes"):
        yield f"OpenMP runtimes in a process with torch: {r.value:.0f}{_named(r.case['files'])}."
    for r in run.where("openmp_threads", copies=2):
        told, other = r.samples if not r.case["ended"] else (0.0, 0.0)
        both = f"if one is told to use {told:.0f} threads, the other uses {other:.0f}"
        said = "the process ends" if r.case["ended"] else both
        yield f"With a second copy of it {r.case['runtimes']} are counted, and {said}."


def _named(files: list[str]) -> str:
    return f" ({', '.join(files)})" if files else ""


if __name__ == "__main__":
    cli.main()
