"""Runs the script once in a process of its own; ends it and all that it has started; hands on what was measured.

Under torchrun each rank's process supervises a process for the script. Those of one machine share a folder. The first
of them waits for the profiles of the others, and reports; the others stay until it has.
"""

from __future__ import annotations

import getpass
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from labs.doctor.profile import Profile, load, without_colours
from labs.doctor.script_process import STACK_SIGNAL, Progress, Settings
from labs.doctor.step_timeout import FIRST_S, LEAST_S, StepTimeout
from labs.kit import supervise
from labs.kit.errors import BadInput
from labs.kit.monitor import Monitor, Trace
from labs.kit.place import Place

ROOT = str(Path(__file__).parents[2])
BOOT = """
import sys
root = sys.argv.pop(1)
if sys.flags.safe_path:
    sys.path.insert(0, root)
else:
    sys.path[0] = root  # the script's folder takes its place
from labs.doctor.script_process import main
if sys.flags.safe_path:
    sys.path.remove(root)
main()
"""
POLL_S = 0.2
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LEAVE_S = 20.0  # For what a script does in `finally` when all is measured; its profile are there
FOLLOW_S = 15.0  # For a rank to end after another has
COME_S = 60.0  # For the others' supervisors to begin
MOST_OUTPUT = 64 << 20  # Bytes of the script's output that are kept on the disk; of more, the end
LONGEST_PATH = 107 - len("/labs-0123456789ab/t/pymp-01234567/listener-01234567")
"""Of the folder for temporary files: multiprocessing makes a socket below it, whose path may have 107 bytes."""
NOT_COPIED = (".git", "__pycache__", "doctor-report*", ".venv")
TAIL_BYTES, TAIL_LINES = 8192, 20
MONITOR_S = 1.0  # From one look at the processor's times to the next: the mean over a whole run counts
SHORTEST_RUN_S = 4.0  # In less, the start of the ranks themselves looks like another program


@dataclass(frozen=True)
class Order:
    """What is wanted."""

    argv: list[str]  # The script and its arguments
    steps: int = 30
    seconds: float = 40.0
    timeout_s: float | None = None  # Without a step; None: as StepTimeout has it
    modes: tuple[str, ...] | None = None  # Counterfactuals, by name; None: all
    copy: bool = False  # Whether a copy of the folder that it is started in is run
    show_output: bool = False
    module: str = ""  # Its full name, if it is run by that


