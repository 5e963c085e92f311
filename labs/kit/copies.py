"""The learner's copies of the notebooks, in my/: made once, without outputs, never overwritten.

    python -m labs.kit.copies           # make missing copies, and list those older than the course
    python -m labs.kit.copies 03        # put the current version of notebook 03 beside your copy

Without outputs, nobody sees an answer before predicting. git ignores my/, so `git pull` never touches a learner's work.
A copy's metadata says which notebook it came from and hashes that notebook's cells. A copy without work (no cell
changed or run) is replaced when the course has a new version. Any other copy stays as it is, and a line in the terminal
gives the command that puts the new version next to it. Exit code: 0, or 2 if my/ or the notebook's name can't be used.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Literal

from labs.kit import fingerprint
from labs.kit.errors import BadInput, require
from labs.kit.record import write_atomic

ROOT = fingerprint.ROOT
FOLDER = "my"
STAMP = "course_copy"  # key in a copy's metadata: {"of": name, "cells": hash of the original's cells, "made": date}


@dataclass(frozen=True)
class Copy:
    """A notebook in my/."""

    path: Path
    cells: str = ""
    """Hash of its present cells; empty if the file isn't a notebook."""
    of: str = ""
    """Name of the notebook it was made from; the copy's own name if it doesn't say."""
    made_of: str = ""
    """Hash of the original's cells at that time; empty if it doesn't say."""
    made: str = ""
    """Date of the copy, such as 2026-11-22."""
    was_run: bool = False
    """Whether any cell has an output or an execution count."""

    @property
    def holds_work(self) -> bool:
        """Whether anyone has changed or run it, as far as its metadata shows."""
        return self.was_run or not self.made_of or self.cells != self.made_of

    def is_of(self, version: str) -> bool:
        """Return whether it was made from these cells, or has them now."""
        return version in (self.cells, self.made_of)


@dataclass(frozen=True)
class Found:
    """The state of one notebook's copy after `update`."""

    state: Literal["made", "current", "renewed", "old", "beside"]
    """beside: the new version is beside the old copy."""
    name: str
    """The original's name, without .ipynb."""
    path: Path
    """The copy."""
    old: Copy | None = None
    """The learner's older copy."""


def update(names: Iterable[str] = (), root: Path = ROOT, *, beside: bool = False) -> list[Found]:
    """Make missing copies in `root`/my, replace those without work, and list the old ones.

    `names` are notebooks such as "03_dataparallel_vs_ddp" (default: all). With `beside`, puts the current version
    beside each old copy. Raises BadInput, in one line, if my/ can't be used.
    """
    originals, my = notebooks(root), root / FOLDER
    chosen = {name: originals[name] for name in names} or originals
    try:
        my.mkdir(exist_ok=True)
        copies = [read(path) for path in sorted(my.glob("*.ipynb"))]
        return [_update(path, my, [c for c in copies if c.of == name], beside) for name, path in chosen.items()]
    except OSError as e:
        instead = command("labs.start", "notebooks/00_gpu_checks.ipynb")
        raise BadInput(
            f"cannot write in {my} ({e.strerror}): clone the course, or mount a folder, where you may write and where "
            f"there is space, or open the originals: {instead}"
        ) from None


def _update(original: Path, my: Path, copies: list[Copy], beside: bool) -> Found:
    name, target = original.stem, my / original.name
    try:
        version = fingerprint.notebook(original)
    except ValueError as e:
        raise BadInput(f"{e}: git checkout -- notebooks/{original.name}") from None
    mine = next((c for c in copies if c.path == target), None)
    if mine is None:  # never made, or renamed or deleted to start again
        return Found("made" if _place(target, without_outputs(original)) else "current", name, target)
    if current := next((c for c in copies if c.is_of(version)), None):
        return Found("current", name, current.path)
    if not mine.holds_work:
        write_atomic(target, without_outputs(original))
        return Found("renewed", name, target, mine)
    if not beside:
        return Found("old", name, target, mine)
    dated, subject = f"{number(name)}_new_{date.today()}", name.partition("_")[2]
    free = (my / f"{dated}_{f'{nth}_' if nth > 1 else ''}{subject}.ipynb" for nth in itertools.count(1))
    return Found("beside", name, next(path for path in free if _place(path, without_outputs(original))), mine)


