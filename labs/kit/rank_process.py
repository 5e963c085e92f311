"""Code that runs in each rank's process, under the notebook's launcher and under torchrun.

The fork server preloads this module, so its imports are already loaded when a rank starts.
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

# Some are only preloaded: those that the agent needs in each rank, DDP, and those of make_config.
import cloudpickle
import torch
import torch.distributed.elastic.multiprocessing
import torch.nn.parallel
import typeguard  # noqa: F401

from labs.kit import _compat, fork_server, measure, record, supervise  # noqa: F401
from labs.kit.errors import BadInput
from labs.kit.hardware import Device
from labs.kit.lab import cell_functions, lab_module, make_config, short_name
from labs.kit.rank import Rank, process_group

if (fork_server.READY in os.environ and not os.environ.get(fork_server.LEAN)) or "RANK" in os.environ:
    # A process's first optimizer imports this, which takes as long as all of torch. A launcher doesn't need it.
    _compat.preload_dynamo()


def as_rank(body: bytes, folder: str, placement: list[Device], timeout_s: float, asked: float) -> None:
    """Run a launched rank: announce it, join the group, call `body(rank)`, write its result into `folder`.

    `asked` is the launcher's time.time() when it requested ranks. `body` is a cloudpickle, because a function defined
    in a notebook cell can't be imported here.
    """
    local_rank, run, entered = int(os.environ["LOCAL_RANK"]), Path(folder), time.time()
    _announce(run, local_rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    with _reported(run, local_rank):
        function = cloudpickle.loads(body)
        # The inner report comes before leaving the group, which may hang if a peer is gone.
        with process_group(placement[local_rank], timeout_s=timeout_s) as rank, _reported(run, local_rank):
            rank.startup_s = {"process start": entered - asked, **rank.startup_s}
            rank.on_progress = _to_file(run / "progress")
            _write(run / f"result-{local_rank}", cloudpickle.dumps(function(rank)))
            sys.stdout.flush()
            (run / f"done-{local_rank}").touch()
            _wait_for_all(run, rank.local_world_size)


def _announce(run: Path, local_rank: int) -> None:
    """Lead a process group that the launcher can kill as a whole, with output and stacks in `run`."""
    try:
        os.setsid()
        (run / f"rank-{local_rank}-{os.getpid()}").touch()
        out = os.open(run / f"output-{local_rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        # Stays open for the life of the process: before killing a hung rank, the launcher asks for stacks by SIGUSR1.
        stacks = (run / f"stack-{local_rank}").open("w")
    except FileNotFoundError:  # the run was stopped while this rank was being forked
        os._exit(1)
    # The fork server forks in its main thread, which lives as long as it does.
    supervise.end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the launcher reacts to Ctrl-C; here it would be a race
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    faulthandler.enable(stacks, all_threads=False)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # so that a crash loses no printed line
    own_children(run)


def own_children(run: Path) -> None:
    """Make DataLoader workers start as children of this rank, as under torchrun, so that they are killed with it.

    By default, a process from a fork server asks the same server for its children. A process forked in a thread other
    than the main one may outlive that thread, so it gets no signal when its parent dies.
    """
    forked_by: list[int] = []  # pid of the forking process, if it forks in its main thread

    def before() -> None:
        forked_by[:] = [os.getpid()] if threading.current_thread() is threading.main_thread() else []

    def in_child() -> None:
        for parent in forked_by:
            supervise.end_with_parent(parent)

    os.register_at_fork(before=before, after_in_child=in_child)
    multiprocessing.set_start_method(None, force=True)  # the platform's default
    forkserver._forkserver.__init__()  # its own server if one is needed, as by default from Python 3.14
    multiprocessing.set_forkserver_preload(["torch"])  # otherwise every worker would import it
    multiprocessing.current_process()._config["tempdir"] = str(run)  # for their sockets


def _wait_for_all(run: Path, ranks: int) -> None:
    """Keep connections open until all ranks are done. A collective could match a peer's."""
    while not all((run / f"done-{r}").exists() for r in range(ranks)):
        time.sleep(0.002)


@contextmanager
def _reported(run: Path, local_rank: int) -> Iterator[None]:
    """Write an exception's traceback and time into the run's folder, to find the first failure."""
    try:
        yield
    except BaseException as e:
        path = run / f"error-{local_rank}"
        if not path.exists():
            _write(path, json.dumps(_report(e)).encode())
            # A peer's death reaches this rank as a connection error. Stay alive until the launcher, which polls every
            # few ms, ends this rank, so it can see which rank died first.
            time.sleep(2.0)
        raise SystemExit(1) from None  # for any other exception, torch would leave a file in /tmp


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
    """Return the traceback as Python prints it, without this module's frames."""
    whole = chain = traceback.TracebackException.from_exception(error)
    while chain is not None:
        own = [f for f in chain.stack if f.filename != __file__]
        chain.stack = traceback.StackSummary.from_list(own)
        chain = chain.__cause__ or chain.__context__
    return "".join(whole.format())


def _write(path: Path, data: bytes) -> None:
    """Write through a temporary name, so that the launcher never reads half a file."""
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
    """Calls a lab's `run` with its config; rank 0's result is the records of all ranks.

    `functions` come from notebook cells and are named in the config, see labs.kit.lab.named_functions.
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
        # Records of the whole job are the same on every rank, so only rank 0's copy is kept.
        mine = [r for r in lab.run(config, rank) if rank.rank == 0 or r.layout["rank"] is not None]
        everyone = rank.gather(mine)
        return [r for records in everyone for r in records] if rank.rank == 0 else []


class RunFunction:
    """Calls a learner's function, with the text of the notebook's cells for readable tracebacks."""

    def __init__(self, function: Callable[..., Any], args: tuple) -> None:
        self.function, self.args, self.cells = function, args, cells_here()

    def __call__(self, rank: Rank) -> Any:
        know_cells(self.cells)
        if rank.device.type == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so the function can't take a GPU that another rank uses
            torch.accelerator.current_accelerator = lambda check_available=False: None  # nor a Mac's: gloo has no MPS
        return self.function(*self.args)


def cells_here() -> dict[str, tuple]:
    """Return the text of the notebook's cells, as linecache has it, for `know_cells` in another process."""
    entries = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4}
    return {name: entry for name, entry in entries.items() if not Path(name).exists()}


def know_cells(cells: dict[str, tuple]) -> None:
    """Make tracebacks in this process show the lines of notebook cells."""
    for name, (size, _, lines, full_name) in cells.items():
        linecache.cache[name] = (size, None, lines, full_name)  # without a time, so it isn't looked up on disk


if ready := os.environ.pop(fork_server.READY, None):  # this is the fork server, and torch is loaded
    gc.collect()
    gc.freeze()  # otherwise a collection in a rank would copy the pages of all these objects
    Path(ready).touch()
