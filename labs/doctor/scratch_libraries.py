"""Libraries that open files themselves, and processes started anew: each is taught where the script's files are."""

from __future__ import annotations

import functools
import io
import os
import sys
import types
from collections.abc import Callable
from importlib import _bootstrap_external
from pathlib import Path
from typing import Any
from unittest import mock

from labs.doctor.scratch_room import Room
from labs.doctor.true_files import true
from labs.kit import _compat

ROOT = str(Path(__file__).parents[2])
SPAWNED = """
import sys
sys.path.insert(0, {root!r})
from labs.doctor import scratch
sys.path.remove({root!r})
scratch.install({folder!r}, own={own!r})
"""


def _lead(scratch: Any, owner: Any, name: str, argument: int, how: Callable[[Any], Any]) -> None:
    """Replace a function that takes a path as its `argument`-th, so that it gets `how(path)`."""
    original = getattr(owner, name)

    def lead(args: tuple) -> list:
        args = list(args)
        if len(args) > argument and isinstance(args[argument], str | os.PathLike):
            args[argument] = os.fspath(how(args[argument]))
        return args

    if isinstance(original, type) and original.__module__.startswith("torch"):  # it may be asked for by isinstance

        class Led(original):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*lead(args), **kwargs)

        new: Any = functools.wraps(original, updated=())(Led)
    else:

        def new(*args: Any, **kwargs: Any) -> Any:
            return original(*lead(args), **kwargs)

    scratch.undo.enter_context(mock.patch.object(owner, name, new))


def _map(scratch: Any, owner: Any) -> None:
    """Memory that is a file; only if it is `shared` the file is written."""
    original = owner.from_file

    def from_file(filename: Any, shared: bool | None = None, *args: Any, **kwargs: Any) -> Any:
        found = scratch.to_write(filename) if shared else scratch.to_read(filename)
        return original(os.fspath(found), shared, *args, **kwargs)

    scratch.undo.enter_context(mock.patch.object(owner, "from_file", from_file))


def teach_import(scratch: Any) -> None:
    """A module that the script has written is found. Python's import calls what lies below os and io."""

    def look(path: str) -> os.stat_result:
        """Of a folder of which the script has written a part, that part: its time tells that a module was added."""
        if scratch.is_unused():  # as most often while torch is imported, which looks for thousands of files
            return true.stat(path)
        try:
            return true.stat(scratch.written + scratch.followed(scratch.place(path)))
        except OSError:
            return os.stat(path)

    instead = {"stat": look, "listdir": os.listdir, "getcwd": os.getcwd, "open_code": io.open_code, "FileIO": io.FileIO}
    for name in ("_os", "_io"):
        known = vars(getattr(_bootstrap_external, name))
        taught = types.SimpleNamespace(**known | {name: new for name, new in instead.items() if name in known})
        scratch.undo.enter_context(mock.patch.object(_bootstrap_external, name, taught))


def _teach_torch(scratch: Any) -> None:
    import torch
    import torch.autograd.profiler

    anew = functools.partial(scratch.to_write, keep=False)
    _lead(scratch, _compat.extension, "PyTorchFileWriter", 0, anew)
    _lead(scratch, _compat.extension, "PyTorchFileReader", 0, scratch.to_read)
    _map(scratch, torch.UntypedStorage)
    _map(scratch, torch)
    _lead(scratch, torch.jit.RecursiveScriptModule, "save", 1, anew)
    _lead(scratch, torch.jit, "load", 0, scratch.to_read)
    _lead(scratch, torch.autograd.profiler.profile, "export_chrome_trace", 1, anew)
    room, save = Room(scratch), torch.save

    @functools.wraps(save)
    def save_if_there_is_room(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        room.before_save(obj, f)
        save(obj, f, *args, **kwargs)

    scratch.undo.enter_context(mock.patch.object(torch, "save", save_if_there_is_room))


def _teach_safetensors(scratch: Any) -> None:
    safetensors = sys.modules["safetensors"]
    _lead(scratch, safetensors, "serialize_file", 1, functools.partial(scratch.to_write, keep=False))
    _lead(scratch, safetensors, "safe_open", 0, scratch.to_read)


def _teach_pyarrow(scratch: Any) -> None:
    _lead(scratch, sys.modules["pyarrow"], "memory_map", 0, scratch.to_read)


def _teach_sqlite3(scratch: Any) -> None:
    import sqlite3

    def how(path: Any) -> Any:
        return path if str(path) == ":memory:" or str(path).startswith("file:") else scratch.to_write(path)

    _lead(scratch, sqlite3, "connect", 0, how)


def _teach_spawned(scratch: Any) -> None:
    import multiprocessing.spawn as spawn

    prepare = spawn.get_preparation_data

    def with_scratch(name: str) -> dict:
        return {"scratch": _InChild(scratch), **prepare(name)}

    scratch.undo.enter_context(mock.patch.object(spawn, "get_preparation_data", with_scratch))


class _InChild:
    """When a process that multiprocessing has spawned reads this, it has a scratch folder, too."""

    def __init__(self, scratch: Any) -> None:
        self.code = SPAWNED.format(root=ROOT, folder=scratch.folder, own=scratch.own)

    def __reduce__(self) -> tuple:
        return exec, (self.code, {})


TAUGHT = {
    "torch": _teach_torch,
    "safetensors": _teach_safetensors,
    "pyarrow": _teach_pyarrow,
    "sqlite3": _teach_sqlite3,
    "multiprocessing.spawn": _teach_spawned,
}
"""What is to be done once a module has been imported."""
