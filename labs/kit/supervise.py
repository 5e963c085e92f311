"""Start processes, watch them, end them when their time is up, and leave none behind.

    with watched_folder() as root, started([sys.executable, "train.py"], root=root) as process:
        process.wait(60)                     # at the end of the block, or of this process, its whole group is killed
    done = run([sys.executable, "train.py"], limit_s=60)
    with forked(function, argument) as child: ...

    python -I -S supervise.py FOLDER PID [MARK PLACE]        # a watcher: this module starts it, you never do

A watcher waits, using no CPU time, until its standard input ends or process PID exits. Whatever the cause (restart,
SIGKILL, out of memory), it then kills what is announced in FOLDER and removes the folder.

Announcements are empty files `server-<pid>` or `rank-<name>-<pid>`. Each names a process group: a rank with its
DataLoader workers, even if stopped or hanging in a collective. A process that finds the folder gone exits. So once the
announcements and then the folder are removed, everything has been killed, whichever comes first. If the watcher is
killed together with PID, the system does its work on Linux: see `end_with_parent`.

Needs only the standard library, except psutil for the doctor's part. So a watcher starts in about 20 ms and takes 8 MB,
and a fork server can import this module before torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    import psutil

LAUNCHER = "LABS_LAUNCHER_PID"  # a fork server ends when this process does
ANNOUNCE = "LABS_ANNOUNCE"  # the watched folder in which a process announces itself: see `hold`
MARK = "LABS_DOCTOR_RUN"  # in the environment of all processes of one run of the doctor: see `family`
SERVER = "forkserver"  # in a fork server's command line; the process name of one forked from a launcher
PR_SET_PDEATHSIG = 1  # linux/prctl.h
SHARED_MEMORY = Path("/dev/shm")  # Linux; on macOS a semaphore has no file
SOCKET_PATH_LIMIT = 60  # the system allows 108 bytes (macOS: 104), of which a rank's own sockets take 40

_starter = {"pid": os.getppid()}
"""The process that started or forked this one. Read at import, because the system forgets a parent that dies."""
os.register_at_fork(
    before=lambda: _starter.update(next=os.getpid()), after_in_child=lambda: _starter.update(pid=_starter["next"])
)


# For callers


@contextlib.contextmanager
def started(
    command: Sequence[str], *, root: Path | None = None, name: str = "0", grace_s: float = 0.0, **options: Any
) -> Iterator[subprocess.Popen]:
    """Start a command in a new session and kill its group at the end of the block. `options` as in subprocess.Popen.

    After a SIGTERM, it has `grace_s` seconds. If announced in `root`, a folder from `watched_folder`, it is also killed
    when this process dies.
    """
    process = start(command, **options)
    announcement = None if root is None else root / f"rank-{name}-{process.pid}"
    try:
        if announcement is not None:
            announcement.touch()
        yield process
    finally:
        stop(process, grace_s)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        if announcement is not None:
            announcement.unlink(missing_ok=True)


def start(command: Sequence[str], **options: Any) -> subprocess.Popen:
    """Start a command in a new session, for a caller that ends it itself. `started` is safer."""
    return subprocess.Popen(command, start_new_session=True, **options)


def stop(process: subprocess.Popen, grace_s: float = 0.0) -> None:
    """Send SIGTERM, wait `grace_s` seconds, then SIGKILL the process's group. Returns when the process is gone."""
    if grace_s and process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    kill_group(process.pid)
    process.wait()


def run(
    command: Sequence[str], limit_s: float, grace_s: float = 0.0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command; return its output and exit code (None if it was ended after `limit_s`). Its group ends with it."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, watched_folder() as root:
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err} | options
        with started(command, root=root, grace_s=grace_s, **streams) as process:
            code = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    return subprocess.CompletedProcess(command, code, *texts)


@contextlib.contextmanager
def forked(function: Callable[..., None], *args: Any, method: str = "fork") -> Iterator[BaseProcess]:
    """Start a child that runs `function(*args)` and leads a group, which is killed at the end of the block.

    On Linux, the child also dies with the thread that started it, or with `method="forkserver"`, with the fork server.
    """
    import multiprocessing

    child = multiprocessing.get_context(method).Process(target=_lead, args=(function, args))
    with main_left_alone():
        child.start()
    try:
        yield child
    finally:
        kill_group(child.pid)
        child.kill()  # it may not lead a group yet
        child.join()


@contextlib.contextmanager
def main_left_alone() -> Iterator[None]:
    """Keep multiprocessing from running the caller's script again in every child, which gets all it needs pickled.

    multiprocessing doesn't import a main module with this spec.
    """
    main = sys.modules["__main__"]
    before = main.__spec__
    main.__spec__ = ModuleSpec("__main__", None)
    try:
        yield
    finally:
        main.__spec__ = before


