"""What an installed torch brings with it, and how many OpenMP runtimes a process has loaded."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

OPENMP = re.compile(r"/lib(?:gomp|iomp5|omp)(?:-[0-9a-f]+)?\.so[.\d]*(?: \(deleted\))?$")
"""Files of GNU's, Intel's and LLVM's OpenMP runtime; a wheel may put a hash into the name."""
ASKED, DEFAULT = 3, 2
"""Threads that the first runtime is told to use, and those that OMP_NUM_THREADS gives to every runtime."""


def cuda_packages() -> list[str] | None:
    """Names of the CUDA packages that the installed torch asks for on this system; None if it came as no package."""
    try:
        given = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    needed = [r for r in map(Requirement, given) if r.marker is None or r.marker.evaluate({"extra": ""})]
    return sorted(r.name for r in needed if re.match(r"nvidia-|cuda-", r.name))


def installers() -> Counter[str]:
    """How many packages of this environment each installer says it has put there: "pip", "conda", "uv", ..."""
    found = importlib.metadata.distributions()
    return Counter((d.read_text("INSTALLER") or "unknown").strip() or "unknown" for d in found)


def openmp_runtimes(maps: Path = Path("/proc/self/maps")) -> list[str] | None:
    """Files of OpenMP runtimes that this process has mapped, each once; None where the system does not tell."""
    try:
        return openmp_files(maps.read_text(errors="replace"))
    except OSError:
        return None


def openmp_files(maps: str) -> list[str]:
    """Files of OpenMP runtimes in the text of /proc/PID/maps, one for each device and inode, sorted."""
    rows = (line.split(maxsplit=5) for line in maps.splitlines())
    files = {(row[3], row[4]): row[5] for row in rows if len(row) == 6 and OPENMP.search(row[5])}
    return sorted(files.values())


TWO = """
import ctypes, sys
first, second = (ctypes.CDLL(path) for path in sys.argv[1:4:2])
first.omp_set_num_threads(int(sys.argv[2]))
print(first.omp_get_max_threads(), second.omp_get_max_threads())
print(open("/proc/self/maps").read())
"""


@dataclass(frozen=True)
class Together:
    """Two libraries in one process: the runtimes that it then has, and the threads each would use."""

    runtimes: int
    threads: tuple[int, ...]
    """Of the first, which was told to use ASKED, and of the second, which was told nothing; () if the process ended."""


def together(first: str, second: str) -> Together | None:
    """Load two OpenMP runtimes into a process of their own and set the threads of the first.

    torch.set_num_threads does no more. None if this system will not load one of them. LLVM's and Intel's runtimes end
    the process when they meet a second copy: "OMP: Error #15".
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
    command = [sys.executable, "-I", "-c", TWO, first, str(ASKED), second]
    done = subprocess.run(
        command,
        env=clean | {"OMP_NUM_THREADS": str(DEFAULT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=60,
    )
    if done.returncode < 0:
        return Together(2, ())
    if done.returncode:
        return None
    numbers, _, maps = done.stdout.partition("\n")
    return Together(len(openmp_files(maps)), tuple(map(int, numbers.split())))


def with_a_copy(library: str, folder: Path) -> tuple[Together | None, Together | None]:
    """`together` for a runtime with itself, and with a copy of its file in `folder`, as from another package."""
    copy = Path(shutil.copy(library, folder))
    return together(library, library), together(library, str(copy))
