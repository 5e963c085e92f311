"""Does a training script compute what it seems to, and what makes it slow? Runs it unchanged for some steps.

    python -m labs.doctor train.py --lr 0.1                     # options of labs.doctor come before the script
    torchrun --nproc-per-node 2 -m labs.doctor train.py         # or: srun --ntasks 2 python -m labs.doctor train.py
    python -m labs.doctor --compare doctor-report/report.json train.py      # after a fix
    python -m labs.doctor -m my_package.train --lr 0.1          # what `python -m my_package.train --lr 0.1` runs

After some warm-up steps, it measures --steps unchanged steps. Then it tries fixes for --seconds: steps without one cost
(waiting for data, exchange, ...) alternate with unchanged steps. After each try it restores model, optimizer and random
state. Then it ends the script. A step is a call of a PyTorch optimizer's step().

The page shows wrong results first, then what is slow: the largest problem, three more, and where a step's time goes.
--all prints the rest, which is also in report.html and report.json in the --out folder. Exit code: 0; 1 if no step
could be measured (the page says why); 2 for bad input.

The doctor writes only its report. Your script still writes its own files, logs and checkpoints; with --copy it runs in
a temporary copy of the folder that you start it in. It gets its own TMPDIR and no terminal. Ctrl-C ends it and reports
what is known so far. No process stays behind. docs/DOCTOR.md lists what the doctor doesn't detect.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from pathlib import Path

from labs.doctor import static_rules, supervisor
from labs.doctor.bottlenecks import Match
from labs.doctor.profile import Profile
from labs.doctor.supervisor import FIRST_S, LEAST_S, TIMES_LONGEST
from labs.kit import as_main
from labs.kit.cli import closed_pipe_is_no_error, fail
from labs.kit.errors import BadInput, naming, require
from labs.kit.place import Place

PROG = as_main.typed("train-doctor", "labs.doctor")
MOST_STEPS = 10_000
MOST_COPIED = 1 << 30  # Bytes


def options(args: list[str]) -> argparse.Namespace:
    """Return the options, with the script's `argv` and `module`, and `compare` loaded. Raises BadInput."""
    parser = argparse.ArgumentParser(
        PROG,
        f"{PROG} [options] train.py ...",
        as_main.examples(__doc__, "labs.doctor", PROG),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = functools.partial(fail, PROG)
    add = parser.add_argument
    add("--steps", type=int, default=30, help="that are measured as they are (default 30)")
    add("--seconds", type=float, default=40.0, help="for trying fixes, on top (default 40; 0: none)")
    limits = f"{FIRST_S:g} for the first step, then {TIMES_LONGEST} times the longest so far, {LEAST_S:g} at least"
    add("--timeout", type=float, help=f"seconds without a step, then it is ended (default: {limits})")
    add("--out", type=Path, default=Path("doctor-report"), help="folder for the report (default doctor-report)")
    add("--compare", type=Path, metavar="BEFORE.json", help="report.json of a run before a fix")
    add("--copy", action="store_true", help="run a copy of this folder: what the script writes below it is removed")
    add("--all", action="store_true", help="print all findings, and what is fine or not known")
    add("--show-output", action="store_true", help="print what the script prints")
    given, given.argv, given.module = as_main.parse(parser, args)
    require(1 <= given.steps <= MOST_STEPS, f"--steps must be from 1 to {MOST_STEPS}, not {given.steps}")
    for name, least in (("seconds", 0), ("timeout", 1)):
        value = getattr(given, name)
        require(value is None or least <= value < float("inf"), f"--{name} must be a number from {least} on")
    script, given.out = Path(given.argv[0]), given.out.absolute()
    require(script.is_file() and os.access(script, os.R_OK), f"there is no script {script}")
    require(script.suffix != ".ipynb", f"{script} is a notebook: jupyter nbconvert --to script makes a script of it")
    there = next(p for p in (given.out, *given.out.parents) if p.exists())
    require(there.is_dir() and os.access(there, os.W_OK), f"--out: cannot write to a folder {there}")
    if given.compare is not None:
        from labs.doctor import report  # imports torch

        with naming("--compare"):
            given.compare = report.load(given.compare)
            require(bool(given.compare.seen), "that run has measured no steps: there is nothing to compare")
    if given.copy:
        given.argv[0] = _script_below(Path.cwd(), given.argv[0])
    return given


def _script_below(folder: Path, script: str) -> str:
    """Return the script's path relative to `folder`. Raises BadInput if it's outside, or if the folder is too large."""
    path = os.path.relpath(script, folder)
    require(not path.startswith(".."), f"--copy copies {folder}, and {script} is not in it: start it in a folder above")
    bytes_ = 0
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in supervisor.NOT_COPIED]
        bytes_ += sum(os.lstat(os.path.join(place, name)).st_size for name in files)
        require(bytes_ <= MOST_COPIED, f"--copy: {folder} holds more than {MOST_COPIED >> 30} GB")
    return path


def print_report(profiles: list[Profile], given: argparse.Namespace, machine: int, matches: list[Match]) -> None:
    """Print the page, and write the report."""
    from labs.doctor import compare, report

    found = report.make(profiles, matches)
    out = given.out if machine == 0 else given.out.with_name(f"{given.out.name}-machine-{machine}")
    if len(profiles) == 1 and (rank := report.group_of(profiles[0])[0]) != profiles[0].rank:  # the script set it
        out = given.out.with_name(f"{given.out.name}-rank-{rank}")
    lines = [report.page(found, given.all)]
    if given.compare is not None and found.seen:
        lines.append(compare.page(given.compare, found))
    try:  # save before printing: the reader of a pipe may close it early
        lines.append("report: " + ", ".join(map(str, report.save(found, out))))
    except OSError as e:
        lines.append(f"could not write to {out} ({e.strerror}): this page is all there is")
    with closed_pipe_is_no_error():
        print("\n".join(lines))


def main() -> None:
    """Check, run the script, report."""
    try:
        given, place = options(sys.argv[1:]), Place.of(os.environ, one_machine=False)
        # Before the run: an error here costs no measurement, and the script can't have been edited meanwhile
        matches = [] if place.local_rank else static_rules.check(Path(given.argv[0]))
        profiles = supervisor.examine(given, place, lambda found: print_report(found, given, place.machine, matches))
    except BadInput as e:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            sys.exit(2)  # rank 0 says why
        fail(PROG, str(e))
    sys.exit(0 if any(f.step_s for f in profiles) else 1)


if __name__ == "__main__":
    main()
