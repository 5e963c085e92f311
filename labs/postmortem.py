"""Which rank, which collective, which line: what do the files of a training that hung or died tell?

    python -m labs.postmortem hang/                 # a folder with rank0.recorder.json, rank0.stacks.txt, ...
    python -m labs.postmortem /tmp/nccl_dumps       # NCCL's own dumps, <prefix><rank>, copied here from all machines

The diagnosis comes first, then what each rank did last. A folder comes from labs.watch.evidence, from
labs/recipes/train_ddp_debug.py, or from NCCL, with TORCH_NCCL_DUMP_ON_TIMEOUT=1
TORCH_FR_DUMP_TEMP_FILE=/path/prefix_ in a folder that is there. Older torch has TORCH_NCCL_DEBUG_INFO_TEMP_FILE for it
and needs TORCH_NCCL_TRACE_BUFFER_SIZE=2000, now the default; torch 2.13 knows both of these names, too.
Exit code: 0, 1 if the files do not tell, 2 for bad input. Nothing that the files hold is run, and nothing is sent
anywhere.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from labs.kit.cli import closed_pipe_is_no_error, fail
from labs.watch.diagnosis import Diagnosis, Job, diagnose
from labs.watch.evidence import RankEvidence, read

PROG = "python -m labs.postmortem"
MOST_ROWS = 64
HEAD = ("rank", "last collective", "number", "line", "end")


def answer(evidence: Sequence[RankEvidence], found: Diagnosis) -> Iterator[str]:
    """The diagnosis, the table of ranks, then the files that could not be used: lines."""
    yield from textwrap.wrap(str(found), 112, subsequent_indent="  ")
    yield ""
    yield from table(evidence, found)
    yield from (f"not used: {problem}" for e in evidence for problem in e.problems)


def table(evidence: Sequence[RankEvidence], found: Diagnosis) -> Iterator[str]:
    """One line for each rank, those that are named first if there are many."""
    job = Job(evidence)
    order = sorted(job.of, key=lambda r: (len(job.of) > MOST_ROWS and r not in found.ranks, r))
    rows = [HEAD, *(_row(job, r) for r in order[:MOST_ROWS])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
    if len(order) > MOST_ROWS:
        yield f"and {len(order) - MOST_ROWS} more ranks"


def _row(job: Job, rank: int) -> tuple[str, ...]:
    """Rank, last collective, its number in its group, the rank's own line, its end."""
    of, call = job.of[rank], job.last(rank)
    line = job.stack_line(rank) or next(iter(call.own if call else ()), None)
    name = call.name if call else "-" if of.calls is None else "none"
    number = f"{call.number} of group {call.group}" if call else "-"
    return str(rank), name, number, f"{line}"[:60] if line else "-", _end(of)


def _end(of: RankEvidence) -> str:
    if of.is_silent:
        return "left nothing"
    end = of.end
    if end is None:
        return of.crash or "not told"
    if end.error:
        return end.error.splitlines()[0][:60]
    if end.signal or of.crash:
        return end.signal or of.crash
    return "still ran" if end.exit_code is None else f"exit code {end.exit_code}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="what the ranks left")
    folder = parser.parse_args().folder
    try:
        evidence = read(folder)
    except OSError as e:
        fail(PROG, f"{folder}: {e.strerror}")
    if not evidence:
        fail(PROG, f"{folder} holds no evidence: rank0.recorder.json, rank0.stacks.txt, rank0.end.json or NCCL's dumps")
    found = diagnose(evidence)
    print("\n".join(answer(evidence, found)))
    sys.exit(0 if found.sure else 1)


if __name__ == "__main__":
    with closed_pipe_is_no_error():
        main()
