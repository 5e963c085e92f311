"""The learner's copies of the notebooks, in my/: made once, without outputs, never overwritten.

    python -m labs.kit.copies           # make missing copies, and list those older than the course
    python -m labs.kit.copies 03        # put the current version of notebook 03 beside your copy

Without outputs, nobody sees an answer before predicting. git ignores my/, so `git pull` never touches a learner's work.
A copy's metadata says which notebook it came from and hashes that notebook's cells. A copy without work (no cell
changed or run) is replaced when the course has a new version. Any other copy stays as it is; a page beside it in my/
and a line in the terminal give the command that puts the new version next to it. Exit code: 0, or 2 if my/ or the
notebook's name can't be used.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import os
import secrets
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

from labs.kit import fingerprint
from labs.kit.errors import BadInput, require
from labs.kit.record import write_atomic

ROOT = fingerprint.ROOT
FOLDER = "my"
STAMP = "course_copy"  # key in a copy's metadata: {"of": name, "cells": hash of the original's cells, "made": date}
NOTICE = "_is_old.md"  # after the number, because JupyterLab's file list shows the first 14 characters of a name


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

    state: Literal["made", "current", "renewed", "old", "beside", "unreadable", "gone"]
    """beside: the new version is beside the old copy. unreadable: the original is no notebook. gone: there is none."""
    name: str
    """The original's name, without .ipynb."""
    path: Path
    """The copy; the original if that is unreadable."""
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
        found = [_update(path, my, [c for c in copies if c.of == name], beside) for name, path in chosen.items()]
        for one in found:
            _note(one, my)
    except OSError as e:
        raise BadInput(_cannot_write(my, e)) from None
    gone = [c for c in copies if c.made_of and c.of not in originals]
    return found + [Found("gone", c.of, c.path, c) for c in gone if chosen == originals]


def _update(original: Path, my: Path, copies: list[Copy], beside: bool) -> Found:
    name, target = original.stem, my / original.name
    try:
        version = fingerprint.notebook(original)
    except (ValueError, OSError):
        return Found("unreadable", name, original)
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
    stamp = _strings(notebook.get("metadata"), STAMP)
    was_run = any(cell.get("outputs") or cell.get("execution_count") for cell in notebook["cells"])
    return Copy(path, cells, stamp.get("of", path.stem), stamp.get("cells", ""), stamp.get("made", ""), was_run)


def _strings(metadata: Any, key: str) -> dict[str, str]:
    """Return the strings in metadata[key]; {} if its form is wrong, since people edit metadata."""
    inner = metadata.get(key) if isinstance(metadata, dict) else None
    return {k: v for k, v in inner.items() if isinstance(v, str)} if isinstance(inner, dict) else {}


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


def _note(found: Found, my: Path) -> None:
    """Write the page that marks a copy as old in the file list, or remove it."""
    page = my / f"{number(found.name)}{NOTICE}"
    if found.old and found.state == "old":
        text = notice(found.old)
        if not page.is_file() or page.read_text("utf-8") != text:
            write_atomic(page, text)
    elif found.state != "unreadable":
        page.unlink(missing_ok=True)


def notice(old: Copy) -> str:
    """Return the page beside an old copy, in Markdown."""
    short = number(old.of)
    return f"""# Notebook {short} has a new version

{_why_old(old)} Your copy stays as it is. But its cells now call the course's new code, so
old cells may fail.

To put the new version beside your copy, run this in a cell of any notebook of the course:

    %run -m labs.kit.copies {short}

or this in a terminal, in the folder of the course:

    {command("labs.kit.copies", short)}

This page then leaves the list of files.
"""


def _why_old(old: Copy) -> str:
    name = f"{FOLDER}/{old.path.name}"
    if not old.cells:
        return f"{name} cannot be read as a notebook."
    if not old.made_of:
        return f"{name} differs from the course's notebook and doesn't say which version it was copied from."
    return f"{name}{f', made on {old.made},' if old.made else ''} is a copy of an older version."


def command(module: str, argument: str) -> str:
    """Return a module's command line. Names .venv's Python, because it is seldom activated."""
    venv = Path(sys.prefix).resolve()
    python = f"{venv.relative_to(ROOT).as_posix()}/bin/python" if venv.is_relative_to(ROOT) else "python"
    return f"{python} -m {module} {argument}"


def lines(found: list[Found]) -> list[str]:
    """Return what a learner should know, one line per event; an empty list if nothing changed."""
    said, made = [], [f for f in found if f.state == "made"]
    if made:
        what = f"{FOLDER}/{made[0].path.name}" if len(made) == 1 else f"{len(made)} notebooks in {FOLDER}/"
        said.append(f"{what}: your own, without outputs, made once. notebooks/ holds the originals, with outputs.")
    for one in found:
        mine = f"{FOLDER}/{one.path.name}"
        if one.state == "renewed":
            said.append(
                f"{mine} has been replaced by the new version, because you hadn't changed or run anything in it."
            )
        elif one.state == "old" and one.old:
            beside = command("labs.kit.copies", number(one.name))
            said.append(f"{_why_old(one.old)} It stays as it is; to put the new version beside it: {beside}")
        elif one.state == "beside" and one.old:
            said.append(f"{mine} is the new version. {FOLDER}/{one.old.path.name} stays as it was.")
        elif one.state == "unreadable":
            said.append(f"notebooks/{one.path.name} is not a notebook: git checkout -- notebooks/{one.path.name}")
        elif one.state == "gone":
            said.append(f"{mine} stays, but the course no longer has a notebook {one.name}.")
    return said


def _cannot_write(my: Path, e: OSError) -> str:
    if os.path.lexists(my) and not my.is_dir():
        return f"{my} is not a folder, but your copies of the notebooks need a folder of that name: rename the file"
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"cannot write in {my} ({e.strerror}): free some space; nothing is half written"
    owner = my.stat().st_uid if my.is_dir() and hasattr(os, "getuid") else None
    whose = f"; it belongs to user {owner}, you are user {os.getuid()}" if owner not in (None, os.getuid()) else ""
    originals = command("labs.start", "notebooks/00_gpu_checks.ipynb")
    return (
        f"cannot write in {my} ({e.strerror or e}{whose}): clone the course, or mount a folder, where you may "
        f"write, or open the originals: {originals}"
    )


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
