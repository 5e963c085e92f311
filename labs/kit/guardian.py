"""Kills what a launcher leaves behind when it dies. Started by labs.kit.fork_server, never by hand.

    python -I -S guardian.py FOLDER LAUNCHER_PID

Waits, without using any processor time, for its standard input to end or for the launcher to exit. Whatever the
cause (restart, SIGKILL, memory exhausted), it then kills the fork server and every rank together with its
DataLoader workers, also stopped ones and ones that hang in a collective, and removes the launcher's folder and
semaphores.

Processes are found by announcements: empty files in the folder, named `server-<pid>` or `rank-<rank>-<pid>`. A
rank is forked, makes a process group of its own and announces itself; one that finds its folder gone exits. So
whoever removes an announcement after killing, and then the folder, has killed everything, however the two race.

Should the guardian be killed together with the launcher, the system does its work on Linux: see `end_with_parent`.

Standard library only: it starts in some 20 ms and takes 8 MB. The fork server imports this module before torch.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

LAUNCHER = "LABS_LAUNCHER_PID"  # tells the fork server with whom it ends
SERVER = "forkserver"  # in its command line; what was forked from a launcher has that one's, and this as its name
PR_SET_PDEATHSIG = 1  # linux/prctl.h
SHARED_MEMORY = Path("/dev/shm")  # of Linux; on macOS a semaphore has no file


def end_with_parent(parent: int) -> None:
    """Be killed when process `parent` dies (Linux); exit at once if it is not, or no longer, our parent.

    It must have started us in a thread that lives as long as it does: to the kernel, the end of that thread is the
    end of the parent.
    """
    if sys.platform == "linux":
        import ctypes  # here: the guardian itself needs none

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def kill(folder: Path) -> None:
    """SIGKILL the process group of every rank announced in `folder`, and forget it."""
    for announcement in folder.glob("rank-*"):
        # A group that is gone, or on macOS one that holds only zombies, needs nothing.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(int(announcement.name.rpartition("-")[2]), signal.SIGKILL)
        announcement.unlink(missing_ok=True)


def clear(folder: Path) -> None:
    """Kill all ranks announced in `folder` and remove it, with those that announce themselves meanwhile."""
    for _ in range(200):
        kill(folder)
        try:
            for path in folder.iterdir():
                if not path.name.startswith("rank-"):
                    _remove(path)
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:  # not empty: a rank was faster (or, on NFS, still has a file open), so once more
            time.sleep(0.01)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _wait_for_end(launcher: int) -> bool:
    """Wait until the launcher has said or closed something on our standard input, or is gone; whether it is gone.

    A child that the launcher forked holds the pipe open for as long as it lives: hence the pid as well.
    """
    waiting = [sys.stdin.fileno()]
    if hasattr(os, "pidfd_open"):  # Linux 5.3; elsewhere the pipe must do
        with contextlib.suppress(OSError):
            waiting.append(os.pidfd_open(launcher))
    ready = waiting[1:]
    if os.getppid() == launcher:
        ready, _, _ = select.select(waiting, [], [])
    return waiting[0] not in ready or not os.read(waiting[0], 1)


def _kill_server(pid: int) -> None:
    """It ends by itself when nobody can talk to it any more, but not while it is still loading torch."""
    with contextlib.suppress(OSError):
        process = Path(f"/proc/{pid}")
        known = (process / "cmdline", process / "comm")
        if not process.parent.exists() or any(SERVER.encode() in f.read_bytes() for f in known):
            os.kill(pid, signal.SIGKILL)  # else the pid was used again


def _remove_semaphores(prefix: str) -> None:
    """Those that are left after a second: multiprocessing's resource tracker removes them, unless it was killed."""
    until = time.monotonic() + 1.0
    while (left := list(SHARED_MEMORY.glob(f"sem.{prefix}-*"))) and time.monotonic() < until:
        time.sleep(0.05)
    for path in left:
        path.unlink(missing_ok=True)


def main() -> None:
    """Wait, then kill and remove everything."""
    root, launcher = Path(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    died = _wait_for_end(launcher)
    for announcement in root.glob("server-*"):
        _kill_server(int(announcement.name.rpartition("-")[2]))
    for run in root.glob("run-*"):
        clear(run)
    shutil.rmtree(root, ignore_errors=True)
    if died:  # one that lives removes its own
        _remove_semaphores(root.name)


if __name__ == "__main__":
    main()
elif launcher := os.environ.pop(LAUNCHER, None):  # this is the fork server, which has not loaded torch yet
    end_with_parent(int(launcher))
