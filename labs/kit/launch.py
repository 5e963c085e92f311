"""Start a lab on n ranks from a notebook or a shell, watch it, collect its records, leave no process behind.

Ranks are started by PyTorch's elastic agent, as torchrun does it, from a fork server that has torch loaded:
the first launch waits for one `import torch`, later ones take a few tenths of a second.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from labs.kit import cli, record, room
from labs.kit.backstage import start_fork_server  # before what imports torch: both load it at the same time
from labs.kit.failure import RankFailed, RankTimeout
from labs.kit.job import Job
from labs.kit.monitor import Trace
from labs.kit.rank import RunFunction, RunLab, place
from labs.kit.view import View, open_view

__all__ = ["RankFailed", "RankTimeout", "Run", "launch", "run_on_ranks", "start_fork_server"]


class Run(record.Records):
    """The records of one launch, with the monitor's trace and what the ranks printed."""

    def __init__(self, records: list[record.Record], trace: Trace | None, seconds: float, printed: str = "") -> None:
        super().__init__(records)
        self.monitor, self.seconds, self.printed = trace, seconds, printed


def launch(
    lab: str, nproc: int = 2, *, timeout_s: float = 120.0, device: str = "auto", oversubscribe: bool = False,
    view: View | None = None, **parameters: Any,
) -> Run:  # fmt: skip
    """Run `lab` on `nproc` ranks with the given parameters of its Config, and return its records.

    `lab` is the name of a module in labs/, or "package.module" for one of your own. What ranks print is shown
    when they are done, each line with its rank.
    Raises BadInput before anything starts, RankFailed with the first failing rank's traceback, RankTimeout
    after `timeout_s` seconds. Whatever happens, also an interrupt, no process of the run survives it.
    With COURSE_ROOM set, the records are kept there, too; with COURSE_SMOKE=1, every launch is a smoke run.
    """
    module = cli.lab_module(lab)
    parameters = _smoke_if_asked(module, parameters)
    config = cli.make_config(module, parameters)
    placement = place(nproc, device, oversubscribe)
    cli.require(timeout_s > 0, f"timeout_s must be positive, not {timeout_s}")
    cli.check_layout(module, config, nproc)
    with open_view(lab, nproc) if view is None else view as v:
        job = Job(RunLab(lab, parameters), placement, timeout_s, v)
        results = _run(job)
    run = Run(record.attach_provenance(results[0]), job.trace, job.seconds, job.printed)
    room.keep_records(run)
    return run


def run_on_ranks(function: Callable[..., Any], nproc: int = 2, *args: Any, timeout_s: float = 30.0) -> list[Any]:
    """Call `function(*args)` on `nproc` ranks with a process group, and return what each returned, in rank order.

    The function may be defined in a notebook cell. Ranks share cores if there are too few: for correctness
    only, never for timing. Raises as `launch` does.
    """
    return _run(Job(RunFunction(function, args), place(nproc, "cpu", True), timeout_s, View()))


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
