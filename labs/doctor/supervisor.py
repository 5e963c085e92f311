"""Run the script once in its own process, end it with everything that it started, and return what was measured.

Under torchrun, each rank's process supervises a separate process for the script. The ranks of one machine share a
folder. The first of them waits for the others' profiles and reports; the others stay until it has.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from labs.doctor.profile import Profile, load, without_colours
from labs.doctor.script_process import Settings
from labs.kit import supervise
from labs.kit.errors import BadInput
from labs.kit.place import Place

ROOT = str(Path(__file__).parents[2])
BOOT = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from labs.doctor.script_process import main
del sys.path[0]  # `labs` is loaded, and finds its modules without it
main()
"""
POLL_S = 0.2
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FIRST_S, LEAST_S, TIMES_LONGEST = 900.0, 120.0, 10
"""Time limits without a step: FIRST_S until the first one, after imports and data; then TIMES_LONGEST times the longest
so far, at least LEAST_S."""
LEAVE_S = 20.0  # For the script's `finally` blocks, when all is measured
FOLLOW_S = 15.0  # For a rank to end after another has
COME_S = 60.0  # For the others' supervisors to start
LONGEST_PATH = 107 - len("/labs-0123456789ab/t/pymp-01234567/listener-01234567")
"""Limit for the temporary folder's path: multiprocessing makes a socket below it, whose path may have 107 bytes."""
NOT_COPIED = (".git", "__pycache__", "doctor-report*", ".venv")
TAIL_BYTES, TAIL_LINES = 8192, 20


def examine(given: Namespace, place: Place, print_report: Callable[[list[Profile]], None]) -> list[Profile]:
    """Run the script and return its profile; on a machine's first rank, report and return those of all its ranks.

    `print_report` gets that list. `given`: what labs.doctor.__main__.options returns. Removes all temporary files.
    """
    stopped: list[str] = []  # Signals are only recorded; `watch` acts on them
    for signum in SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # else nohup, or a shell's background
            signal.signal(signum, lambda number, frame: stopped.append(signal.Signals(number).name))
    with run_folder(place) as (folder, mark):
        run = Run(given, place, folder, stopped)
        try:
            run.start(mark)
            run.watch()
        finally:
            supervise.end_family(mark)
        profile = run.profile()
        profile.save(_final(folder, place.local_rank))
        if place.local_rank:
            _wait_for_the_first(folder)
            return [profile]
        found = [profile, *_others(folder, place, stopped)]
        print_report(found)
        return found


