"""The preflight's checks of the course itself: notebooks, code, data and the packages it was tested with.

Readers take the root of a checkout, so that they can be tried on a damaged copy; checks judge what was read.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from labs.kit import fingerprint
from labs.kit.preflight import Check

NAMES_SHOWN = 3
GIT_LIMIT_S = 5.0
INSTALL = "python -m pip install -c constraints.txt -e '.[course]'"


@dataclass(frozen=True)
class CourseFiles:
    """How the files here differ from those of this version; paths are relative to the course's folder."""

    notebooks: int = 0
    missing: tuple[str, ...] = ()
    """Notebooks that are not there."""
    unreadable: tuple[str, ...] = ()
    """Notebooks that are no notebooks."""
    modified: tuple[str, ...] = ()
    """Notebooks with other cells; other outputs do not count."""
    code: tuple[str, ...] = ()
    """Files of labs/ that were changed or deleted."""
    compared: bool = True
    """False: no git here, so that only the fingerprint can tell."""


def course_files(root: Path) -> CourseFiles:
    """Compare the checkout at `root` with its last commit, or without git with the README's list of notebooks."""
    changed = _changed(root)
    expected = set(re.findall(r"notebooks/\w+\.ipynb", (root / "README.md").read_text("utf-8")))
    expected |= {p for p in _committed(root) if p.endswith(".ipynb")}
    present = sorted(p for p in expected if (root / p).is_file())
    unreadable = tuple(p for p in present if _cells(root / p) is None)
    return CourseFiles(
        notebooks=len(expected),
        missing=tuple(sorted(expected - set(present))),
        unreadable=unreadable,
        modified=tuple(p for p in present if p in (changed or ()) and p not in unreadable and _other_cells(root, p)),
        code=tuple(p for p in changed or () if p.startswith("labs/") and p.endswith(".py")),
        compared=changed is not None,
    )


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints; None without git or outside of a checkout. It may not write into the checkout."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, timeout=GIT_LIMIT_S, env=environment, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace")


def _committed(root: Path) -> list[str]:
    """Files in notebooks/ of the last commit; none in a copy without .git, also within somebody else's repository."""
    return (_git(root, "ls-tree", "--name-only", "-z", "HEAD", "notebooks/") or "").split("\0")


def _changed(root: Path) -> list[str] | None:
    """Files of notebooks/ and labs/ that differ from the last commit; None if git cannot say."""
    if not any(_committed(root)):
        return None
    names = _git(root, "diff", "--name-only", "--relative", "-z", "HEAD", "--", "notebooks", "labs")
    return None if names is None else [name for name in names.split("\0") if name]


def _cells(path: Path) -> str | None:
    try:
        return fingerprint.notebook(path)
    except (ValueError, OSError):
        return None


def _other_cells(root: Path, name: str) -> bool:
    """Whether a notebook's cells differ from the committed ones: a run that was saved changes only outputs."""
    committed = _git(root, "show", f"HEAD:./{name}")
    if committed is None:
        return True
    with tempfile.TemporaryDirectory(prefix="labs-") as folder:
        copy = Path(folder) / "committed.ipynb"
        copy.write_text(committed, encoding="utf-8")
        return _cells(copy) != _cells(root / name)


def notebooks(files: CourseFiles) -> Check:
    """All notebooks are there, can be opened, and are those of this version."""
    lost = files.missing + files.unreadable
    if lost:
        what = "missing" if not files.unreadable else "unreadable" if not files.missing else "missing or unreadable"
        remedy = restore(lost) if files.compared else "copy them from the course again (there is no git here)"
        return Check("notebooks", "fail", f"{what}: {some(lost)}", remedy)
    if files.modified:
        detail = f"other cells than in this version: {some(files.modified)}"
        return Check(
            "notebooks", "warn", detail, restore(files.modified) + " (your answers there are lost: copy them first)"
        )
    return Check("notebooks", "pass", f"{files.notebooks}, {_compared(files)}")


def code(files: CourseFiles) -> Check:
    """The code of the labs is that of this version."""
    if files.code:
        return Check("labs", "warn", f"changed: {some(files.code)}", restore(files.code))
    return Check("labs", "pass", f"code {_compared(files)}")


def _compared(files: CourseFiles) -> str:
    return "as committed" if files.compared else "not compared (no git): compare the course's number above"


