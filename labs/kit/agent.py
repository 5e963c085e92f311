"""PyTorch's elastic agent, as torchrun uses it, for the ranks of one run on this machine."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from labs.kit import rendezvous
from labs.kit.hardware import Device
from labs.kit.rank import as_rank


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
            min_nodes=1, max_nodes=1, nproc_per_node=self.ranks, max_restarts=0, run_id=self.folder.name,
            start_method="forkserver", monitor_interval=0.02, local_addr=rendezvous.ADDRESS,
            rdzv_backend=rendezvous.BACKEND, rdzv_endpoint=rendezvous.ADDRESS, logs_specs=NoLogs(),
        )  # fmt: skip
        try:
            with _main_left_alone():
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


@contextmanager
def _main_left_alone() -> Iterator[None]:
    """Keep multiprocessing from running the caller's script again in every rank: a rank gets all it needs pickled.

    By this name multiprocessing knows a main module that is not to be imported.
    """
    main = sys.modules["__main__"]
    before = main.__spec__
    main.__spec__ = ModuleSpec("__main__", None)
    try:
        yield
    finally:
        main.__spec__ = before
