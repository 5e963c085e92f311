"""A launching process's helpers for its runs: a fork server with torch loaded, a folder, a watcher.

All three are made once per process, by the first launch or when a notebook imports `labs.kit.launch`. They end with the
process, however it ends: see labs.kit.supervise.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from labs.kit import supervise, timeouts
from labs.kit.errors import BadInput

READY = "LABS_FORK_SERVER_READY"  # names the file that the fork server creates once torch is loaded
LEAN = "LABS_LEAN_FORK_SERVER"  # tells the fork server that no rank will train, so it can skip half of its imports


@contextmanager
def signals_held() -> Iterator[list[int]]:
    """Hold SIGINT and SIGTERM back until the end of the block, so that they can't interrupt a run's start or end.

    Yields the list in which they are noted, for the caller to check. Once one is noted, an exception from the block is
    dropped in its favour. Does nothing outside the main thread, where no signal arrives.
    """
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) not in (None, signal.SIG_IGN):
                before[number] = signal.signal(number, lambda n, frame: noted.append(n))
        yield noted
    except BaseException:
        if not noted:
            raise
    finally:
        for number in reversed(before):  # SIGINT last: after it, a signal may interrupt again
            signal.signal(number, before[number])
    if noted:
        if signal.getsignal(noted[0]) is not signal.default_int_handler:
            signal.raise_signal(noted[0])  # its handler may end the process, or raise
        raise _interrupted() from None


def _interrupted() -> KeyboardInterrupt:
    """Return a plain KeyboardInterrupt: with a subclass, Python wouldn't end a script by signal, as shells expect."""
    error = KeyboardInterrupt("all ranks have been stopped")
    error._render_traceback_ = lambda: [f"KeyboardInterrupt: {error}"]  # IPython prints this instead of our frames
    return error


class ForkServer:
    """Fork server, folder and watcher of the process that created it."""

    def __init__(self, lean: bool = False, forked: bool = False) -> None:
        self.owner, self.lean, self.forked = os.getpid(), lean, forked
        self.root = _private_folder()
        self.runs = itertools.count()
        self.ready = self.root / "ready"
        self.watcher: subprocess.Popen | None = None
        atexit.register(self.close)

    def ensure(self) -> None:
        """Start the watcher and the fork server unless they are running."""
        if self.watcher is None or self.watcher.poll() is not None:
            self.watcher = supervise.start_watcher(self.root, self.owner)
        self._ensure_fork_server()

    def _ensure_fork_server(self) -> None:
        before = forkserver._forkserver._forkserver_pid
        resource_tracker.ensure_running()  # now, since it would unblock SIGINT below
        # Without a name server, every rank would print that a host name is unknown. Errors are still shown.
        quiet = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"), LEAN: "1" if self.lean else ""}
        if threading.current_thread() is threading.main_thread():  # another thread may end before the fork server
            quiet[supervise.LAUNCHER] = str(self.owner)
        how, self.forked = _as_a_fork() if self.forked else contextlib.nullcontext(), False
        with _environment({READY: str(self.ready), "PYTHONPATH": _import_path(), **quiet}), _sigint_blocked(), how:
            forkserver.ensure_running()
        pid = forkserver._forkserver._forkserver_pid
        announcement = self.root / f"server-{pid}"
        if not announcement.exists():
            announcement.touch()
            if pid == before:  # someone else started it, so we can't know when it is ready
                self.ready.touch()
            elif before is not None:
                self.ready.unlink(missing_ok=True)
                (self.root / f"server-{before}").unlink(missing_ok=True)

    def wait_until_warm(self, check: Callable[[], None]) -> None:
        """Wait until the fork server has loaded torch. Calls `check` often, which may raise."""
        deadline = time.monotonic() + timeouts.IMPORT_S  # ranks also start without the preload, only slowly
        while not self.ready.exists() and time.monotonic() < deadline:
            check()
            time.sleep(0.01)

    def server_pid(self) -> int | None:
        """Return the process id of the fork server, from which the next run's ranks come."""
        return forkserver._forkserver._forkserver_pid

    def run_folder(self) -> Path:
        folder = self.root / f"run-{next(self.runs)}"
        folder.mkdir()
        return folder

    def close(self) -> None:
        """Make the watcher clean up now, and wait for it."""
        if self.watcher is None or os.getpid() != self.owner:
            return
        done, self.watcher = self.watcher, None  # this may be called again
        with contextlib.suppress(subprocess.TimeoutExpired):
            done.communicate(b"done", timeout=3)


