"""What a launching process keeps for its runs: a fork server with torch loaded, a folder, a watcher.

All three are made once per process, by the first launch or as soon as a notebook imports `labs.kit.launch`, and
end with it, however it ends: see labs.kit.supervise.
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

READY = "LABS_FORK_SERVER_READY"  # tells the fork server which file to create once torch is loaded
LEAN = "LABS_LEAN_FORK_SERVER"  # tells the fork server that no rank will train: half of its imports can be left out


@contextmanager
def signals_held() -> Iterator[list[int]]:
    """Note SIGINT and SIGTERM, and deliver them at the end: nothing breaks into the start or the end of a run.

    Yields the list they are noted in, for the caller to look at now and then. Whatever the block raises after
    one was noted is dropped for it. Does nothing outside of the main thread, where no signal arrives.
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
        for number in reversed(before):  # SIGINT last: from then on it may break in again
            signal.signal(number, before[number])
    if noted:
        if signal.getsignal(noted[0]) is not signal.default_int_handler:
            signal.raise_signal(noted[0])  # whoever handles it may end the process, or raise
        raise _interrupted() from None


def _interrupted() -> KeyboardInterrupt:
    """No subclass: for any other class Python would not end a script by the signal, as a shell expects it."""
    error = KeyboardInterrupt("all ranks have been stopped")
    error._render_traceback_ = lambda: [f"KeyboardInterrupt: {error}"]  # IPython's, instead of the launcher's frames
    return error


class ForkServer:
    """Fork server, folder and watcher of the process that made it."""

    def __init__(self, lean: bool = False, forked: bool = False) -> None:
        self.owner, self.lean, self.forked = os.getpid(), lean, forked
        self.root = _private_folder()
        self.runs = itertools.count()
        self.ready = self.root / "ready"
        self.watcher: subprocess.Popen | None = None
        atexit.register(self.close)

    def ensure(self) -> None:
        """Start the watcher and the fork server if they are not there (any more)."""
        if self.watcher is None or self.watcher.poll() is not None:
            self.watcher = supervise.start_watcher(self.root, self.owner)
        self._ensure_fork_server()

    def _ensure_fork_server(self) -> None:
        before = forkserver._forkserver._forkserver_pid
        resource_tracker.ensure_running()  # now, since it would unblock SIGINT below
        # Without a name server every rank would print to stdout that a host name is unknown; errors still come.
        quiet = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"), LEAN: "1" if self.lean else ""}
        if threading.current_thread() is threading.main_thread():  # any other may end while the fork server is needed
            quiet[supervise.LAUNCHER] = str(self.owner)
        how, self.forked = _as_a_fork() if self.forked else contextlib.nullcontext(), False
        with _environment({READY: str(self.ready), "PYTHONPATH": _import_path(), **quiet}), _sigint_blocked(), how:
            forkserver.ensure_running()
        pid = forkserver._forkserver._forkserver_pid
        announcement = self.root / f"server-{pid}"
        if not announcement.exists():
            announcement.touch()
            if pid == before:  # somebody else has started it: there is no knowing when it is ready
                self.ready.touch()
            elif before is not None:
                self.ready.unlink(missing_ok=True)
                (self.root / f"server-{before}").unlink(missing_ok=True)

    def wait_until_warm(self, check: Callable[[], None]) -> None:
        """Return when the fork server has loaded torch. `check` is called often, and may raise."""
        deadline = time.monotonic() + timeouts.IMPORT_S  # without the preload ranks start, too, only slowly
        while not self.ready.exists() and time.monotonic() < deadline:
            check()
            time.sleep(0.01)

    def server_pid(self) -> int | None:
        """The fork server, from which the ranks of the next run come."""
        return forkserver._forkserver._forkserver_pid

    def run_folder(self) -> Path:
        """A new folder for one run."""
        folder = self.root / f"run-{next(self.runs)}"
        folder.mkdir()
        return folder

    def close(self) -> None:
        """Let the watcher clean up now, and wait for it."""
        if self.watcher is None or os.getpid() != self.owner:
            return
        done, self.watcher = self.watcher, None  # this may be called again
        with contextlib.suppress(subprocess.TimeoutExpired):
            done.communicate(b"done", timeout=3)