def _lead(function: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.setsid()
    end_with_parent()
    function(*args)


@contextlib.contextmanager
def watched_folder(parent: Path | None = None, sockets: bool = False) -> Iterator[Path]:
    """Make a folder that is removed at the end of the block or when this process dies, even by SIGKILL.

    Processes announced in it, or in a folder `run-*` of it, are then killed. With `sockets`, its path is short, because
    the system limits a socket's path.
    """
    if sockets and len(os.fsencode(tempfile.gettempdir())) >= SOCKET_PATH_LIMIT:
        parent = Path("/tmp")
    root = Path(tempfile.mkdtemp(prefix="labs-", dir=parent))
    watcher = start_watcher(root)
    try:
        yield root
    finally:
        watcher.stdin.close()  # now it kills and removes
        watcher.wait(timeout=30)


def start_watcher(root: Path, owner: int | None = None, mark: str = "", place: int = 0) -> subprocess.Popen:
    """Start a watcher that guards `root` until its standard input closes or process `owner` (default: this one) ends.

    With `mark`, it also ends all processes with this mark, and removes the folder only if it is the last one there.
    """
    flags = ["-I"] if mark else ["-I", "-S"]  # -S would hide psutil
    extra = [mark, str(place)] if mark else []
    return subprocess.Popen(
        [sys.executable, *flags, __file__, str(root), str(owner or os.getpid()), *extra],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )


def kill_group(pid: int) -> None:
    """SIGKILL a process group. Ignores one that is gone or, on macOS, holds only zombies."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill(folder: Path) -> None:
    """SIGKILL every process group announced in `folder`, and remove the announcements."""
    for announcement in folder.glob("rank-*"):
        kill_group(int(announcement.name.rpartition("-")[2]))
        announcement.unlink(missing_ok=True)


def clear(folder: Path) -> None:
    """Kill everything announced in `folder`, including what announces itself meanwhile, and remove the folder."""
    for _ in range(200):
        kill(folder)
        try:
            for path in folder.iterdir():
                if not path.name.startswith("rank-"):
                    _remove(path)
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:  # not empty: a rank was faster (or still has a file open on NFS), so try again
            time.sleep(0.01)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# For processes that were started


def end_with_parent(parent: int | None = None) -> None:
    """Die with process `parent` (Linux). Exit at once if it isn't our parent any more.

    Default: the process that started or forked us. It must have done so in a thread that lives as long as itself,
    because the kernel takes the end of that thread for the end of the parent.
    """
    if sys.platform == "linux":
        import ctypes  # here, because the watcher doesn't need it

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != (parent or _starter["pid"]):  # it died before the line above
        os._exit(1)


def hold(name: str) -> None:
    """Announce this process in the folder named by ANNOUNCE, if any, and end it when its parent dies."""
    if folder := os.environ.get(ANNOUNCE):
        announce(Path(folder), name)
    end_with_parent()


def announce(folder: Path, name: str) -> None:
    """Lead a process group and announce it in `folder`. Exit if the folder is gone: the run was stopped."""
    with contextlib.suppress(PermissionError):  # we already lead a group
        os.setsid()
    try:
        (folder / f"rank-{name}-{os.getpid()}").touch()
    except FileNotFoundError:
        os._exit(1)


# Everything that a user's script has started, in any session, found by a mark in its environment

CLEANERS = ("resource_tracker", "torch_shm_manager")
"""They remove shared memory and semaphores after all others have ended, and end by themselves."""
GRACE_S, MOST_S, POLL_S = 3.0, 10.0, 0.05


def family(mark: str) -> list[psutil.Process]:
    """Return living processes that have `mark` in MARK, are in the session of one that does, or descend from one.

    Misses a process that emptied its environment, started a new session and lost its parent.
    """
    import psutil

    def carries(process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == mark
        except (psutil.Error, OSError):  # it is gone, or not ours
            return False

    marked = [p for p in psutil.process_iter() if p.pid != os.getpid() and carries(p)]
    found = {p.pid: p for p in marked}
    sessions = {session for p in marked if (session := _session(p.pid))} - {_session(0)}
    for p in psutil.process_iter() if sessions else ():
        if _session(p.pid) in sessions:
            found[p.pid] = p
    for p in list(found.values()):
        with contextlib.suppress(psutil.Error):
            found |= {child.pid: child for child in p.children(recursive=True)}
    return [p for p in found.values() if p.pid != os.getpid() and _lives(p)]


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _lives(process: psutil.Process) -> bool:
    import psutil

    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def end_family(mark: str, grace_s: float = GRACE_S) -> None:
    """SIGTERM the whole family, then SIGKILL it, cleaners last. Only processes that the system can't kill survive."""
    _send(family(mark), signal.SIGTERM)
    _wait(mark, grace_s, cleaners=False)
    until = time.monotonic() + MOST_S
    while time.monotonic() < until and _send(_workers(family(mark)), signal.SIGKILL):
        time.sleep(POLL_S)  # one may have started another meanwhile
    _wait(mark, GRACE_S, cleaners=True)
    _send(family(mark), signal.SIGKILL)
    _wait(mark, GRACE_S, cleaners=True)


def _workers(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if not _is_cleaner(p)]


def _is_cleaner(process: psutil.Process) -> bool:
    import psutil

    try:
        return any(name in word for word in process.cmdline() for name in CLEANERS)
    except psutil.Error:
        return False


def _send(processes: list[psutil.Process], signum: int) -> int:
    """Signal the processes; return how many."""
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signum)
    return len(processes)