class Stop:
    """These SIGNALS are noted, and end nothing by themselves."""

    def __init__(self) -> None:
        self.by = ""

    def _note(self, signum: int, frame: object) -> None:
        self.by = self.by or signal.Signals(signum).name

    @contextmanager
    def noting(self) -> Iterator[None]:
        """In the main thread; another has no signals."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup, or a shell's background
                    before[signum] = signal.signal(signum, self._note)
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


def examine(order: Order, place: Place, print_report: Callable[[list[Profile]], None]) -> list[Profile]:
    """Run the script; `print_report` gets this machine's profiles, in its first rank. All that was made is removed.

    Returns these; in the other ranks, their own.
    """
    stop = Stop()
    with stop.noting(), run_folder(place) as (folder, mark):
        with Run(order, place, folder, mark, stop) as run:
            run.watch()
        run.profile.save(_final(folder, place.local_rank))
        if place.local_rank:
            _wait_for_the_first(folder)
            return [run.profile]
        found = [run.profile, *_others(folder, place, order, stop)]
        print_report(found)
        return found


@contextmanager
def run_folder(place: Place) -> Iterator[tuple[Path, str]]:
    """For all that a run needs and writes on this machine; ranks that torchrun has started share one. And a mark.

    What has this mark in its environment is ended, and the folder removed, even if this process is killed.
    """
    where = os.path.realpath(tempfile.gettempdir())
    where = where if len(os.fsencode(where)) <= LONGEST_PATH else "/tmp"
    if place.local_ranks == 1:
        folder = Path(tempfile.mkdtemp(prefix="labs-", dir=where))
    else:
        names = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
        parts = [place.start or str(os.getppid()), *(os.environ.get(n, "") for n in names)]
        key = uuid.uuid5(uuid.NAMESPACE_OID, "/".join(parts))
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

    def __init__(self, order: Order, place: Place, folder: Path, mark: str, stop: Stop) -> None:
        self.order, self.place, self.folder, self.mark, self.stop = order, place, folder, mark, stop
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        self.settings = Settings(
            order.argv,
            str(folder),
            place.rank,
            place.ranks,
            place.local_ranks,
            order.steps,
            order.seconds,
            order.modes,
            parent,
            order.module,
        )
        self.output = folder / f"output-{place.rank}.txt"
        self.how, self.why = "killed", ""  # as in Profile; `why` is empty unless we end the script
        self.tail, self._cut, self._shown = b"", b"", 0
        self.others_percent = math.nan

    def __enter__(self) -> Run:
        self.begun = time.monotonic()
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def _start(self) -> None:
        (self.folder / "t").mkdir(exist_ok=True)
        self.progress = Progress(self.folder, self.place.rank)
        env = {**os.environ, supervise.MARK: self.mark, "TMPDIR": str(self.folder / "t")}
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", inductor_cache())  # in the new TMPDIR it would be cold each time
        flags = subprocess._args_from_interpreter_flags()  # as multiprocessing does: -W, -O, -X, ...
        command = [sys.executable, *flags, "-c", BOOT, ROOT, str(self.settings.save())]
        cwd = copied(self.folder, self.place, self.order) if self.order.copy else None
        stdin = subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None
        with self.output.open("ab") as output:  # appended to, so that it can be cut
            self.process = supervise.start(command, stdin=stdin, stdout=output, stderr=output, env=env, cwd=cwd)

    def __exit__(self, *error: object) -> None:
        self._end()
        self.profile = self._profile()

    def _end(self) -> None:
        """All processes. What the script had printed until then is read."""
        supervise.end_family(self.mark)
        if hasattr(self, "process"):
            self.process.wait()
        self._read_output()

    def watch(self) -> None:
        """Until the script has ended, or there is a reason to end it. The first rank watches the machine as well."""
        first = self.place.local_rank == 0
        with Monitor(lambda: supervise.at_work(self.folder), MONITOR_S, gpus=()) if first else nullcontext() as monitor:
            self._watch(monitor)

    def _watch(self, monitor: Monitor | None) -> None:
        looked = time.monotonic()
        timeout = StepTimeout(self.order.timeout_s, looked)
        while True:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(POLL_S)
                return
            self._read_output()
            now = time.monotonic()
            if monitor is not None and now > looked + MONITOR_S:
                looked = now
                self._note_others(monitor.trace)
            timeout.saw(self.progress.steps, now)
            if self.stop.by:
                self.how, self.why = "stopped", self.stop.by
            elif self._ended_before(LEAVE_S):
                self.why = "all was measured, but it did not end"
            elif timeout.is_over(now):
                where = (stands := self._stack()) and f": it stands in {stands}"
                self.how, self.why = "silent", f"no step in {timeout.limit_s:g} s{where}"
            elif (other := self._another_ended(FOLLOW_S)) is not None:
                self.why = f"ended, for local rank {other} had ended {FOLLOW_S:g} s before"
            if self.why:
                return
            if monitor is not None and timeout.is_to_say(now):
                print(f"labs.doctor: {timeout.words(now, self._stack())}", file=sys.stderr, flush=True)

    def _note_others(self, trace: Trace) -> None:
        """What programs outside of this run take of the cores, until the first of its ranks has ended.

        Of workers that go with their rank nobody knows any more whose they were.
        """
        if trace.t_s[-1:] > [SHORTEST_RUN_S] and not any(self.folder.glob("ended-*")):
            self.others_percent = trace.neighbours_percent

    def _ended_before(self, seconds: float) -> bool:
        """Whether the script has said so long ago that the script has ended."""
        try:
            return time.time() - self.settings.ended_path.stat().st_mtime > seconds
        except OSError:
            return False

    def _another_ended(self, seconds: float) -> int | None:
        """The place of a rank of this machine that ended so long ago."""
        for other in range(self.place.local_ranks):
            with suppress(OSError):
                path = _final(self.folder, other)
                if other != self.place.local_rank and time.time() - path.stat().st_mtime > seconds:
                    return other
        return None

    def _read_output(self) -> None:
        """Keep its end, show it if that is wanted, and cut the file if it is too long."""
        with suppress(OSError), self.output.open("rb") as file:
            if self.order.show_output:
                file.seek(self._shown)
                self._shown += _show(file)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            self.tail = (self._cut + file.read())[-TAIL_BYTES:]
            if size > MOST_OUTPUT:
                os.truncate(self.output, 0)
                self._cut, self._shown = self.tail, 0

    def _stack(self) -> str:
        """Where the script's main thread stands: "train.py:12, in wait"; "" if it does not say."""
        if STACK_SIGNAL is None:
            return ""
        text = ""
        with suppress(OSError):
            os.truncate(self.settings.stack_path, 0)  # of an earlier look; if it is not there, the signal would kill
            self.process.send_signal(STACK_SIGNAL)
            for _ in range(10):
                time.sleep(POLL_S)
                before, text = text, self.settings.stack_path.read_text()
                if text and text == before:  # all of it
                    return stood(text, self.order.argv[0])
        return ""

    def _profile(self) -> Profile:
        """What the script has left, and what it could not know."""
        place, argv = self.place, self.order.argv
        try:
            profile = load(self.settings.profile_path)
        except (OSError, ValueError):
            profile = Profile(argv[0], argv, place.rank, place.ranks, place.local_ranks)
        profile.steps = max(profile.steps, self.progress.steps)
        cut_short = self.why and self.how != "silent" and not self.settings.ended_path.exists()
        if profile.ended == "running" or cut_short:  # while it tries something risky, its profile are those of an end
            profile.exit_code = self.process.returncode
            profile.ended, profile.error = (self.how, self.why) if self.why else _death(self.process.returncode)
            profile.wall_s = time.monotonic() - self.begun
        if math.isfinite(self.others_percent):
            profile.machine["others_percent"] = self.others_percent
        if profile.ended not in ("done", "script ended"):
            lines = without_colours(self.tail.decode(errors="replace")).splitlines()
            profile.output = [line[:200] for line in lines[-TAIL_LINES:]]
        return profile