_current: ForkServer | None = None
_lock = threading.Lock()


def start_fork_server(lean: bool = False, forked: bool = False) -> ForkServer:
    """Start loading torch in the background; does nothing if it is there. BadInput if there is no room for it.

    Undisturbed by an interrupt, which would leave half of it. `lean`: without what only training needs.
    `forked`: from this process, which has loaded torch and computed nothing yet, where that is safe: see `_as_a_fork`.
    """
    global _current
    with signals_held(), _lock:
        if _current is None or _current.owner != os.getpid():
            for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
                logging.getLogger(name).setLevel(logging.CRITICAL)  # what a learner needs of it is in RankFailed
            logging.getLogger("torchelastic-events-null").disabled = True
            os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # this process must not initialise CUDA
            multiprocessing.set_forkserver_preload(["labs.kit.supervise", "labs.kit.rank_process"])
            _current = ForkServer(lean, forked and sys.platform == "linux" and threading.active_count() == 1)
        _current.ensure()
        return _current


_spawn = multiprocessing.util.spawnv_passfds


@contextmanager
def _as_a_fork() -> Iterator[None]:
    """Within this block multiprocessing's fork server starts as a fork of this process, not as a fresh interpreter.

    It then has all that this process has imported: a command waits for one import of torch, not for two in a row.
    Only where this process has no thread of Python's, has started none of OpenMP's, which a fork lacks and waits for,
    and has not used a GPU. Linux only: macOS's frameworks do not bear it.
    """
    multiprocessing.util.spawnv_passfds = _fork
    try:
        yield
    finally:
        multiprocessing.util.spawnv_passfds = _spawn


def _fork(path: bytes, arguments: list[str], descriptors: list[int]) -> int:
    """Like multiprocessing.util.spawnv_passfds, but a fork that runs the last argument, which is Python."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # what is left in a buffer would be written twice
    launcher = os.getpid()
    if pid := os.fork():
        return pid
    try:
        multiprocessing.util.spawnv_passfds = _spawn  # a fork server that a rank starts is no fork of the rank
        supervise.end_with_parent(launcher)
        os.environ.pop(supervise.LAUNCHER, None)
        Path("/proc/self/comm").write_text(supervise.SERVER)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        kept = [2, *sorted(descriptors)]  # the launcher's other files close when it closes them
        for last, following in itertools.pairwise([*kept, os.sysconf("SC_OPEN_MAX")]):
            os.closerange(last + 1, following)
        exec(arguments[-1], {"__name__": "__mp_main__"})
    finally:
        os._exit(1)


def _private_folder() -> Path:
    """A folder with a short path that also takes multiprocessing's sockets, which a SIGKILL would leave in /tmp.

    Its name begins those of all semaphores made here and in ranks, so that the watcher can find them.
    """
    base = tempfile.gettempdir()
    try:
        short = len(os.fsencode(base)) < supervise.SOCKET_PATH_LIMIT
        root = tempfile.mkdtemp(prefix="labs-", dir=base if short else "/tmp")
    except OSError as e:
        raise BadInput(f"cannot make a folder in {base} ({e.strerror}): set TMPDIR to one with room") from None
    config = multiprocessing.current_process()._config  # ranks have a copy
    config.setdefault("tempdir", root)
    config["semprefix"] = f"/{Path(root).name}"
    return Path(root)


def _import_path() -> str:
    """PYTHONPATH with which the fork server finds this package, installed or not."""
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
    """A process started here never sees SIGINT: interrupting a cell must not break off its import of torch."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


if "ipykernel" in sys.modules:
    start_fork_server()  # now, while the kernel itself still imports torch and the learner reads