def _wait(mark: str, seconds: float, *, cleaners: bool) -> None:
    """Wait until no process is left, or with `cleaners` False, none but cleaners."""
    until = time.monotonic() + seconds
    while (left := family(mark)) and (cleaners or _workers(left)) and time.monotonic() < until:
        time.sleep(POLL_S)


# A folder shared by the doctors of this machine's ranks


def join(folder: Path, place: int) -> None:
    """Register this process in `folder`, for rank `place` of this machine."""
    (folder / f"doctor-{place}").write_text(str(os.getpid()))


def is_at_work(folder: Path, place: int) -> bool | None:
    """Return whether rank `place` works in `folder`; None if it hasn't joined yet."""
    import psutil

    pid = _joined(folder / f"doctor-{place}")
    return None if pid is None else psutil.pid_exists(pid)


def at_work(folder: Path) -> dict[int, int]:
    """Return the process ids of those working in `folder`, by place."""
    pids = {int(path.name.rpartition("-")[2]): _joined(path) for path in folder.glob("doctor-*")}
    return {place: pid for place, pid in pids.items() if pid is not None}


def leave(folder: Path, place: int) -> None:
    """Leave the folder, and remove it if nobody else works in it."""
    import psutil

    (folder / f"doctor-{place}").unlink(missing_ok=True)
    if not any(psutil.pid_exists(pid) for pid in at_work(folder).values()):
        shutil.rmtree(folder, ignore_errors=True)


def _joined(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # it has gone, or is being written
        return None


# The watcher's process


def _wait_for_end(owner: int) -> bool:
    """Wait until the owner writes to or closes our standard input, or is gone. Return whether it is gone.

    The pid is needed because a child that the owner forked keeps the pipe open.
    """
    waiting = [sys.stdin.fileno()]
    if hasattr(os, "pidfd_open"):  # Linux 5.3; elsewhere there is only the pipe
        with contextlib.suppress(OSError):
            waiting.append(os.pidfd_open(owner))
    ready = waiting[1:]
    if os.getppid() == owner:
        ready, _, _ = select.select(waiting, [], [])
    return waiting[0] not in ready or not os.read(waiting[0], 1)


def _kill_server(pid: int) -> None:
    """Kill a fork server. It ends by itself, but not while it is still loading torch."""
    with contextlib.suppress(OSError):
        process = Path(f"/proc/{pid}")
        known = (process / "cmdline", process / "comm")
        if not process.parent.exists() or any(SERVER.encode() in f.read_bytes() for f in known):
            os.kill(pid, signal.SIGKILL)  # otherwise the pid was reused


def _remove_semaphores(prefix: str) -> None:
    """Remove semaphores left after a second, as when the resource tracker was killed."""
    until = time.monotonic() + 1.0
    while (left := list(SHARED_MEMORY.glob(f"sem.{prefix}-*"))) and time.monotonic() < until:
        time.sleep(0.05)
    for path in left:
        path.unlink(missing_ok=True)


def main() -> None:
    """Wait for the owner to end, then kill and remove everything."""
    root, owner, *marked = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if marked else (signal.SIGINT,):
        signal.signal(number, signal.SIG_IGN)
    died = _wait_for_end(owner)
    if marked:
        end_family(marked[0], grace_s=0.0)
        leave(root, int(marked[1]))
        return
    for announcement in root.glob("server-*"):
        _kill_server(int(announcement.name.rpartition("-")[2]))
    for folder in (*root.glob("run-*"), root):
        clear(folder)
    if died:  # a living owner removes its own semaphores
        _remove_semaphores(root.name)


if __name__ == "__main__":
    main()
elif launcher := os.environ.pop(LAUNCHER, None):  # this is the fork server, which has not loaded torch yet
    end_with_parent(int(launcher))
