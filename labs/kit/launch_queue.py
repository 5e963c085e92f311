"""Launches of one machine take turns: first come, first served, by file locks in one folder. No daemon.

    mkdir -m 1777 /var/tmp/course-queue                    # once; a folder of this machine that every learner can write
    COURSE_QUEUE=/var/tmp/course-queue make lab            # every learner

Each launch writes a ticket, holds a lock (flock) on it and waits until no living ticket before it needs what it needs.
It then also locks what it uses: tickets give the order, the locks the exclusion. The kernel of the operating system
releases both when their process dies, however it dies, so the killed kernel of one learner never holds up the room. A
launch that is stopped while it *waits* is overtaken after SILENT_S. One that is stopped while it *runs* keeps its
turn: those who wait read its owner's name, and can interrupt, or run without the queue (`%env COURSE_QUEUE=`).

What excludes what (COURSE_QUEUE_SCOPE):

* `machine`, the default: one launch at a time. Launches on cores of their own disturb each other, too: in the recorded
  run of `labs.data_parallel` on two quiet cores, a step beside an independent one on the other core took 1.05 times as
  long, [1.01, 1.07] at 95 %: as much as all of DDP's communication cost there. The timing itself does not show that it
  was disturbed.
* `devices`: launches that share a GPU, or a physical core that either may use, exclude each other. Meant for seats with
  GPUs and cores of their own (`python -m labs.seats`): there the clock is in the GPU, and a whole room at one server
  cannot wait for each other. What the host then takes away is not measured here.

How long does one wait? With N learners who each think for t seconds between launches of s seconds, the mean wait is
`waiting_s(N, s, t)`. Nobody waits long while N s < s + t; from there on each further learner adds s seconds.

`run_on_ranks`, which checks exercises, takes a turn as well: two busy ranks would spoil whatever is being timed, and at
a low priority they would run into their own time limit. But it lasts a second or two, so it counts as if it had come
HEAD_START_S earlier: it waits for what runs, hardly for those who wait, and nobody is overtaken for longer than that.

Time limits count from the start of a run, never from when it was asked for. Ranks under torchrun do not queue: on a
cluster the scheduler hands out whole nodes. After a SIGKILL of the launcher the guardian needs some milliseconds to
end its ranks (labs.kit.guardian), which the next launch spends on starting its own.

A ticket is one small file per launch that waits or runs, locked for as long as it lives:

    waiting-<machine>-<place>-<pid>.json        mtime: last sign of life
    running-<machine>-<place>-<pid>.json        mtime: when it started

A ticket is locked before it gets its name, so whoever finds one unlocked knows that its owner is dead, and removes it
if the folder lets him. Files belong to many users: modes are set whatever the umask, files of others are opened without
O_CREAT (which fs.protected_regular forbids in a sticky folder), links and pipes are not followed, and what others wrote
is shown only as printable text.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import getpass
import json
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from labs.kit.errors import BadInput, require
from labs.kit.hardware import Device
from labs.kit.host import affinity, cores
from labs.kit.nvml import visible

QUEUE, SCOPE = "COURSE_QUEUE", "COURSE_QUEUE_SCOPE"
SCOPES = ("machine", "devices")
MACHINE = "machine"
HEAD_START_S = 30.0
SILENT_S = 5.0
LOOK_S = 0.25  # between two looks into the folder, times the number of launches before this one
MAX_LOOK_S = 2.0


def waiting_s(learners: int, launch_s: float, think_s: float) -> float:
    """Mean seconds that a launch waits for its turn, when `learners` share one queue. A model.

    Mean value analysis of a closed queue with one server, exact for exponential times, somewhat too long for launches
    that all last equally long. Source: Reiser and Lavenberg, Journal of the ACM 27 (1980), pages 313 to 322.
    """
    waiting = 0.0  # launches at the server, running or waiting, that a new one finds there
    response_s = launch_s
    for n in range(1, learners + 1):
        response_s = launch_s * (1 + waiting)
        waiting = n * response_s / (response_s + think_s)
    return response_s - launch_s


class Turn:
    """A launch's turn on the devices that it claims, or no queue at all if `folder` is None."""

    def __init__(self, folder: Path | None, what: str, on: str, claims: Sequence[str], head_start_s: float) -> None:
        self.folder, self.what, self.on, self.claims = folder, what, on, tuple(claims)
        self.head_start_s = head_start_s

    @contextmanager
    def taken(self, look: Callable[[str], None]) -> Iterator[None]:
        """Wait for the turn, then have it. While waiting, `look(text)` is called 20 times a second, and may raise."""
        if self.folder is None:
            yield
            return
        with self._own_ticket() as ticket, ExitStack() as locks:
            while not self._try(ticket, locks, look):
                pass
            yield

    @contextmanager
    def _own_ticket(self) -> Iterator[OwnTicket]:
        try:
            ticket = OwnTicket(self.folder, self.what, self.on, self.claims, self.head_start_s)
        except OSError as e:
            raise _unusable(self.folder, e.strerror or str(e)) from None
        try:
            yield ticket
        finally:
            ticket.remove()

    def _try(self, ticket: OwnTicket, locks: ExitStack, look: Callable[[str], None]) -> bool:
        """Take everything if nobody is before us; otherwise wait a little. Returns whether it was taken."""
        before = [other for other in living_tickets(self.folder) if self._comes_before(other, ticket)]
        if not before and self._lock_all(locks):
            ticket.start()
            return True
        ticket.beat()
        text, until = tell(before), time.monotonic() + min(MAX_LOOK_S, LOOK_S * max(1, len(before)))
        while time.monotonic() < until:
            look(text)
            time.sleep(0.05)
        return False

    def _comes_before(self, other: Ticket, own: OwnTicket) -> bool:
        if other.place == own.place or not conflict(other.claims, self.claims):
            return False
        return other.running or (other.place < own.place and other.silent_s() < SILENT_S)

    def _lock_all(self, locks: ExitStack) -> bool:
        """Lock what is claimed, all or nothing; MACHINE is shared by those who claim devices."""
        with ExitStack() as tried:
            for name in dict.fromkeys([MACHINE, *self.claims]):
                mode = fcntl.LOCK_SH if name == MACHINE and MACHINE not in self.claims else fcntl.LOCK_EX
                fd = open_lock(self.folder / f"{name}-{machine()}.lock")
                tried.callback(os.close, fd)
                tried.callback(fcntl.flock, fd, fcntl.LOCK_UN)  # not only closed: a fork may hold a copy
                try:
                    fcntl.flock(fd, mode | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
            locks.push(tried.pop_all())
        return True


def conflict(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two launches with these claims may not run at the same time."""
    return MACHINE in one or MACHINE in other or not set(one).isdisjoint(other)


def turn(what: str, placement: Sequence[Device], *, check: bool = False) -> Turn:
    """The turn of a launch of `what` on `placement`, as COURSE_QUEUE and COURSE_QUEUE_SCOPE ask. BadInput if unusable.

    `check` marks a short run whose timing does not matter. A launch inside of a rank belongs to that rank's turn.
    """
    folder, scope = os.environ.get(QUEUE, ""), os.environ.get(SCOPE) or "machine"
    if not folder or "TORCHELASTIC_RUN_ID" in os.environ:
        return Turn(None, what, "", (), 0.0)
    require(scope in SCOPES, f"{SCOPE} must be {' or '.join(SCOPES)}, not {scope!r}")
    check_folder(Path(folder))
    claims = (MACHINE,) if scope == "machine" else claims_of(placement)
    return Turn(Path(folder), what, _in_words(placement), claims, HEAD_START_S if check else 0.0)


def check_folder(folder: Path) -> None:
    """BadInput, with the remedy, unless launches can queue in `folder`."""
    require(folder.is_absolute(), f"{QUEUE} must be an absolute path, not {str(folder)!r}")
    if not folder.is_dir():
        raise BadInput(f"{QUEUE}={folder} is no folder: make it with `mkdir -m 1777 {folder}`, or unset {QUEUE}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(f"{QUEUE}={folder} cannot be written to: its owner runs `chmod 1777 {folder}`, or unset {QUEUE}")
    try:
        works = locks_work(folder)
    except OSError as e:
        raise _unusable(folder, e.strerror or str(e)) from None
    if not works:
        raise _unusable(folder, "file locks do not hold there")


def _unusable(folder: Path, why: str) -> BadInput:
    return BadInput(f"{QUEUE}={folder} cannot be used ({why}): name a folder on this machine's own disk, or unset it")


def claims_of(placement: Sequence[Device], root: str | Path = "/") -> tuple[str, ...]:
    """Names of everything that a launch on `placement` may keep busy, the same for every user of this machine.

    All physical cores of the affinity, not only those that ranks are pinned to: DataLoader workers and the host side
    of GPU ranks run on the others. The whole machine if a GPU cannot be identified.
    """
    claims = [f"core-{core.id}" for core in cores(affinity(), root)]
    indices = sorted({d.index for d in placement if d.kind != "cpu"})
    if indices:
        from labs.kit import nvml

        uuids = {v.cuda_index: v.uuid for v in visible(nvml.report(brief=True)) or ()}
        if not all(uuids.get(i) for i in indices):
            return (MACHINE,)
        claims += [f"gpu-{re.sub(r'[^0-9A-Za-z-]', '_', uuids[i])}" for i in indices]
    return tuple(claims)


def _in_words(placement: Sequence[Device]) -> str:
    noun = "core" if placement[0].kind == "cpu" else "GPU"
    n = len({(d.index, d.cores) for d in placement})
    return f"{n} {noun}" + ("" if n == 1 else "s")


LARGEST_BYTES = 64_000  # of a ticket: some 4000 cores
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
NAME = re.compile(r"(waiting|running)-(\w+)-(\d{20})-(\d+)\.json")


@functools.cache
def machine() -> str:
    """A name of this machine, the same in all its containers until it is started again: a folder may be on NFS."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return re.sub(r"\W", "", socket.gethostname()) or "here"


@dataclass(frozen=True)
class Ticket:
    """A launch that somebody else has in the queue."""

    place: tuple[int, int]
    """Order of arrival: nanoseconds, less any head start, and process id."""
    running: bool
    since: float
    """Seconds of time.time() when it started or, if it waits, when it last gave a sign of life."""
    name: str
    what: str
    on: str
    claims: tuple[str, ...]
    pid: int | None
    """Process id, if it means anything here (containers number their own)."""

    def silent_s(self) -> float:
        """Seconds without a sign of life, of one that waits."""
        return time.time() - self.since

    def __str__(self) -> str:
        """For example "anna: data_parallel on 2 cores, for 12 s"."""
        for_s = f", for {max(0.0, time.time() - self.since):.0f} s" if self.running else ", next"
        return f"{self.name}: {self.what} on {self.on}{for_s}{self._stopped()}"

    def _stopped(self) -> str:
        try:
            if self.pid is not None and psutil.Process(self.pid).status() == psutil.STATUS_STOPPED:
                return f" (stopped: whoever owns process {self.pid} must continue or kill it)"
        except (psutil.Error, ValueError, OverflowError):  # gone, or no process id at all
            pass
        return ""


def tell(before: Sequence[Ticket]) -> str:
    """What one who waits reads, for example "waiting: 2 launches before this one; anna: data_parallel on ..."."""
    if not before:
        return "waiting: another launch is about to end"
    running = [t for t in before if t.running] or before[:1]
    more = f"; and {len(running) - 3} more" if len(running) > 3 else ""
    count = f"{len(before)} launch{'es' if len(before) != 1 else ''} before this one"
    return "; ".join([f"waiting: {count}", *map(str, running[:3])]) + more


class OwnTicket:
    """This launch's ticket in `folder`. OSError if it cannot be written or locked."""

    def __init__(self, folder: Path, what: str, on: str, claims: Sequence[str], head_start_s: float) -> None:
        self.folder = folder
        # Of the monotonic clock, which all processes of a machine share: nobody overtakes when the time of day is set.
        self.place = (max(0, time.monotonic_ns() - int(head_start_s * 1e9)), os.getpid())
        self.path = folder / f"new-{secrets.token_hex(8)}.json"
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.fchmod(self.fd, 0o644)
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            text = {"name": _own_name(), "what": what, "on": on, "claims": claims, "pid": os.getpid(), "pids": _pids()}
            os.write(self.fd, json.dumps(text).encode())
            self.beat()
            self._rename("waiting")
        except BaseException:
            self.remove()
            raise

    def _rename(self, state: str) -> None:
        to = self.folder / f"{state}-{machine()}-{self.place[0]:020d}-{self.place[1]}.json"
        self.path.rename(to)
        self.path = to

    def beat(self) -> None:
        """Give a sign of life, by this machine's clock: a file server's may be minutes off."""
        now = time.time()
        os.utime(self.fd, (now, now))

    def start(self) -> None:
        """The wait is over."""
        self.beat()
        with contextlib.suppress(FileNotFoundError):  # somebody emptied the folder: the locks still hold
            self._rename("running")

    def remove(self) -> None:
        """Leave the queue."""
        with contextlib.suppress(OSError):
            self.path.unlink()
        fcntl.flock(self.fd, fcntl.LOCK_UN)  # not only closed: a fork may hold a copy
        os.close(self.fd)


def living_tickets(folder: Path) -> list[Ticket]:
    """All tickets of this machine whose process is alive, by place; the others' are removed."""
    found = []
    for path in folder.iterdir():
        if path.name.startswith("new-"):
            _remove_if_old(path)
        elif (name := NAME.fullmatch(path.name)) and name[2] == machine() and (ticket := _read(path, name)):
            found.append(ticket)
    return sorted(found, key=lambda t: t.place)


def _read(path: Path, name: re.Match) -> Ticket | None:
    try:
        fd = os.open(path, READ)
    except OSError:  # its launch has ended meanwhile, or it is no file
        return None
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or _is_dead(fd, path):
            return None
        text = json.loads(os.read(fd, LARGEST_BYTES))
        here = text["pid"] if text["pids"] == _pids() and type(text["pid"]) is int else None
        return Ticket(
            (int(name[3]), int(name[4])),
            name[1] == "running",
            facts.st_mtime,
            _clean(text["name"]),
            _clean(text["what"]),
            _clean(text["on"]),
            tuple(map(str, text["claims"])),
            here,
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # not one of ours: the locks decide
        return None
    finally:
        os.close(fd)


def _is_dead(fd: int, path: Path) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    with contextlib.suppress(OSError):  # of another user, in a sticky folder: he or its owner will remove it
        path.unlink()
    return True


def _remove_if_old(path: Path) -> None:
    """Between its creation and its lock a ticket lives for microseconds: one of a minute ago was killed there."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > 60:
            with _closed(os.open(path, READ)) as fd:
                _is_dead(fd, path)  # a file server's clock may be a minute off: whoever holds the lock lives


def open_lock(path: Path) -> int:
    """Descriptor of a lock file that every user of this machine can lock; it is never removed."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            try:
                return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except PermissionError:  # its maker died before the chmod below; reading is enough for a lock
                return os.open(path, READ)
        with contextlib.suppress(FileExistsError):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            os.fchmod(fd, 0o666)
            return fd


def locks_work(folder: Path) -> bool:
    """Whether a second lock on a locked file of `folder` is refused. OSError if files cannot be made or locked."""
    path = folder / f"new-{secrets.token_hex(8)}.json"
    with _closed(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)) as one:
        try:
            with _closed(os.open(path, READ)) as other:
                fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            path.unlink()
    return False


@contextlib.contextmanager
def _closed(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def _own_name() -> str:
    if name := os.environ.get("COURSE_NAME"):
        return name
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return f"user {os.getuid()}"


def _pids() -> str:
    """Which numbering of processes this is; the same text, the same numbers."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return socket.gethostname()


def _clean(text: object, most: int = 60) -> str:
    return "".join(c for c in str(text) if c.isprintable())[:most]
