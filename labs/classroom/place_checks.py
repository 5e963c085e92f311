"""The preflight's checks of the place: folders that must take files, and the room."""

from __future__ import annotations

import contextlib
import io
import platform
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labs.classroom import jupyter_checks
from labs.kit.preflight import Check, Facts, system

TEMPORARY_BYTES = 2**29  # checkpoints and caches of notebook 05, which has the most: 0.42 GiB


def course_place(root: Path, where: str = "") -> Check:
    """The course is on a file system of its own operating system."""
    if (where or system()) == "WSL" and re.match(r"/mnt/[a-z]/", f"{root}/"):
        return Check(
            "course folder",
            "warn",
            "on a Windows disk: reading it from WSL is many times slower",
            "copy it into WSL's own home: cp -r . ~/course && cd ~/course && make lab",
        )
    return Check("course folder", "pass", "on a disk of this system")


def folder_problems(root: Path) -> dict[str, str]:
    """Each folder that must take files, and why it does not, or ""."""
    takes = jupyter_checks.folder_problem
    return {
        "my": takes(root / "my"),
        "build": takes(root / "build"),
        "runtime": takes(jupyter_checks.runtime_folder()),
        "temporary": takes(Path(tempfile.gettempdir()), TEMPORARY_BYTES),
    }


def folders(problems: Mapping[str, str]) -> list[Check]:
    """A check of each folder that must take files, from {its name here: why it does not, or ""}."""
    remedies = {
        "my": ("fail", "run: chmod -R u+w . (or clone the course into your own home: your notebooks are in its my/)"),
        "build": ("warn", "run: chmod -R u+w build (make course and this report write there)"),
        "runtime": ("fail", jupyter_checks.OTHER_RUNTIME),
        "temporary": ("fail", "run: export TMPDIR=/var/tmp (or another folder with 1 GiB free)"),
    }
    found = []
    for name, problem in problems.items():
        status, remedy = remedies[name]
        ok = Check(f"{name} folder", "pass", "takes files")
        found.append(Check(f"{name} folder", status, f"takes no files: {problem}", remedy) if problem else ok)
    return found


def room(asked: bool, problem: str) -> list[Check]:
    """The room's folder takes files; nothing without a room. The course itself goes on without it."""
    if not asked:
        return []
    if problem:
        return [
            Check(
                "room",
                "warn",
                f"COURSE_ROOM: {problem}",
                "mount the share, or ask your instructor to run: chmod 1777 THE_ROOM_FOLDER",
            )
        ]
    return [Check("room", "pass", "your folder in it takes files")]


def room_folder(environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """The learner's folder in the room, if there is one, and why it takes no files. The room says nothing itself."""
    if not environ.get("COURSE_ROOM", "").strip():
        return None, ""
    from labs.kit.room import own_folder

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        folder = own_folder()
    if folder is None:
        return None, said.getvalue().strip().removeprefix("COURSE_ROOM: ") or "the room does not answer"
    return folder, jupyter_checks.folder_problem(folder)


def machine(facts: Facts) -> dict[str, Any]:
    """The inventory that an instructor sees: plain JSON, no names of people, hosts or folders."""
    from labs.kit.hardware import cpu_name

    c = facts.container
    return {
        "cpu": cpu_name(),
        "cores": c.cores,
        "memory_bytes": _total_memory(c.memory_limit_bytes),
        "memory_available_bytes": c.memory_available_bytes,
        "shm_bytes": c.shm_bytes,
        "disk_free_bytes": c.disk_free_bytes,
        "gpus": [{"name": g.name, "memory_bytes": g.memory_total_bytes} for g in facts.report.gpus],
        "gpus_for_torch": facts.gpus_for_torch,
        "driver": facts.report.driver,
        "platform": f"{system()} {platform.release()} {platform.machine()}",
    }


def _total_memory(limit: int | None) -> int:
    import psutil

    total = psutil.virtual_memory().total
    return total if limit is None else min(total, limit)
