"""Checker of exercise 05.1, second part: damaged, foreign and malicious files in the folder."""

from __future__ import annotations

import contextlib
import io
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from labs.chapters.nb05.exercise_drills import in_child
from labs.chapters.nb05.exercise_order import Saved, files_in
from labs.chapters.nb05.exercise_states import a_state, described, difference, same
from labs.kit.check import Mistake

Maker = Callable[..., Any]
Damage = tuple[str, bytes]
"""What was done to a file, and the bytes that are left of it."""
FLIPS = 24
ran: list[str] = []
"""Notes of code that a file has run."""


def check_damage(cls: Maker, folder: Path) -> None:
    """Steps 8, 9 and 10 with keep=3, then step 10's file is damaged in some forty ways, one after the other."""
    for step in (8, 9):
        cls(folder, 3).save(step, a_state(step))
    before = files_in(folder)
    cls(folder, 3).save(10, a_state(10))
    sizes = Saved(folder, [], before, files_in(folder)).written
    name = max(sizes, key=lambda n: sizes[n][1])
    kept = shutil.copytree(folder, folder.with_name("kept"))
    for what, data in _damages((folder / name).read_bytes()):
        _as_kept(folder, kept)
        (folder / name).write_bytes(data)
        _judge(cls, folder, f"step 10's file {what}")
    _as_kept(folder, kept)
    _check_foreign_names(cls, folder, name)
    _as_kept(folder, kept)
    _check_all_damaged(cls, folder)
    _as_kept(folder, kept)
    _check_malicious(cls, folder)


def _as_kept(folder: Path, kept: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(kept, folder)


def _damages(data: bytes) -> Iterator[Damage]:
    n, draw = len(data), random.Random(0)
    yield from ((f"is cut to {size} of {n} bytes", data[:size]) for size in (n - 1, n // 2, 20, 0))
    yield f"has its {n} bytes, all of them zero, as a power cut can leave it", bytes(n)
    yield "is one that another program has written, with torch.save({'epoch': 3})", _foreign()
    yield "holds text", b"step 10\n"
    for place in (*(round((i + 0.5) * n / FLIPS) for i in range(FLIPS)), *(draw.randrange(n) for _ in range(8))):
        flipped = bytearray(data)
        flipped[place] ^= 1 << draw.randrange(8)
        yield f"has one bit flipped, in byte {place} of {n}", bytes(flipped)


def _foreign() -> bytes:
    file = io.BytesIO()
    torch.save({"epoch": 3}, file)
    return file.getvalue()


ONE_BEFORE = "step 9's file is whole, and load() has to give that"


def _judge(cls: Maker, folder: Path, when: str) -> None:
    try:
        loaded = cls(folder, 3).load()
    except Exception as error:
        raise Mistake(f"{when}: load() raises {described(error)}", ONE_BEFORE) from error
    if same(loaded, (9, a_state(9))) or same(loaded, (10, a_state(10))):
        return
    if loaded is None:
        raise Mistake(f"{when}: load() gives None, and the training would begin anew", ONE_BEFORE)
    if same(loaded, (8, a_state(8))):
        raise Mistake(f"{when}: load() goes back to step 8", ONE_BEFORE)
    what = ""
    if isinstance(loaded, (tuple, list)) and len(loaded) == 2 and isinstance(loaded[1], dict):
        what = f", with another {difference(loaded[1], a_state(10))}"
    raise Mistake(f"{when}: load() gives it as if it were good{what}",
                  "keep a checksum of the bytes with them (hashlib.sha256), and compare it before you load; torch.load "
                  "checks none")  # fmt: skip


def _check_foreign_names(cls: Maker, folder: Path, name: str) -> None:
    """Files that others leave: notes, a copy of the best, what an editor keeps."""
    path = folder / name
    for other in ("notes.md", re.sub(r"\d+", "best", name), f"{name}.bak", f"copy of {Path(name).name}"):
        if other != name and not (folder / other).exists():
            (folder / other).parent.mkdir(parents=True, exist_ok=True)
            (folder / other).write_bytes(_foreign())
            beside, hint = (
                f"a file {other} lies beside {path.name}",
                "look only at names that save() makes: re.fullmatch",
            )
            try:
                loaded = cls(folder, 3).load()
            except Exception as error:
                raise Mistake(f"{beside}: load() raises {described(error)}", hint) from error
            if not same(loaded, (10, a_state(10))):
                raise Mistake(f"{beside}, and load() no longer gives step 10", hint)


def _check_all_damaged(cls: Maker, folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    try:
        loaded = cls(folder, 3).load()
    except Exception:
        return
    if loaded is None:
        raise Mistake("all three checkpoints are damaged, and load() gives None, as if there had never been one: the "
                      "training begins anew, and overwrites what could be repaired",
                      "raise RuntimeError; None means that there are no checkpoints")  # fmt: skip
    raise Mistake("all three checkpoints are cut in half, and load() gives one of them", "check before you load")


class _Malicious:
    """Unpickled by a loader that allows all, it runs a function. This one only leaves a note."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return _leave_a_note, ("pickle",)


def _leave_a_note(by: str) -> None:
    frames, frame = [], sys._getframe()
    while frame is not None:
        frames.append(frame.f_code.co_filename)
        frame = frame.f_back
    ran.append("torch.load" if any(name.endswith("torch/serialization.py") for name in frames) else by)


def _check_malicious(cls: Maker, folder: Path) -> None:
    state = a_state(11) | {"extra": _Malicious()}
    ran.clear()
    in_child(lambda: cls(folder, 3).save(11, state))
    with contextlib.suppress(Exception):  # to refuse is as good as to go back to step 10
        cls(folder, 3).load()
    if ran:
        raise Mistake(
            f"someone made a file that runs code on the machine that loads it, and {ran[0]} in load() ran it",
            "torch.load(file, weights_only=True): tensors, numbers, text, dicts and lists, nothing else",
        )
