"""What runs inside the process of each rank, under the notebook's launcher and under torchrun alike.

This module is preloaded in the fork server: what it imports is already there when a rank starts.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import linecache
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

# Some are only preloaded: what the agent needs in each rank, DDP, and what make_config needs.
import cloudpickle
import torch.distributed.elastic.multiprocessing
import torch.nn.parallel  # noqa: F401
import typeguard  # noqa: F401

from labs.kit import _compat, fork_server, measure, record, supervise  # noqa: F401
from labs.kit.errors import BadInput
from labs.kit.hardware import Device
from labs.kit.lab import cell_functions, lab_module, make_config, short_name
from labs.kit.rank import Rank, process_group

if (fork_server.READY in os.environ and not os.environ.get(fork_server.LEAN)) or "RANK" in os.environ:
    # The first optimizer of a process imports this, which takes as long as all of torch: not for who only launches.
    _compat.preload_dynamo()


def as_rank(body: bytes, folder: str, placement: list[Device], timeout_s: float, asked: float) -> None:
    """Entry point of every launched rank: announce, join the group, run `body(rank)`, leave its result in `folder`.

    `asked` is the launcher's time.time() when it asked for ranks.
    `body` is a cloudpickle, since a function defined in a notebook cell cannot be imported here.
    """
    local_rank, run, entered = int(os.environ["LOCAL_RANK"]), Path(folder), time.time()
    _announce(run, local_rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    with _reported(run, local_rank):
        function = cloudpickle.loads(body)
        # The inner report comes before the group is left, which may hang when a peer is gone.
        with process_group(placement[local_rank], timeout_s=timeout_s) as rank, _reported(run, local_rank):
            rank.startup_s = {"process start": entered - asked, **rank.startup_s}
            rank.on_progress = _to_file(run / "progress")
            _write(run / f"result-{local_rank}", cloudpickle.dumps(function(rank)))
            sys.stdout.flush()
            (run / f"done-{local_rank}").touch()
            _wait_for_all(run, rank.local_world_size)


def _announce(run: Path, local_rank: int) -> None:
    """Become a process group that the launcher can kill as a whole, with output and stacks in `run`."""
    try:
        os.setsid()
        (run / f"rank-{local_rank}-{os.getpid()}").touch()
        out = os.open(run / f"output-{local_rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        # Left open for the life of the process: the launcher asks for stacks with SIGUSR1 before it kills a hung rank.
        stacks = (run / f"stack-{local_rank}").open("w")
    except FileNotFoundError:  # the run was stopped while this rank was being forked
        os._exit(1)
    # The fork server forks in its main thread, which lives as long as it does.
    supervise.end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides; a stray Ctrl-C would race with it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    faulthandler.enable(stacks, all_threads=False)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # what was printed before a crash must not be lost
    own_children(run)


def own_children(run: Path) -> None:
    """Let DataLoader workers start as under torchrun, as children of this rank, so that they are killed with it.

    By default a process from a fork server asks that same server for its own children. What is forked in a thread
    other than the main one may outlive that thread, and gets no signal of its parent's death.
    """
    forked_by: list[int] = []  # pid of who forks, in its main thread

    def before() -> None:
        forked_by[:] = [os.getpid()] if threading.current_thread() is threading.main_thread() else []

    def in_child() -> None:
        for parent in forked_by:
            supervise.end_with_parent(parent)

    os.register_at_fork(before=before, after_in_child=in_child)
    multiprocessing.set_start_method(None, force=True)  # the platform's default
    forkserver._forkserver.__init__()  # should it be asked for, as from Python 3.14 on by default: a server of its own
    multiprocessing.set_forkserver_preload(["torch"])  # or every worker would import it
    multiprocessing.current_process()._config["tempdir"] = str(run)  # for their sockets


def _wait_for_all(run: Path, ranks: int) -> None:
    """Keep this rank's connections open until all are done. No collective: it could pair with a peer's own one."""
    while not all((run / f"done-{r}").exists() for r in range(ranks)):
        time.sleep(0.002)


@contextmanager
def _reported(run: Path, local_rank: int) -> Iterator[None]:
    """Leave an exception's traceback in the run's folder, stamped, so that the first to fail can be named."""
    try:
        yield
    except BaseException as e:
        path = run / f"error-{local_rank}"
        if not path.exists():
            _write(path, json.dumps(_report(e)).encode())
            # If a peer was killed, its death reaches this rank as a connection error. Staying alive until the
            # launcher, which looks every few ms, ends this rank shows it who died first.
            time.sleep(2.0)
        raise SystemExit(1) from None  # any other exception would make torch leave a file in /tmp


def _report(error: BaseException) -> dict[str, Any]:
    return {
        "rank": int(os.environ["RANK"]),
        "host": socket.gethostname(),
        "time": time.time(),
        "traceback": _own_frames(error),
        "error": str(error),
        "bad_input": isinstance(error, BadInput),
    }


def _own_frames(error: BaseException) -> str:
    """The traceback as Python prints it, without the frames of this module and what called it."""
    whole = chain = traceback.TracebackException.from_exception(error)
    while chain is not None:
        own = [f for f in chain.stack if f.filename != __file__]
        chain.stack = traceback.StackSummary.from_list(own)
        chain = chain.__cause__ or chain.__context__
    return "".join(whole.format())


def _write(path: Path, data: bytes) -> None:
    """Through another name, so that the launcher never reads half of it."""
    temporary = path.with_name(f"new-{path.name}")
    temporary.write_bytes(data)
    temporary.replace(path)


def _to_file(path: Path) -> Callable[[int, int, str], None]:
    last = [0.0]

    def write(done: int, total: int, message: str) -> None:
        if time.monotonic() - last[0] > 0.1 or done == total:
            last[0] = time.monotonic()
            _write(path, json.dumps([done, total, message]).encode())

    return write


class RunLab:
    """`run` of a lab with its config, and the records of all ranks as rank 0's result.

    `functions` are those of a notebook's cells that the config names, see labs.kit.lab.named_functions.
    """

    def __init__(self, lab: str, values: dict[str, Any], functions: dict[str, Any] | None = None) -> None:
        self.lab, self.values, self.functions = lab, values, functions or {}
        self.cells = cells_here() if functions else {}

    def __call__(self, rank: Rank) -> list[record.Record]:
        know_cells(self.cells)
        cell_functions.update(self.functions)
        lab = lab_module(self.lab)
        config = make_config(lab, self.values)
        rank.lab, rank.config = short_name(lab.__name__), record.as_json(config)
        # What speaks for the whole job is the same on every rank: rank 0's copy is kept.
        mine = [r for r in lab.run(config, rank) if rank.rank == 0 or r.layout["rank"] is not None]
        everyone = rank.gather(mine)
        return [r for records in everyone for r in records] if rank.rank == 0 else []


class RunFunction:
    """A learner's function, with the text of the notebook's cells, which makes its tracebacks readable here."""

    def __init__(self, function: Callable[..., Any], args: tuple) -> None:
        self.function, self.args, self.cells = function, args, cells_here()

    def __call__(self, rank: Rank) -> Any:
        know_cells(self.cells)
        if rank.device.type == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so the function can't take a GPU that another rank uses
        return self.function(*self.args)


def cells_here() -> dict[str, tuple]:
    """Text of the notebook's cells, as linecache has it, for `know_cells` in another process."""
    entries = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4}
    return {name: entry for name, entry in entries.items() if not Path(name).exists()}


def know_cells(cells: dict[str, tuple]) -> None:
    """Let tracebacks of this process show the lines of a notebook's cells."""
    for name, (size, _, lines, full_name) in cells.items():
        linecache.cache[name] = (size, None, lines, full_name)  # without a time: it is not looked up on disk


if ready := os.environ.pop(fork_server.READY, None):  # this is the fork server, and torch is loaded
    gc.collect()
    gc.freeze()  # a collection in a rank would otherwise copy the pages of all these objects
    Path(ready).touch()
