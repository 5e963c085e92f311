"""Start a lab on n ranks from a notebook or a shell, watch it, collect its records, leave no process behind.

PyTorch's elastic agent starts the ranks, as under torchrun, from a fork server that has torch loaded. The first launch
waits for one `import torch`; later ones take a few tenths of a second.

In order: the public functions (`launch`, `run_on_ranks`), the loop that watches one run (`Job`), the agent's thread,
and the rendezvous of ranks on one machine.
"""

from __future__ import annotations

from labs.kit.fork_server import signals_held, start_fork_server  # first: the server imports torch while we do

# isort: split
import copyreg
import dataclasses
import importlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from labs.kit import _compat, record, room, supervise, timeouts
from labs.kit.display import View, open_view
from labs.kit.errors import require
from labs.kit.failure import RankFailed, RankTimeout, Watch
from labs.kit.hardware import Device, place, why_cores
from labs.kit.lab import check_layout, lab_module, make_config, named_functions
from labs.kit.monitor import Monitor, Trace
from labs.kit.rank_process import RunFunction, RunLab, as_rank

__all__ = ["RankFailed", "RankTimeout", "Run", "launch", "run_on_ranks"]


class Run(record.Records):
    """The records of one launch, the monitor's trace and what the ranks printed."""

    def __init__(self, records: list[record.Record], trace: Trace | None, seconds: float, printed: str = "") -> None:
        super().__init__(records)
        self.monitor, self.seconds, self.printed = trace, seconds, printed


def launch(
    lab: str,
    nproc: int = 2,
    *,
    timeout_s: float = timeouts.LAUNCH_S,
    device: str = "auto",
    oversubscribe: bool = False,
    view: View | None = None,
    **parameters: Any,
) -> Run:
    """Run `lab` on `nproc` ranks with the given parameters of its Config, and return its records.

    `lab` is the name of a module in labs/, or "package.module" for your own. A parameter may be a function or class
    from a notebook cell. After the run, shows what ranks printed, each line with its rank. Raises BadInput before
    anything starts, RankFailed with the first failing rank's traceback, or RankTimeout after `timeout_s` seconds. No
    process survives the run, even after an interrupt. With COURSE_ROOM set, also saves the records there; with
    COURSE_SMOKE=1, every launch is a smoke run.
    """
    module = lab_module(lab)
    parameters, functions = named_functions(parameters)
    parameters = _smoke_if_asked(module, parameters)
    config = make_config(module, parameters)
    placement = place(nproc, device, oversubscribe)
    require(timeout_s > 0, f"timeout_s must be positive, not {timeout_s}")
    check_layout(module, config, nproc)
    with open_view(lab, nproc) if view is None else view as v:
        v.note(why_cores(placement, device))
        job = Job(RunLab(lab, parameters, functions), placement, timeout_s, v)
        results = _run(job)
    run = Run(record.attach_provenance(results[0]), job.trace, job.seconds, job.printed)
    room.keep_records(run)
    return run


def run_on_ranks(
    function: Callable[..., Any],
    nproc: int = 2,
    *args: Any,
    timeout_s: float = timeouts.FUNCTION_S,
    device: str = "cpu",
) -> list[Any]:
    """Call `function(*args)` on `nproc` ranks in a process group; return their results in rank order.

    The function may be defined in a notebook cell. With `device="auto"`, each rank gets its own GPU if there are
    enough; otherwise a CPU core, and it sees no GPU. If there are too few cores, ranks share them: right for
    correctness, never for timing. Raises as `launch` does.
    """
    return _run(Job(RunFunction(function, args), place(nproc, device, True), timeout_s, View()))


def _smoke_if_asked(module: ModuleType, parameters: dict[str, Any]) -> dict[str, Any]:
    """Add smoke=True to the parameters if COURSE_SMOKE=1, the lab has that field and the caller doesn't set it.

    So a test runs unchanged notebooks in a fraction of their time. Labs with WHOLE_IN_NOTEBOOKS = True run in full,
    because a smoke run would lack something that the notebook shows.
    """
    fields = {f.name for f in dataclasses.fields(module.Config)}
    asked = os.environ.get("COURSE_SMOKE") == "1" and not getattr(module, "WHOLE_IN_NOTEBOOKS", False)
    return {"smoke": True} | parameters if asked and "smoke" in fields else parameters


def _run(job: Job) -> list[Any]:
    try:
        return job.run()
    finally:
        print(job.printed, end="")


for _name, _module in list(sys.modules.items()):
    if _name.startswith("torch.backends") and type(_module) is not ModuleType:
        # Its class isn't ModuleType, so pickle needs help. A cell's function may use its switches.
        copyreg.pickle(type(_module), lambda module: (importlib.import_module, (module.__name__,)))

POLL_S = 0.02
ONE_AT_A_TIME = threading.Lock()  # two runs in one kernel would share cores and disturb each other's timings


