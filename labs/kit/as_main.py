"""Run a script in this process as `python script.py` would: its name, its arguments, where it imports from."""

from __future__ import annotations

import os
import sys
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path


def run(argv: list[str]) -> None:
    """`argv`: the script's path, then its own arguments. Raises what the script raises, SystemExit among it."""
    path = os.path.abspath(argv[0])
    sys.argv[:] = argv
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __loader__=SourceFileLoader("__main__", path),
                           __package__=None, __spec__=None, __cached__=None)  # fmt: skip
    sys.modules["__main__"] = module
    exec(compile(Path(path).read_bytes(), path, "exec"), module.__dict__)


def exit_code(ended: SystemExit) -> int:
    """What a shell sees of it."""
    return ended.code if isinstance(ended.code, int) else int(ended.code is not None)


def of_script(trace: types.TracebackType | None, path: str) -> types.TracebackType | None:
    """Without the frames that came before the script's own. None for an error in its syntax."""
    path = os.path.abspath(path)
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    return trace