@contextmanager
def run_folder(place: Place) -> Iterator[tuple[Path, str]]:
    """Yield a folder for a run's files, which ranks of this machine share, and a mark for this rank's processes.

    Processes with the mark in their environment are ended, and the folder removed, even if this process is killed.
    """
    where = os.path.realpath(tempfile.gettempdir())
    where = where if len(os.fsencode(where)) <= LONGEST_PATH else "/tmp"
    names = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    parts = [place.start or str(os.getppid()), *(os.environ.get(n, "") for n in names)]
    key = uuid.uuid5(uuid.NAMESPACE_OID, "/".join(parts)) if place.local_ranks > 1 else uuid.uuid4()
    folder = Path(where, f"labs-{key.hex[:12]}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise BadInput(f"{folder} belongs to somebody else: set TMPDIR to a folder of your own")
    supervise.join(folder, place.local_rank)
    mark = uuid.uuid4().hex
    watcher = supervise.start_watcher(folder, mark=mark, place=place.local_rank)
    try:
        yield folder, mark
    finally:
        supervise.leave(folder, place.local_rank)
        watcher.kill()
        watcher.communicate()


class Run:
    """The script's process, from its start to its end."""

    def __init__(self, given: Namespace, place: Place, folder: Path, stopped: list[str]) -> None:
        self.given, self.place, self.folder, self.stopped = given, place, folder, stopped
        ranks = (place.rank, place.ranks, place.local_ranks)
        self.settings = Settings(given.argv, str(folder), *ranks, given.steps, given.seconds, os.getpid(), given.module)
        self.output = folder / f"output-{place.rank}.txt"
        self.how, self.why = "killed", ""  # as in Profile; `why` is empty unless we end the script
        self.begun = time.monotonic()

    def start(self, mark: str) -> None:
        """Start the script in a new session, with `mark` in its environment."""
        (self.folder / "t").mkdir(exist_ok=True)
        env = {**os.environ, supervise.MARK: mark, "TMPDIR": str(self.folder / "t")}
        flags = subprocess._args_from_interpreter_flags()  # as multiprocessing does: -W, -O, -X, ...
        command = [sys.executable, *flags, "-c", BOOT, ROOT, str(self.settings.save())]
        cwd = copied(self.folder, self.place) if self.given.copy else None
        stdin = subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None
        with self.output.open("wb") as output:
            stdout = None if self.given.show_output else output
            self.process = supervise.start(command, stdin=stdin, stdout=stdout, stderr=stdout, env=env, cwd=cwd)

    def watch(self) -> None:
        """Wait until the script ends, or there is a reason to end it: then set `how` and `why`."""
        steps, moved, longest_s = 0, time.monotonic(), 0.0
        while not self.why:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(POLL_S)
                return
            now = time.monotonic()
            if (taken := self._steps()) != steps:
                longest_s = max(longest_s, now - moved) if steps else 0.0
                steps, moved = taken, now
            limit_s = self.given.timeout or (max(LEAST_S, TIMES_LONGEST * longest_s) if steps else FIRST_S)
            if self.stopped:
                self.how, self.why = "stopped", self.stopped[0]
            elif _age_s(self.settings.path("ended")) > LEAVE_S:
                self.why = "all was measured, but it did not end"
            elif now - moved > limit_s:
                self.how, self.why = "silent", f"no step in {limit_s:g} s; python -m labs.watch tells where it stands"
            else:
                others = set(range(self.place.local_ranks)) - {self.place.local_rank}
                ended = [str(other) for other in others if _age_s(_final(self.folder, other)) > FOLLOW_S]
                self.why = f"ended, for local rank {ended[0]} had ended {FOLLOW_S:g} s before" if ended else ""

    def _steps(self) -> int:
        with suppress(OSError, ValueError):
            return int(self.settings.path("progress").read_bytes())
        return 0

    def profile(self) -> Profile:
        """Return the profile that the script left, with what it couldn't know: how it was ended, its last output."""
        place, argv = self.place, self.given.argv
        self.process.wait()
        try:
            profile = load(self.settings.path("profile"))
        except OSError:
            profile = Profile(argv[0], argv, place.rank, place.ranks, place.local_ranks)
        profile.steps = max(profile.steps, self._steps())
        cut_short = self.why and self.how != "silent" and not self.settings.path("ended").exists()
        if profile.ended == "running" or cut_short:  # it was cut short before it recorded its end
            profile.exit_code = self.process.returncode
            profile.ended, profile.error = (self.how, self.why) if self.why else _death(self.process.returncode)
            profile.wall_s = time.monotonic() - self.begun
        if profile.ended not in ("done", "script ended"):
            with self.output.open("rb") as file:
                file.seek(max(0, self.output.stat().st_size - TAIL_BYTES))
                lines = without_colours(file.read().decode(errors="replace")).splitlines()
            profile.output = [line[:200] for line in lines[-TAIL_LINES:]]
        return profile


def _age_s(path: Path) -> float:
    """Return the seconds since a file was written; 0 if it doesn't exist."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _death(code: int) -> tuple[str, str]:
    """Return `ended` and `error` for a process that couldn't record its own end."""
    if code == -signal.SIGKILL:
        return "killed", "ended by SIGKILL: the system does so when memory is exhausted"
    if -code in SIGNALS:  # srun and scancel may send it to the script as well
        return "stopped", signal.Signals(-code).name
    return "killed", f"ended with exit code {code}, before Python could say why"


def copied(folder: Path, place: Place) -> Path:
    """Return a copy of the current folder, which a machine's first rank makes while the others wait."""
    copy, part = folder / "copy", folder / "copy.part"
    if place.local_rank == 0 and not copy.exists():
        shutil.copytree(Path.cwd(), part, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
        part.rename(copy)
    until = time.monotonic() + FIRST_S
    while not copy.exists() and time.monotonic() < until:
        time.sleep(POLL_S)
    return copy


# Ranks of one machine


def _final(folder: Path, local_rank: int) -> Path:
    """Return the path of the profile of a rank that has ended."""
    return folder / f"final-{local_rank}.json"


def _others(folder: Path, place: Place, stopped: list[str]) -> list[Profile]:
    """Return the profiles of this machine's other ranks, without those that left none."""
    until = time.monotonic() + LEAST_S
    come = time.monotonic() + COME_S
    missing, found = set(range(place.local_ranks)) - {place.local_rank}, []
    while missing and time.monotonic() < until:
        for other in sorted(missing):
            at_work = supervise.is_at_work(folder, other)  # read before checking for the file
            if _final(folder, other).exists():
                found.append(load(_final(folder, other)))
                missing.discard(other)
            elif at_work is False or (at_work is None and (time.monotonic() > come or stopped)):
                missing.discard(other)
        time.sleep(POLL_S if missing else 0)
    return found


def _wait_for_the_first(folder: Path) -> None:
    """Wait until the first rank has reported and left. If this rank ended sooner, torchrun might end the first one."""
    come, at_work = time.monotonic() + COME_S, None
    while at_work is None and time.monotonic() < come:
        at_work = supervise.is_at_work(folder, 0)
        time.sleep(POLL_S)
    while supervise.is_at_work(folder, 0):
        time.sleep(POLL_S)