def _show(file: object) -> int:
    """Copy what follows in a file to standard output; how many bytes."""
    shown = 0
    while block := file.read(1 << 16):
        sys.stdout.buffer.write(block)
        shown += len(block)
    sys.stdout.flush()
    return shown


def _death(code: int) -> tuple[str, str]:
    """How a process ended that had no time to say so, and why."""
    if code == -signal.SIGKILL:
        return "killed", "ended by SIGKILL: the system does so when memory is exhausted"
    if -code in SIGNALS:  # srun and scancel may send it to the script, too
        return "stopped", signal.Signals(-code).name
    if code < 0:
        with suppress(ValueError):
            return "killed", f"ended by {signal.Signals(-code).name}"
    return "killed", f"ended with exit code {code}, before Python could say why"


def stood(text: str, script: str) -> str:
    """Of what faulthandler writes, in which the main thread is last: its innermost line of the script's own folder.

    Its innermost line of all, if none is.
    """
    folder = os.path.dirname(os.path.realpath(script)) + os.sep
    blocks = text.split("(most recent call first):\n")
    lines = deque(line.strip() for line in blocks[-1].splitlines() if line.startswith('  File "'))
    own = next((line for line in lines if line[6:].startswith(folder) and "-packages" not in line), None)
    line = own or next(iter(lines), "")
    file, _, rest = line.removeprefix('File "').partition('", line ')
    number, _, function = rest.partition(" in ")
    return f"{os.path.basename(file)}:{number}, in {function}" if function else ""


def inductor_cache() -> str:
    """Where torch.compile keeps what it has compiled, if nothing else is said: as inductor has it."""
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError):  # a container that does not know its user
        user = f"uid_{os.getuid()}"
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")


def copied(folder: Path, place: Place, order: Order) -> Path:
    """A copy of the folder that the doctor was started in: the first rank of a machine makes it, the others wait."""
    copy, part = folder / "copy", folder / "copy.part"
    if place.local_rank == 0 and not copy.exists():
        shutil.copytree(Path.cwd(), part, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
        part.rename(copy)
    until = time.monotonic() + (order.timeout_s or FIRST_S)
    while not copy.exists() and time.monotonic() < until:
        time.sleep(POLL_S)
    return copy


# Ranks of one machine


def _final(folder: Path, local_rank: int) -> Path:
    """Profile of a rank that has ended."""
    return folder / f"final-{local_rank}.json"


def _others(folder: Path, place: Place, order: Order, stop: Stop) -> list[Profile]:
    """Profile of the other ranks of this machine; of those that left none, if they had begun, that they were killed."""
    until = time.monotonic() + (order.timeout_s or LEAST_S) + LEAVE_S + FOLLOW_S
    come = time.monotonic() + min(COME_S, order.timeout_s or COME_S)
    missing, found = set(range(place.local_ranks)) - {place.local_rank}, []
    while missing and time.monotonic() < until:
        for other in sorted(missing):
            at_work = supervise.is_at_work(folder, other)  # before the file is looked for
            if _final(folder, other).exists():
                found.append(load(_final(folder, other)))
                missing.discard(other)
            elif at_work is False or (at_work is None and (time.monotonic() > come or stop.by)):
                missing.discard(other)  # the report says that it left nothing
        time.sleep(POLL_S if missing else 0)
    return found


def _wait_for_the_first(folder: Path) -> None:
    """Until it has reported, and is gone. A rank that ends sooner would have torchrun end the first one."""
    come, at_work = time.monotonic() + COME_S, None
    while at_work is None and time.monotonic() < come:
        at_work = supervise.is_at_work(folder, 0)
        time.sleep(POLL_S)
    while supervise.is_at_work(folder, 0):
        time.sleep(POLL_S)
