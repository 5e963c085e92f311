"""What drills are made of: their register, and child processes whose last words are kept."""

from __future__ import annotations

import datetime
import os
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from labs.kit import supervise, timeouts

Fault = Callable[[bool], object]
SOON = datetime.timedelta(seconds=2)


@dataclass(frozen=True)
class Drill:
    """A fault and the number of ranks that it needs; 0: this process, without a process group."""

    fault: Fault
    ranks: int


DRILLS: dict[str, Drill] = {}


def drill(ranks: int = 0) -> Callable[[Fault], Fault]:
    """Register a fault under its function's name."""

    def register(fault: Fault) -> Fault:
        DRILLS[fault.__name__] = Drill(fault, ranks)
        return fault

    return register


def leave() -> None:
    """Destroy the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def script(text: str, **environment: str) -> str:
    """What a Python program prints on stderr. It runs in a folder of its own, which is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.py")
        path.write_text(textwrap.dedent(text), "utf-8")
        caches = {"TORCHINDUCTOR_CACHE_DIR": folder}
        return command([sys.executable, str(path)], folder, **caches, **environment)


def command(words: list[str], folder: str | None = None, **environment: str) -> str:
    """What a command prints on stderr."""
    done = supervise.run(words, timeouts.CHILD_S, env={**os.environ, **environment}, cwd=folder)
    if done.returncode is None:
        raise TimeoutError(f"{' '.join(words)} did not end within {timeouts.CHILD_S:g} s")
    return done.stderr
