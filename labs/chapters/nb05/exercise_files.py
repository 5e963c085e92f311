"""Checker of exercise 05.1: saving under drills. What damaged and foreign files do is in checkpoint_damage.py."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from labs.chapters.nb05.exercise_damage import check_damage
from labs.chapters.nb05.exercise_drills import Call, Drill, Ended, in_child
from labs.chapters.nb05.exercise_order import Saved, files_in, order_faults
from labs.chapters.nb05.exercise_states import a_state, check_same, described, one_thread, same
from labs.kit.check import Mistake

Maker = Callable[..., Any]
CALLS_KILLED = 24
"""A save that makes more calls than this is killed at so many of them, spread evenly."""


def check_checkpoints(cls: Maker) -> None:
    """In order: an ordinary training, the order of calls, kills, a full disk, damaged and foreign files."""
    quiet = contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as made, quiet, one_thread():
        folders = (Path(made).resolve() / f"training-{i}" for i in range(10_000))
        drills = _Drills(cls, folders)
        _check_ordinary(cls, drills.fresh())
        drills.check_order()
        drills.check_kills()
        drills.check_full_disk()
        check_damage(cls, drills.fresh())


def _check_ordinary(cls: Maker, folder: Path) -> None:
    for method in ("save", "load"):
        if not callable(getattr(cls(folder, 2), method, None)):
            raise Mistake(f"your class has no method {method}", "save(self, step, state) and load(self)")
    _check_empty(cls, folder)
    for step in (8, 9, 10):
        cls(folder, 2).save(step, a_state(step))
        loaded = cls(folder, 2).load()
        if step == 10 and same(loaded, (9, a_state(9))):
            raise Mistake('after save(9, ...) and save(10, ...) load() gives step 9: as text, "9" comes after "10"',
                          "compare steps as numbers, or write them with leading zeros")  # fmt: skip
        check_same(loaded, step, f"after save({step}, state)")
    _check_order_in_time(cls, folder)
    _check_keep(cls, folder)


def _check_empty(cls: Maker, folder: Path) -> None:
    hint = "return None where there is no checkpoint yet: a new training starts there"
    try:
        nothing = cls(folder, 2).load()
    except (OSError, LookupError, ValueError, RuntimeError) as error:
        raise Mistake(f"load() from an empty folder raises {described(error)}", hint) from error
    if nothing is not None:
        raise Mistake(f"load() from an empty folder returns {nothing!r:.60}, not None", hint)


def _check_order_in_time(cls: Maker, folder: Path) -> None:
    for path in sorted(folder.rglob("*")):  # step 9's files become the youngest
        os.utime(path, (1e9, 1e9 + (path.name.find("10") < 0)))
    if same(cls(folder, 2).load(), (9, a_state(9))):
        raise Mistake("you take the file with the latest time: whoever copies or touches the files changes that",
                      "the newest checkpoint is the one with the largest step")  # fmt: skip


def _check_keep(cls: Maker, folder: Path) -> None:
    usual = len(files_in(folder)) + 1
    (folder / "notes.md").write_text("lr 0.1 diverges")
    for step in (11, 12, 13):
        before = files_in(folder)
        cls(folder, 2).save(step, a_state(step))
    if not (folder / "notes.md").exists():
        raise Mistake("save() has deleted notes.md, which is not yours", "delete only names that save() makes")
    if len(files_in(folder)) > usual:
        raise Mistake(f"after 3 more saves with keep=2 there are {len(files_in(folder)) - 1} files, before them there "
                      f"were {usual - 1}: old ones stay for ever", "delete all but the newest `keep`")  # fmt: skip
    newest = Saved(folder, [], before, files_in(folder)).written
    (folder / max(newest, key=lambda name: newest[name][1])).unlink()
    loaded = None
    with contextlib.suppress(Exception):
        loaded = cls(folder, 2).load()
    if not same(loaded, (12, a_state(12))):
        raise Mistake("with keep=2, and the newest checkpoint lost, load() does not give the one before",
                      "keep the newest `keep` checkpoints, with all that load() needs of each")  # fmt: skip
    cls(folder, 1).save(14, a_state(14))
    if len(files_in(folder)) >= usual:
        raise Mistake("with keep=1 there are as many checkpoints in the folder as with keep=2",
                      "how many may stay is an argument: use keep")  # fmt: skip


class _Drills:
    """Saves of step 10 over step 9 with keep=1, each in a process of its own."""

    def __init__(self, cls: Maker, folders: Iterator[Path]) -> None:
        self.cls, self.folders = cls, folders
        members = (getattr(f, "__func__", f) for f in vars(cls).values()) if inspect.isclass(cls) else [cls]
        self.using = [inspect.unwrap(f).__globals__ for f in members if inspect.isfunction(f)]
        self.base = self.fresh()
        self.save(self.base, 8)
        self.save(self.base, 9)
        self.sizes: list[int] = []
        self.calls: list[Call] = []
        self.steady = 0

    def fresh(self, like: Path | None = None) -> Path:
        """A new folder, empty or with the files of another."""
        folder = next(self.folders)
        shutil.copytree(like, folder) if like else folder.mkdir()
        return folder

    def save(self, folder: Path, step: int, drill: Drill | None = None, state: dict[str, Any] | None = None) -> Ended:
        state = state or a_state(step)
        return in_child(lambda: self.cls(folder, 1).save(step, state), drill or Drill(), self.using)

    def check_order(self) -> None:
        """Of a state that fits into Python's buffer, where flush() alone gets it out in time, and of a usual one."""
        for state in ({"step": 10}, a_state(10)):
            folder = self.fresh(self.base)
            before = files_in(folder)
            ended = self.save(folder, 10, state=state)
            if ended.error:
                raise Mistake(f"save() raises {ended.error} in a process of its own")
            saved = Saved(folder, ended.calls, before, files_in(folder))
            self.sizes = [size for _, size in saved.written.values()]
            self.calls, self.steady = ended.calls, len(saved.after)
            for what, hint in order_faults(saved):
                raise Mistake(what, hint)

    def check_kills(self) -> None:
        """Whenever it is killed: step 10, or step 9 still; and a later save leaves no more files than usual."""
        step = max(1, len(self.calls) // CALLS_KILLED)
        kills = [(Drill(kill_at_call=i), _words(self.calls[i])) for i in range(0, len(self.calls), step)]
        kills += [(Drill(kill_at_byte=b), f"after {b} bytes of a file") for b in self.bytes()]
        most: tuple[int, Path | None, str] = (0, None, "")
        for drill, when in kills:
            folder = self.fresh(self.base)
            self.save(folder, 10, drill)
            self.check_survived(folder, f"save(10, state) with keep=1 was killed {when}")
            most = max(most, (len(files_in(folder)), folder, when), key=lambda m: m[0])
        if most[1]:
            self.check_cleans_up(most[1], most[2])

    def bytes(self) -> list[int]:
        largest = max(self.sizes, default=1)
        return [0, largest // 3, largest - 1]

    def check_survived(self, folder: Path, when: str) -> None:
        try:
            loaded = self.cls(folder, 1).load()
        except Exception as error:
            raise Mistake(f"{when}: load() then raises {described(error)}", "step 9 has to be there still") from error
        if not same(loaded, (10, a_state(10))) and not same(loaded, (9, a_state(9))):
            gives = "None" if loaded is None else f"{loaded!r:.40}"
            raise Mistake(f"{when}: load() then gives {gives}, neither step 9 nor step 10",
                          "the old one stays until the new one is complete under its name")  # fmt: skip

    def check_cleans_up(self, folder: Path, when: str) -> None:
        left = set(files_in(folder))
        for step in (11, 12):
            self.save(folder, step)
        stale = sorted(left & set(files_in(folder)))
        if stale and len(files_in(folder)) > self.steady:
            raise Mistake(
                f"a save was killed {when}, and {stale[0]} stays in the folder for ever: each kill leaves one more",
                "one fixed name for the unfinished file, or delete stale ones in save()",
            )

    def check_full_disk(self) -> None:
        fulls = [(Drill(full_at_byte=b), f"the disk is full after {b} bytes") for b in self.bytes()]
        for drill, when in [*fulls, (Drill(fsync_fails=True), "the disk is full, as os.fsync finds out")]:
            folder = self.fresh(self.base)
            before, ended = files_in(folder), self.save(folder, 10, drill)
            if not ended.error:
                self.check_saved_all_the_same(folder, drill, ended, when)
                continue
            if new := sorted(set(files_in(folder)) - set(before)):
                raise Mistake(f"{when}: save() raises, and leaves {new[0]} behind, on a disk without room",
                              "remove the unfinished file in `finally`")  # fmt: skip
            self.check_survived(folder, f"{when} in save(10, state) with keep=1")

    def check_saved_all_the_same(self, folder: Path, drill: Drill, ended: Ended, when: str) -> None:
        """Mistake if a save that failed returns; it need not, if it never wrote so much, or never called os.fsync."""
        failed = drill.fsync_fails and any("fsync" in c.what or c.what == "fdatasync" for c in ended.calls)
        if failed or not same(self.cls(folder, 1).load(), (10, a_state(10))):
            raise Mistake(f"{when}, and save() returns as if all were well: nobody learns that nothing is saved",
                          "let the OSError through: `try ... finally`, not `except`")  # fmt: skip


def _words(call: Call) -> str:
    return f"before os.{call.what}({', '.join(Path(p).name for p in call.paths)})"
