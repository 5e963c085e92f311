"""No process outlives the one that started it. Standard library only: called before torch is imported."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from labs.kit import guardian

ANNOUNCE = "LABS_ANNOUNCE"  # folder of labs.kit.guardian in which ranks that a lab has started announce themselves
_IMPORTED_BY = os.getpid()


def hold(name: str) -> None:
    """Be killed when the parent dies (Linux), and be found by the guardian as rank `name`, if there is one.

    A parent that dies meanwhile is noticed, too. It must have started us from its main thread: to the kernel, the end
    of that thread is the end of the parent.
    """
    parent = os.getppid() if os.getpid() == _IMPORTED_BY else _IMPORTED_BY  # a fork server has imported this module
    if folder := os.environ.get(ANNOUNCE):
        _announce(Path(folder), name)
    guardian.end_with_parent(parent)


def _announce(folder: Path, name: str) -> None:
    with suppress(PermissionError):  # we lead a group of our own already
        os.setsid()
    try:
        (folder / f"rank-{name}-{os.getpid()}").touch()
    except FileNotFoundError:  # the run was stopped meanwhile
        os._exit(1)