def notebooks(root: Path = ROOT) -> dict[str, Path]:
    """Return {name without .ipynb: path} of the notebooks. Raises BadInput if there are none."""
    found = {path.stem: path for path in sorted((root / "notebooks").glob("*.ipynb"))}
    require(bool(found), f"there are no notebooks in {root / 'notebooks'}: run this in a checkout of the course")
    return found


def choose(name: str, root: Path = ROOT) -> str:
    """Return the notebook meant by "03", "3", its name or a copy's path. BadInput lists the names."""
    known, wanted = notebooks(root), Path(name).name.removesuffix(".ipynb").casefold()
    meant = [n for n in known if wanted in (n.casefold(), number(n).casefold(), number(n).lstrip("0") or "0")]
    require(len(meant) == 1, f"there is no notebook {name!r}; there are {', '.join(known)}")
    return meant[0]


def number(name: str) -> str:
    """Return the "03" of "03_dataparallel_vs_ddp"."""
    return name.partition("_")[0]


def without_outputs(original: Path) -> str:
    """Return the text of a copy: the notebook's cells without outputs, stamped with their source."""
    notebook = json.loads(original.read_text("utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    kept = {k: v for k, v in notebook.get("metadata", {}).items() if k in ("kernelspec", "language_info")}
    stamp = {"of": original.stem, "cells": fingerprint.notebook(original), "made": f"{date.today()}"}
    notebook["metadata"] = {STAMP: stamp, **kept}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def read(path: Path) -> Copy:
    """Read a file in my/. A file that isn't a notebook becomes a Copy without cells."""
    try:
        cells = fingerprint.notebook(path)
        notebook = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError):
        return Copy(path, of=path.stem)
    stamp = notebook.get("metadata", {}).get(STAMP, {})
    was_run = any(cell.get("outputs") or cell.get("execution_count") for cell in notebook["cells"])
    return Copy(path, cells, stamp.get("of", path.stem), stamp.get("cells", ""), stamp.get("made", ""), was_run)


def _place(target: Path, text: str) -> bool:
    """Write a complete new file. If one of that name already exists, write nothing and return False."""
    temporary = write_atomic(target.with_name(f".{secrets.token_hex(4)}.tmp"), text)
    try:
        os.link(temporary, target)  # unlike a rename, never replaces: two processes may start at the same time
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links, such as FAT
        if os.path.lexists(target):
            return False
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _why_old(old: Copy) -> str:
    name = f"{FOLDER}/{old.path.name}"
    if not old.cells:
        return f"{name} cannot be read as a notebook."
    return f"{name}{f', made on {old.made},' if old.made else ''} is a copy of an older version."


def command(module: str, argument: str) -> str:
    """Return a module's command line. Names .venv's Python, because it is seldom activated."""
    venv = Path(sys.prefix).resolve()
    python = f"{venv.relative_to(ROOT).as_posix()}/bin/python" if venv.is_relative_to(ROOT) else "python"
    return f"{python} -m {module} {argument}"


def lines(found: list[Found]) -> list[str]:
    """Return what a learner should know, one line per event; an empty list if nothing changed."""
    made = [f for f in found if f.state == "made"]
    what = f"{FOLDER}/{made[0].path.name}" if len(made) == 1 else f"{len(made)} notebooks in {FOLDER}/"
    all_made = f"{what}: your own, without outputs, made once. notebooks/ holds the originals, with outputs."
    return [all_made] * bool(made) + [_line(one, one.old) for one in found if one.old]


def _line(found: Found, old: Copy) -> str:
    name = f"{FOLDER}/{found.path.name}"
    if found.state == "renewed":
        return f"{name} has been replaced by the new version, because you hadn't changed or run anything in it."
    if found.state == "beside":
        return f"{name} is the new version. {FOLDER}/{old.path.name} stays as it was."
    beside = command("labs.kit.copies", number(found.name))
    return f"{_why_old(old)} It stays as it is; to put the new version beside it: {beside}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m labs.kit.copies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebooks", nargs="*", help="such as 03: put its present version beside an older copy")
    options = parser.parse_args()
    try:
        names = [choose(name) for name in options.notebooks]
        found = update(names, beside=bool(names))
    except BadInput as e:
        print(f"{parser.prog}: {e}", file=sys.stderr)
        return 2
    said = lines(found)
    said += [f"{FOLDER}/{f.path.name} is up to date." for f in found if names and f.state == "current"]
    print("\n".join(said or [f"All copies in {FOLDER}/ are up to date."]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
