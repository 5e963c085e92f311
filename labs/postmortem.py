"""Which rank, which collective, which line: what do the files of a training run that hung or died show?

    python -m labs.postmortem hang/                 # a folder with rank0.recorder.json, rank0.stacks.txt, ...
    python -m labs.postmortem /tmp/nccl_dumps       # NCCL's own dumps, <prefix><rank>, copied here from all machines
    python -m labs.postmortem                       # NCCL's dumps where torch writes them on this machine

The diagnosis comes first, then what each rank did last. A folder comes from labs.watch, from
labs/recipes/train_ddp_debug.py, or from NCCL: when a collective times out, torch writes its flight recorder to
~/.cache/torch/comm_lib_trace_rank_N, or to TORCH_FR_DUMP_TEMP_FILE=/path/prefix_ in a folder that exists (older torch:
TORCH_NCCL_DEBUG_INFO_TEMP_FILE, with TORCH_NCCL_TRACE_BUFFER_SIZE=2000). torch's own torchfrtrace compares such dumps.
This adds each rank's line, a verdict on which rank is wrong, and gloo, on whose records torchfrtrace of torch 2.13
fails. It was tested on dumps in torch's format, not on a hang under NCCL.
Exit code: 0, 1 if the cause stays unknown, 2 for bad input. It runs nothing from the files and sends nothing anywhere.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from labs.kit.cli import closed_pipe_is_no_error, fail
from labs.watch.diagnosis import Diagnosis, Job, diagnose, size
from labs.watch.evidence import NCCL, OURS, RankEvidence, read, torch_dump_prefix

PROG = "python -m labs.postmortem"
MOST_ROWS = 64
HEAD = ("rank", "last collective", "state", "number", "line", "end")


def answer(evidence: Sequence[RankEvidence], found: Diagnosis) -> Iterator[str]:
    """Yield lines: the diagnosis, the table of ranks, how many files are NCCL's dumps, and files that can't be used."""
    yield from textwrap.wrap(str(found), 112, subsequent_indent="  ")
    yield ""
    yield from table(evidence, found)
    names = [name for e in evidence for name in e.files]
    dumps = [name for name in names if NCCL.fullmatch(name) and not OURS.fullmatch(name)]
    if dumps:
        yield f"{len(dumps)} of {len(names)} files are torch's own dumps of NCCL; torchfrtrace compares these alone"
    yield from (f"not used: {problem}" for e in evidence for problem in e.problems)


def table(evidence: Sequence[RankEvidence], found: Diagnosis) -> Iterator[str]:
    """Yield a head and a line per rank. Above MOST_ROWS ranks, those in the diagnosis come first, others are cut."""
    job = Job(evidence)
    order = sorted(job.of, key=lambda r: (len(job.of) > MOST_ROWS and r not in found.ranks, r))
    rows = [HEAD, *(_row(job, r) for r in order[:MOST_ROWS])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
    if len(order) > MOST_ROWS:
        yield f"and {len(order) - MOST_ROWS} more ranks"


def _row(job: Job, rank: int) -> tuple[str, ...]:
    """Return a rank's cells, in the order of HEAD."""
    of, call = job.of[rank], job.last(rank)
    line = job.stack_line(rank) or next(iter(call.own if call else ()), None)
    name = "-" if of.calls is None else "none"
    if call:
        name = f"{call.name} of {size(call)}" if call.dtypes else call.name
    state = call.state if call and call.backend == "nccl" else "-"  # gloo's never changes
    number = f"{call.number} of group {call.group}" if call else "-"
    return str(rank), name[:48], state, number, f"{line}"[:60] if line else "-", _end(of)


def _end(of: RankEvidence) -> str:
    if of.is_silent:
        return "left nothing"
    end = of.end
    if end is None:
        return of.crash or "unknown"
    if end.error:
        return end.error.splitlines()[0][:60]
    if end.signal or of.crash:
        return end.signal or of.crash
    return "still ran" if end.exit_code is None else f"exit code {end.exit_code}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.error = lambda message: fail(PROG, message)  # one line, without the usage
    parser.add_argument("folder", type=Path, nargs="?", help="what the ranks left; without it, torch's place for dumps")
    folder, prefix = parser.parse_args().folder, ""
    if folder is None:
        folder, prefix = (path := torch_dump_prefix(os.environ)).parent, path.name
    try:
        evidence = read(folder, prefix)
    except OSError as e:
        fail(PROG, f"{folder}: {e.strerror}")
    if not evidence:
        what = f"no dumps {prefix}0, {prefix}1, ..." if prefix else "no evidence: rank0.recorder.json or NCCL's dumps"
        fail(PROG, f"{folder} holds {what}")
    found = diagnose(evidence)
    print("\n".join(answer(evidence, found)))
    sys.exit(0 if found.sure else 1)


if __name__ == "__main__":
    with closed_pipe_is_no_error():
        main()