def restore(names: tuple[str, ...]) -> str:
    """The command that brings files back, as they were in this version."""
    folders = sorted({name.partition("/")[0] for name in names})
    return "run: git checkout -- " + " ".join(names if len(names) <= NAMES_SHOWN else folders)


def some(names: tuple[str, ...]) -> str:
    """The first few names, without folders, and how many more there are."""
    shown = ", ".join(name.rpartition("/")[2] for name in names[:NAMES_SHOWN])
    return shown + (f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else "")


def damaged_data(root: Path) -> tuple[tuple[str, ...], int]:
    """Data files that are missing or differ from SHA256SUMS, and how many there should be."""
    folder = root / "labs" / "common" / "data"
    sums = [line.split() for line in (folder / "SHA256SUMS").read_text("ascii").splitlines()]
    names = {name.removeprefix("./"): digest for digest, name in sums}
    bad = [f"labs/common/data/{name}" for name, digest in names.items() if _sha256(folder / name) != digest]
    return tuple(bad), len(names)


def _sha256(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def data(bad: tuple[str, ...], total: int) -> Check:
    """The real data that all labs train on is intact."""
    if bad:
        return Check(
            "data",
            "fail",
            f"damaged or missing: {some(bad)}",
            "run: git checkout -- labs/common/data (without git: copy it from the course)",
        )
    return Check("data", "pass", f"{total} files intact")


@dataclass(frozen=True)
class Packages:
    """What is installed, and what should be, by package name."""

    tested: dict[str, str]
    """Exact versions of constraints.txt."""
    installed: dict[str, str | None]
    needed: frozenset[str] = frozenset()
    """What the course itself asks for, its tests left out; the rest comes along, and differs between systems."""

    @property
    def different(self) -> dict[str, list[str | None]]:
        """{package: [installed, tested]} where they differ, without torch, whose build has a check of its own."""
        pairs = ((name, self.installed.get(name), tested) for name, tested in self.tested.items() if name != "torch")
        return {n: [have, want] for n, have, want in pairs if have and have.partition("+")[0] != want}

    @property
    def other_torch(self) -> bool:
        """The torch here is not the tested one: its owner's, perhaps, and not to be replaced by the way."""
        have = self.installed.get("torch")
        return have is not None and have.partition("+")[0] != self.tested.get("torch")

    @property
    def missing(self) -> list[str]:
        """Packages without which notebooks fail."""
        return sorted(name for name in self.needed if self.installed.get(name) is None)


def packages(root: Path) -> Packages:
    """Read constraints.txt and pyproject.toml at `root`, and what this Python has of them."""
    lines = (root / "constraints.txt").read_text("utf-8").splitlines()
    tested = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    lines = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["course"]
    needed = frozenset(re.match(r"[\w.-]+", line)[0] for line in lines)
    return Packages(tested, {name: version(name) for name in {*tested, *needed}}, needed)


def version(name: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def outside_of_venv(root: Path) -> bool:
    """Whether `make lab` has made a .venv, and this is another Python."""
    return (root / ".venv" / "bin" / "python").exists() and Path(sys.prefix) != root / ".venv"


def versions(found: Packages, outside: bool = False) -> Check:
    """Nothing is missing, and versions are those of constraints.txt. `outside`: the course's own .venv has them."""
    if found.missing and outside:
        return Check(
            "packages",
            "fail",
            f"not installed in this Python: {some(tuple(found.missing))}",
            "run: .venv/bin/python -m labs.hardware_probe --preflight",
        )
    if found.missing:
        return Check(
            "packages",
            "fail",
            f"not installed in this Python: {some(tuple(found.missing))}",
            f"run: make lab (or, in an environment of your own: {INSTALL})",
        )
    if different := found.different:
        named = tuple(f"{name} {have} (tested {want})" for name, (have, want) in different.items())
        detail = f"{len(different)} of {len(found.tested)} differ from constraints.txt: {some(named)}"
        remedy = f"go on; as tested, torch included: {INSTALL}" if found.other_torch else f"run: {INSTALL}"
        return Check("packages", "warn", detail, remedy)
    return Check("packages", "pass", f"{len(found.tested)} as tested")


def commit_s(root: Path) -> float | None:
    """When the last commit of the checkout at `root` was made, in seconds since 1970 (UTC); None without git."""
    text = _git(root, "log", "-1", "--format=%ct") if any(_committed(root)) else None
    return float(text) if text and text.strip() else None
