"""Start a lab on n ranks from a notebook or a shell, watch it, collect its records, leave no process behind.

Ranks are started by PyTorch's elastic agent, as torchrun does it, from a fork server that has torch loaded:
the first launch waits for one `import torch`, later ones take a few tenths of a second.

From top to bottom: what a caller uses (`launch`, `run_on_ranks`), the loop that watches one run (`Job`), the agent in
its thread, and how the ranks of one machine find each other.
"""

from __future__ import annotations

from labs.kit.fork_server import signals_held, start_fork_server  # before torch: this process and the server load it

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
    """The records of one launch, with the monitor's trace and what the ranks printed."""

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

    `lab` is the name of a module in labs/, or "package.module" for one of your own. A parameter may be a function or
    class of a notebook's cell. What ranks print is shown when they are done, each line with its rank.
    Raises BadInput before anything starts, RankFailed with the first failing rank's traceback, RankTimeout
    after `timeout_s` seconds. Whatever happens, also an interrupt, no process of the run survives it.
    With COURSE_ROOM set, the records are kept there, too; with COURSE_SMOKE=1, every launch is a smoke run.
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
    """Call `function(*args)` on `nproc` ranks with a process group, and return what each returned, in rank order.

    The function may be defined in a notebook cell. With `device="auto"` each rank has a GPU of its own if there are
    enough, otherwise a CPU core, and CUDA shows it no GPU. Ranks share cores if there are too few: for correctness
    only, never for timing. Raises as `launch` does.
    """
    return _run(Job(RunFunction(function, args), place(nproc, device, True), timeout_s, View()))


def _smoke_if_asked(module: ModuleType, parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters, with smoke=True where COURSE_SMOKE=1, the lab has that field and the caller does not fill it.

    So a test runs whole notebooks, as they are, in a fraction of their time. Labs with WHOLE_IN_NOTEBOOKS = True, of
    which a smoke run would lack facts that the notebook shows, run as ever.
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
        # A module of a class of its own, which pickle can't take by itself: a cell's function may use its switches.
        copyreg.pickle(type(_module), lambda module: (importlib.import_module, (module.__name__,)))

POLL_S = 0.02
ONE_AT_A_TIME = threading.Lock()  # two runs of one kernel would share cores and spoil each other's timings


class Job:
    """One run of `body(rank)`, a picklable callable, on a rank for each device in `placement`."""

    def __init__(self, body: Callable, placement: list, timeout_s: float, view: View) -> None:
        self.body, self.placement, self.timeout_s, self.view = cloudpickle.dumps(body), placement, timeout_s, view
        self.trace: Trace | None = None
        self.seconds, self.printed = 0.0, ""
        self.results: list[Any] = []

    def run(self) -> list[Any]:
        """What `body` returned, by rank; raises RankFailed or RankTimeout. Leaves no process, port or file behind."""
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
                self.view.read()  # how far it came, while that can still be read
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
                self.watch.kill()  # the agent sees it at once, and ends

    def _end(self) -> None:
        """Kill what is left, remove the folder, wait for the agent, which then has nothing left to do."""
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
        """Start the ranks and wait until all are done or one has failed."""
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
        except BaseException as e:  # its text only: its frames would keep the rendezvous' port open
            self.failed, self.error = True, f"{type(e).__name__}: {e}"


class NoLogs(LogsSpecs):
    """The agent redirects nothing: ranks do it themselves, also on macOS, where it cannot."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Empty names for all ranks."""
        none = dict.fromkeys(envs, "")
        for env in envs.values():
            env["TORCHELASTIC_ERROR_FILE"] = ""
        return LogsDest(stdouts=none, stderrs=none, error_files=none)

    @property
    def root_log_dir(self) -> str:
        """None is used."""
        return ""


RENDEZVOUS = "labs-one-machine"
ADDRESS = "127.0.0.1"


class OneMachine(RendezvousHandler):
    """A store in the launching process, on a port the system chooses; complete at once, since there is one agent.

    The elastic agent's own "c10d" rendezvous serves many machines and begins with a random pause of up to 0.3 s, so
    that they do not all start at once.
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
        """Ranks connect to this store, too, instead of making one of their own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Store, rank and number of agents, and where ranks find the store."""
        where = RendezvousStoreInfo(ADDRESS, self.port)
        return RendezvousInfo(PrefixStore(self.run_id, self.store), 0, 1, where)

    def get_backend(self) -> str:
        """The name under which this class is registered."""
        return RENDEZVOUS

    def get_run_id(self) -> str:
        """As given by the launcher."""
        return self.run_id

    def is_closed(self) -> bool:
        """Never: there is one rendezvous per run, without restarts."""
        return False

    def set_closed(self) -> None:
        """Nobody else would have to hear of it."""

    def num_nodes_waiting(self) -> int:
        """Nobody waits to join."""
        return 0

    def shutdown(self) -> bool:
        """Close the port."""
        del self.store
        return True


if RENDEZVOUS not in _compat.rendezvous:
    rendezvous_handler_registry.register(RENDEZVOUS, OneMachine)
