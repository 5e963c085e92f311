"""Fifty launches in a row, also ones that fail, leave nothing behind: no process, file, port, thread or memory.

Everything is looked at from outside, in the launching process and in all that it keeps for the next launch: its fork
server, watcher and resource tracker.
"""

import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from processes import HERE, MARK, PYTHON, SURVIVAL_S, assert_no_survivors, family, listening, new_environment

pytestmark = [pytest.mark.drill, pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")]
SHM = Path("/dev/shm")
LAUNCHES, WARM_UP = 50, 10
GROWTH_BYTES = 2e6  # of resident memory of each process, over all launches but those that warm it up
TORCHS_OWN = "torchinductor_"  # one folder per user, an empty cache
EMPTY, FAULTY = "labs_for_tests.empty", "labs_for_tests.faulty"


@dataclass
class Seen:
    """What there is of one process."""

    name: str
    files: list[str]
    threads: int
    ports: set[int]
    resident_bytes: int


def see(process: psutil.Process) -> Seen:
    if process.status() == psutil.STATUS_ZOMBIE:
        return Seen(f"{process.pid} (zombie of {process.ppid()})", [], 0, set(), 0)
    files = []
    for fd in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            files.append(os.readlink(fd))
    command = " ".join(word for word in process.cmdline() if not word.startswith("-W"))  # conftest's, thousands
    name = f"{process.pid} (parent {process.ppid()}, {process.status()}) {command[:120]}"
    return Seen(name, files, process.num_threads(), listening(process.pid), process.memory_info().rss)


def look(mark: str, folder: Path) -> tuple[dict[int, Seen], set[Path]]:
    """Every process of the family, zombies included, by its pid; every file in `folder` and in shared memory."""
    there = {p.pid: p for p in family(mark)}
    for p in list(there.values()):
        with suppress(psutil.NoSuchProcess):
            there |= {child.pid: child for child in p.children(recursive=True)}
    seen = {}
    for pid, process in there.items():
        with suppress(psutil.Error, FileNotFoundError):
            seen[pid] = see(process)
    return seen, {*folder.rglob("*"), *SHM.glob("*")}


def left_behind(before, after) -> list[str]:
    """One line for each thing that is there now and was not before."""
    (old, old_files), (new, new_files) = before, after
    found = [f"process {new[pid].name}" for pid in new.keys() - old.keys()]
    found += [f"no longer there: {old[pid].name}" for pid in old.keys() - new.keys()]
    found += [f"file {path}" for path in new_files - old_files]
    for pid in old.keys() & new.keys():
        a, b = old[pid], new[pid]
        if len(b.files) > len(a.files):
            names = sorted(name for name in set(b.files) if b.files.count(name) > a.files.count(name))
            found.append(f"{len(b.files) - len(a.files)} open files, among {names}, of {a.name}")
        if b.threads > a.threads:
            found.append(f"{b.threads - a.threads} threads of {a.name}")
        if b.ports - a.ports:
            found.append(f"listening ports {b.ports - a.ports} of {a.name}")
        if (grown := b.resident_bytes - a.resident_bytes) > GROWTH_BYTES:
            found.append(f"{grown / 1e6:.1f} MB of memory of {a.name}")
    return found


def after_all(before, mark: str, folder: Path, patience_s: float = SURVIVAL_S) -> list[str]:
    """What was left behind, and stays: ranks may take a while to end, and neighbours' shared memory comes and goes."""
    deadline, stays = time.monotonic() + patience_s, look(mark, folder)[1]
    while True:
        seen, files = look(mark, folder)
        stays &= files
        if not (found := left_behind(before, (seen, stays))) or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


class Soaked:
    """A process that launches, told when by lines on its standard input."""

    def __init__(self, folder: Path) -> None:
        self.folder, environment = folder, new_environment(TMPDIR=str(folder))
        self.mark = environment[MARK]
        self.process = subprocess.Popen(
            [*PYTHON, "-c", "import test_soak; test_soak.main()"],
            env=environment,
            cwd=HERE,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def launch(self, times: int) -> str:
        """Launch that often; the names of the threads that are then there."""
        self.process.stdin.write(f"{times}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def close(self) -> None:
        self.process.communicate(timeout=20)


@pytest.fixture
def soaked():
    folder, made = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp")), []  # short, as sockets need it

    def make():
        made.append(Soaked(folder))
        return made[0]

    try:
        yield make
    finally:
        for process in family(made[0].mark):
            process.kill()
        made[0].process.communicate()
        shutil.rmtree(folder)


@pytest.mark.timeout(100)
def test_fifty_launches_leave_nothing(soaked):
    launcher = soaked()
    launcher.launch(WARM_UP)
    before = look(launcher.mark, launcher.folder)
    threads = launcher.launch(LAUNCHES)
    found = after_all(before, launcher.mark, launcher.folder)
    assert not found, "\n".join([f"{LAUNCHES} launches left behind:", *found, f"threads: {threads}"])
    launcher.close()
    assert_no_survivors(launcher.mark)
    left = [p.name for p in launcher.folder.iterdir() if not p.name.startswith(TORCHS_OWN)]
    assert left == [] and launcher.process.returncode == 0


def main() -> None:
    """Read numbers of launches from standard input, and launch."""
    from labs.kit.launch import launch

    launch(EMPTY)
    for line in sys.stdin:
        for i in range(int(line)):
            one_of_ten(i % 10)
        gc.collect()
        print(json.dumps([t.name for t in threading.enumerate()]), flush=True)


def one_of_ten(i: int) -> None:
    """Six go well; in the others a rank raises, a rank is killed, one is interrupted, and one runs out of time."""
    from labs.kit.launch import RankFailed, RankTimeout, launch

    match i:
        case 2:
            fails(RankFailed, launch, fault="raise")
        case 4:
            fails(RankFailed, launch, fault="sigkill", workers=1)
        case 6:
            fails(KeyboardInterrupt, interrupted, launch, fault="sleep")
        case 8:
            fails(RankTimeout, launch, fault="sleep", timeout_s=0.5)
        case _:
            launch(EMPTY)


def fails(kind: type[BaseException], call: Callable, *args, **parameters) -> None:
    """Call it with FAULTY, which must end in that exception."""
    with pytest.raises(kind):
        call(*args, FAULTY, **parameters)


def interrupted(call: Callable, *args, **parameters) -> None:
    """Interrupt the call after some tenths of a second, another time at each."""
    timer = threading.Timer(random.uniform(0.0, 0.6), os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        call(*args, **parameters)
    finally:
        timer.join()
