"""Fifty launches in a row, also ones that fail, leave nothing behind: no process, file, port, thread or memory.

Everything is looked at from outside, in the launching process and in all that it keeps for the next launch: its fork
server, guardian and resource tracker.
"""

import gc
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
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
LEAKS = "TEST_SOAK_LEAKS"  # for the fork server
TORCHS_OWN = "torchinductor_"  # one folder per user, an empty cache
kept = []
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
    """A process that launches, told when by lines on its standard input; `leak` makes every launch leave things."""

    def __init__(self, folder: Path, leak: bool = False) -> None:
        self.folder, environment = folder, new_environment(TMPDIR=str(folder))
        self.mark = environment[MARK]
        code = f"import test_soak; test_soak.main(leak={leak})"
        self.process = subprocess.Popen(
            [*PYTHON, "-c", code], env=environment, cwd=HERE, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
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

    def make(**options):
        made.append(Soaked(folder, **options))
        return made[0]

    try:
        yield make
    finally:
        for process in family(made[0].mark):
            process.kill()
        made[0].process.communicate()
        shutil.rmtree(folder)
        for path in SHM.glob(f"leak-{made[0].process.pid}-*"):
            path.unlink()


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


@pytest.mark.timeout(60)
def test_what_a_launch_would_leave_is_seen(soaked):
    launcher = soaked(leak=True)
    launcher.launch(0)
    before = look(launcher.mark, launcher.folder)
    launcher.launch(2)
    found = after_all(before, launcher.mark, launcher.folder, patience_s=0.5)
    server = [line for line in found if "forkserver" in line]
    own = [line for line in found if "import test_soak" in line and line not in server]
    for of, kinds in (
        (own, ("open files, among", "threads of", "listening ports", "MB of memory")),
        (server, ("open files, among ['/dev/null']", "MB of memory")),
    ):
        assert [sum(kind in line for line in of) for kind in kinds] == [1] * len(kinds), found
    things = [rf"process \d+ \({what}" for what in (".*sleep 61", ".*sleep 62", "zombie")]
    things += [f"file {SHM}/leak-", "file .*/left-"]
    assert [sum(bool(re.match(thing, line)) for line in found) for thing in things] == [2] * len(things), found


def main(leak: bool) -> None:
    """Read numbers of launches from standard input, and launch."""
    from labs.kit.launch import launch

    if leak:
        leave_in_fork_server()
    launch(EMPTY)
    for line in sys.stdin:
        for i in range(int(line)):
            one_of_ten(i % 10)
            if leak:
                leave_something(i)
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


def leave_something(i: int) -> None:
    """One of each thing that a launch might leave."""
    kept.append((bytearray(b"1" * 4_000_000), os.open(os.devnull, os.O_RDONLY), socket.create_server(("127.0.0.1", 0))))
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    subprocess.Popen(["sleep", "61"])
    kept.append(subprocess.Popen(["true"]))  # a zombie: nobody waits for it
    subprocess.run(["sh", "-c", "sleep 62 &"], check=True)  # which is nobody's child then
    (SHM / f"leak-{os.getpid()}-{i}").touch()
    Path(tempfile.gettempdir(), f"left-{i}").touch()


def leave_in_fork_server() -> None:
    """Let the fork server load this module, and leave something at each fork."""
    whole = multiprocessing.set_forkserver_preload
    os.environ[LEAKS] = "1"
    multiprocessing.set_forkserver_preload = lambda names: whole([*names, "test_soak"])


def leave_at_fork() -> None:
    kept.append((bytearray(b"1" * 2_000_000), os.open(os.devnull, os.O_RDONLY)))


if os.environ.pop(LEAKS, None):
    os.register_at_fork(after_in_parent=leave_at_fork)