_current: ForkServer | None = None
_lock = threading.Lock()


def start_fork_server(lean: bool = False, forked: bool = False) -> ForkServer:
    """Start loading torch in the background, unless that has been done. Raises BadInput if there is no room for it.

    Signals are held back meanwhile. `lean` skips what only training needs. `forked` forks this process, which must have
    loaded torch and computed nothing yet, if that is safe: see `_as_a_fork`.
    """
    global _current
    with signals_held(), _lock:
        if _current is None or _current.owner != os.getpid():
            for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
                logging.getLogger(name).setLevel(logging.CRITICAL)  # RankFailed holds what a learner needs of it
            logging.getLogger("torchelastic-events-null").disabled = True
            os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # this process must not initialise CUDA
            multiprocessing.set_forkserver_preload(["labs.kit.supervise", "labs.kit.rank_process"])
            _current = ForkServer(lean, forked and sys.platform == "linux" and threading.active_count() == 1)
        _current.ensure()
        return _current


_spawn = multiprocessing.util.spawnv_passfds


@contextmanager
def _as_a_fork() -> Iterator[None]:
    """Within this block, multiprocessing's fork server starts as a fork of this process, not as a fresh interpreter.

    It then has everything that this process imported, so a command waits for one import of torch instead of two. This
    process must have no other Python thread, have started no OpenMP thread (a fork lacks them and waits for them) and
    not have used a GPU. Linux only, because macOS's frameworks don't survive it.
    """
    multiprocessing.util.spawnv_passfds = _fork
    try:
        yield
    finally:
        multiprocessing.util.spawnv_passfds = _spawn


def _fork(path: bytes, arguments: list[str], descriptors: list[int]) -> int:
    """Fork this process and run the last argument, which is Python; replaces multiprocessing.util.spawnv_passfds."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # otherwise both processes would write what is left in the buffer
    launcher = os.getpid()
    if pid := os.fork():
        return pid
    try:
        multiprocessing.util.spawnv_passfds = _spawn  # a fork server started by a rank isn't a fork of the rank
        supervise.end_with_parent(launcher)
        os.environ.pop(supervise.LAUNCHER, None)
        Path("/proc/self/comm").write_text(supervise.SERVER)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        kept = [2, *sorted(descriptors)]  # close the rest, so that the launcher's files close when it closes them
        for last, following in itertools.pairwise([*kept, os.sysconf("SC_OPEN_MAX")]):
            os.closerange(last + 1, following)
        exec(arguments[-1], {"__name__": "__mp_main__"})
    finally:
        os._exit(1)


def _private_folder() -> Path:
    """Make a folder with a short path. multiprocessing puts its sockets there; a SIGKILL would leave them in /tmp.

    All semaphores made here and in ranks have names that start with the folder's, so the watcher can find them.
    """
    base = tempfile.gettempdir()
    try:
        short = len(os.fsencode(base)) < supervise.SOCKET_PATH_LIMIT
        root = tempfile.mkdtemp(prefix="labs-", dir=base if short else "/tmp")
    except OSError as e:
        raise BadInput(f"cannot make a folder in {base} ({e.strerror}): set TMPDIR to one with room") from None
    config = multiprocessing.current_process()._config  # ranks get a copy
    config.setdefault("tempdir", root)
    config["semprefix"] = f"/{Path(root).name}"
    return Path(root)


def _import_path() -> str:
    """Return a PYTHONPATH with which the fork server finds this package, installed or not."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(p for p in paths if p)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Start processes that never see SIGINT, so that interrupting a cell doesn't interrupt their import of torch."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


if "ipykernel" in sys.modules:
    start_fork_server()  # now, while the kernel imports torch and the learner reads
