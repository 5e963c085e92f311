"""`python -m labs.X` and torchrun: run the lab, print a table of its records, save them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
from pathlib import Path
from typing import Any

from labs.kit import cli, record
from labs.kit.dist import process_group
from labs.kit.failure import RankFailed
from labs.kit.launch import launch
from labs.kit.measure import estimate
from labs.kit.monitor import Monitor, Trace
from labs.kit.rank import RunLab, place
from labs.kit.view import TerminalView

SHORT_S = 2.0  # in less, the start and end of the ranks themselves look like a neighbour


def run_here(lab: str, command: Any) -> int:
    """`python -m labs.X`: launch ranks on this machine. Returns the exit code."""
    options, values = command.launch, _values(command.config)
    try:
        run = launch(lab, options.nproc, timeout_s=options.timeout_s, device=options.device,
                     oversubscribe=options.oversubscribe, view=TerminalView(lab), **values)  # fmt: skip
    except RankFailed as e:
        print(e, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: all ranks stopped, nothing was recorded", file=sys.stderr)
        return 130
    return report(run, run.monitor, command.output.out)


def run_under_torchrun(lab: str, command: Any) -> int:
    """Be one rank of a job that torchrun has started; rank 0 prints and saves the records. Returns the exit code."""
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    cli.check_layout(cli.lab_module(lab), command.config, int(os.environ["WORLD_SIZE"]))
    placement = place(local_size, command.launch.device, command.launch.oversubscribe)
    body = RunLab(lab, _values(command.config))
    view = TerminalView(lab) if os.environ["RANK"] == "0" else None
    with process_group(placement[local_rank], timeout_s=command.launch.timeout_s) as rank:
        hosts = rank.gather((rank.rank, os.getpid(), socket.gethostname()))
        pids = {r: pid for r, pid, host in hosts if host == socket.gethostname()}
        if view:
            rank.on_progress = view.progress
        with Monitor(lambda: pids) if local_rank == 0 else contextlib.nullcontext() as monitor:
            records = body(rank)
    if view is None:
        return 0
    view.close()
    machines = {"machines": len({host for *_, host in hosts})}  # the rest of the provenance is that of rank 0's
    attached = record.attach_provenance(records)
    kept = record.Records(dataclasses.replace(r, provenance=r.provenance | machines) for r in attached)
    return report(kept, monitor.trace, command.output.out)


def _values(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def report(records: record.Records, trace: Trace | None, out: Path | None) -> int:
    """Print a table of `records` and save them to `out`, if given. Returns the exit code.

    If they cannot be saved (disk full, read-only), they go to standard output instead: nothing is lost.
    """
    import pandas

    rows = [
        {"metric": r.metric, **r.case, "median [95 %]": str(estimate(r.samples, r.unit)), "n": len(r.samples),
         "kind": r.kind}
        for r in records
    ]  # fmt: skip
    table = pandas.DataFrame(rows).astype(object).fillna("")
    print(table.to_string(index=False, max_colwidth=60) if rows else "no records")
    if trace is not None and trace.t_s[-1:] > [SHORT_S] and (warning := trace.disturbance()):
        print(warning, file=sys.stderr)
    if out is None:
        return 0
    try:
        print(f"saved to {records.save(out)}")
    except OSError as e:
        print("".join(records.lines()), end="")
        print(f"could not save to {out} ({e.strerror}): the records are printed above instead", file=sys.stderr)
        return 1
    return 0