class Job:
    """One run of `body(rank)`, a picklable callable, with one rank per device in `placement`."""

    def __init__(self, body: Callable, placement: list, timeout_s: float, view: View) -> None:
        self.body, self.placement, self.timeout_s, self.view = cloudpickle.dumps(body), placement, timeout_s, view
        self.trace: Trace | None = None
        self.seconds, self.printed = 0.0, ""
        self.results: list[Any] = []

    def run(self) -> list[Any]:
        """Return what `body` returned, by rank. Raises RankFailed or RankTimeout. Leaves nothing behind."""
        with signals_held() as self.noted:
            server = start_fork_server()
            server.wait_until_warm(self._check)
            with self._alone():
                self.watch = Watch(server.run_folder(), server.server_pid())
                try:
                    self._watched()
                finally:
                    self._end()
        return self.results

    @contextmanager
    def _alone(self) -> Iterator[None]:
        while not ONE_AT_A_TIME.acquire(timeout=0.1):
            self._check()
        try:
            yield
        finally:
            ONE_AT_A_TIME.release()

    def _check(self) -> None:
        if self.noted:
            raise KeyboardInterrupt

    def _watched(self) -> None:
        start = time.monotonic()
        self.agent = Agent(self.body, self.placement, self.watch.folder, self.timeout_s)
        self.agent.start()
        used = {d.index for d in self.placement if d.kind != "cpu"}
        with Monitor(self.watch.pids, gpus=used) as monitor:
            self.view.watch(monitor, self.watch.folder / "progress")
            try:
                self._poll_until(start + self.timeout_s)
            finally:
                self.seconds = time.monotonic() - start
                self.view.read()  # the last progress, while the file exists
        self.trace = monitor.trace
        results = [self.watch.folder / f"result-{rank}" for rank in range(len(self.placement))]
        if self.agent.failed or not all(r.exists() for r in results):
            raise self.watch.failure(self.agent.exit_codes, self.agent.error)
        self.results = [cloudpickle.loads(r.read_bytes()) for r in results]

    def _poll_until(self, deadline: float) -> None:
        while self.agent.is_alive():
            self.agent.join(POLL_S)
            self._check()
            if time.monotonic() > deadline:
                raise self.watch.timeout(self.timeout_s, len(self.placement))
            self.view.refresh()
            if self.watch.is_lost():
                self.watch.kill()  # the agent notices at once, and ends

    def _end(self) -> None:
        """Kill what is left, remove the folder, and wait for the agent to end."""
        self.printed = self.watch.output()
        supervise.clear(self.watch.folder)
        if hasattr(self, "agent"):
            self.agent.join(timeout=10)


class Agent(threading.Thread):
    """`elastic_launch` in a thread: it blocks, and in the main thread it would replace the kernel's signal handlers."""

    def __init__(self, body: bytes, placement: list[Device], folder: Path, timeout_s: float) -> None:
        super().__init__(name="elastic-agent", daemon=True)
        self.folder, self.ranks = folder, len(placement)
        self.arguments = (body, str(folder), placement, timeout_s, time.time())
        self.failed = False
        self.exit_codes: dict[int, int] = {}
        """Exit code of the rank that the agent saw end first; negative for a signal."""
        self.error = ""

    def run(self) -> None:
        """Start the ranks and wait until all are done or one fails."""
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self.ranks,
            max_restarts=0,
            run_id=self.folder.name,
            start_method="forkserver",
            monitor_interval=0.02,
            local_addr=ADDRESS,
            rdzv_backend=RENDEZVOUS,
            rdzv_endpoint=ADDRESS,
            logs_specs=NoLogs(),
        )
        try:
            with supervise.main_left_alone():
                elastic_launch(config, as_rank)(*self.arguments)
        except ChildFailedError as e:
            self.failed, self.exit_codes = True, {rank: f.exitcode for rank, f in e.failures.items()}
        except BaseException as e:  # keep only its text: its frames would keep the rendezvous port open
            self.failed, self.error = True, f"{type(e).__name__}: {e}"


class NoLogs(LogsSpecs):
    """Redirects nothing. Ranks redirect their own output, even on macOS, where the agent can't."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        none = dict.fromkeys(envs, "")
        for env in envs.values():
            env["TORCHELASTIC_ERROR_FILE"] = ""
        return LogsDest(stdouts=none, stderrs=none, error_files=none)

    @property
    def root_log_dir(self) -> str:
        return ""


RENDEZVOUS = "labs-one-machine"
ADDRESS = "127.0.0.1"


class OneMachine(RendezvousHandler):
    """A rendezvous for one agent: a store in the launching process, on a free port, complete at once.

    torch's "c10d" rendezvous serves many machines, so it starts with a random pause of up to 0.3 s.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self.run_id = parameters.run_id
        listener = socket.create_server((ADDRESS, 0))  # not reachable from other machines
        self.port = listener.getsockname()[1]
        # The store closes the descriptor.
        self.store = TCPStore(
            ADDRESS,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=timeouts.IMPORT_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    @property
    def use_agent_store(self) -> bool:
        """Make ranks connect to this store instead of making one."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store, the agent's rank, the number of agents, and the store's address."""
        where = RendezvousStoreInfo(ADDRESS, self.port)
        return RendezvousInfo(PrefixStore(self.run_id, self.store), 0, 1, where)

    def get_backend(self) -> str:
        return RENDEZVOUS

    def get_run_id(self) -> str:
        return self.run_id

    def is_closed(self) -> bool:
        """Return False: there is one rendezvous per run, without restarts."""
        return False

    def set_closed(self) -> None:
        """Do nothing, since there is no other agent."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no other agent can join."""
        return 0

    def shutdown(self) -> bool:
        del self.store
        return True


if RENDEZVOUS not in _compat.rendezvous:
    rendezvous_handler_registry.register(RENDEZVOUS, OneMachine)
