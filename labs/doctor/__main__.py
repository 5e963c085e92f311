"""Does a training script compute what it seems to, and what makes it slow? Runs it unchanged for some steps.

    python -m labs.doctor train.py --lr 0.1                     # options of labs.doctor come before the script
    python -m labs.doctor --steps 50 --timeout 3600 train.py    # a first step that takes more than a quarter of an hour
    torchrun --nproc-per-node 2 -m labs.doctor train.py         # or: srun --ntasks 2 python -m labs.doctor train.py
    python -m labs.doctor --compare doctor-report/report.json train.py      # after a fix
    python -m labs.doctor -m my_package.train --lr 0.1          # what `python -m my_package.train --lr 0.1` runs

It takes some steps to warm up, --steps as they are, and for --seconds it tries fixes: steps with one thing otherwise
(without waiting for data, without exchange, ...) in turn with steps as they are. Model, optimizer and random state are
put back after each. Then the script is ended. A step is a call of the `step` of an optimizer of torch.

The page names wrong results first, then what is slow: the largest problem, three more, and where a step's time goes.
--all prints the rest, which is also in report.html and report.json below --out. Exit code: 0, 1 if no step could be
measured (the page says why), 2 for bad input.

The doctor writes nothing but its report. Your script writes its own files, logs and checkpoints; with --copy it runs in
a copy of the folder that you start it in, which is removed. It has a TMPDIR of its own and no terminal. Ctrl-C ends it
and reports what is known. No process is left.

Loops of transformers' Trainer, Lightning and Accelerate are measured as any other, and fixes name their options. Ranks
that a script starts itself (mp.spawn) are not seen: start them by torchrun, srun or mpirun. One rank of each machine
reports on all ranks there.

Not detected: whether the data, the labels, the loss or the model are the right ones; faults that appear later than the
steps that are measured, or only with more ranks; slow kernels (python -m labs.profile_step); what code within
torch.compile does; optimizers that are not of torch.optim. docs/DOCTOR.md has the list.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import time
import typing
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from labs.doctor import static_rules, supervisor
from labs.doctor.profile import Profile
from labs.doctor.static_rules import Match
from labs.doctor.step_timeout import FIRST_S, LEAST_S, TIMES_LONGEST
from labs.doctor.supervisor import Order
from labs.kit import as_main
from labs.kit.cli import closed_pipe_is_no_error, fail
from labs.kit.errors import BadInput, did_you_mean, naming, require
from labs.kit.place import Place

PROG = as_main.typed("train-doctor", "labs.doctor")
MOST_STEPS = 10_000
MOST_COPIED = 1 << 30  # Bytes


@dataclass(frozen=True)
class Wanted:
    """By the command line."""

    order: Order
    out: Path
    compare: Path | None
    everything: bool = False


def options(args: list[str]) -> Wanted:
    """BadInput for what cannot work, before anything starts."""
    parser = argparse.ArgumentParser(
        PROG,
        f"{PROG} [options] train.py ...",
        as_main.examples(__doc__, "labs.doctor", PROG),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = _refuse
    add = parser.add_argument
    add("--steps", type=int, default=30, help="that are measured as they are (default 30)")
    add("--seconds", type=float, default=40.0, help="for trying fixes, on top (default 40; 0: none)")
    add(
        "--timeout",
        type=float,
        help=f"seconds without a step, then it is ended (default: {FIRST_S:g} for the first "
        f"step, then {TIMES_LONGEST} times the longest so far, {LEAST_S:g} at least)",
    )
    add("--out", type=Path, default=Path("doctor-report"), help="folder for the report (default doctor-report)")
    add("--compare", type=Path, metavar="BEFORE.json", help="report.json of a run before a fix")
    add("--copy", action="store_true", help="run a copy of this folder: what the script writes below it is removed")
    add("--all", action="store_true", help="print all findings, and what is fine or not known")
    add("--show-output", action="store_true", help="print what the script prints")
    add(
        "--only",
        action="append",
        metavar="NAME",
        help="try this alone; may be repeated. A wrong name lists what there is",
    )
    add("--without", action="append", metavar="NAME", help="don't try this; may be repeated")
    given, argv, module = as_main.parse(parser, args)
    require(1 <= given.steps <= MOST_STEPS, f"--steps must be from 1 to {MOST_STEPS}, not {given.steps}")
    require(0 <= given.seconds < float("inf"), f"--seconds must be a number from 0 on, not {given.seconds:g}")
    require(
        given.timeout is None or 1 <= given.timeout < float("inf"),
        f"--timeout must be a number of seconds from 1 on, not {given.timeout}",
    )
    _check_script(Path(argv[0]))
    _check_out(given.out)
    if given.compare is not None:
        _check_report(given.compare)
    if given.copy:
        argv[0] = _script_below(Path.cwd(), argv[0])
    modes = () if given.seconds == 0 else _modes(given.only or [], given.without or [])
    order = Order(argv, given.steps, given.seconds, given.timeout, modes, given.copy, given.show_output, module)
    return Wanted(order, given.out.absolute(), given.compare, given.all)


def _check_script(script: Path) -> None:
    require(script.is_file(), f"there is no script {script}")
    require(script.suffix != ".ipynb", f"{script} is a notebook: jupyter nbconvert --to script makes a script of it")
    try:
        with script.open("rb"):
            pass
    except OSError as e:
        raise BadInput(f"cannot read {script} ({e.strerror})") from None


def _script_below(folder: Path, script: str) -> str:
    """As a relative path, which leads to the script in a copy of the folder as well."""
    path = os.path.relpath(script, folder)
    require(not path.startswith(".."), f"--copy copies {folder}, and {script} is not in it: start it in a folder above")
    bytes_ = 0
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in supervisor.NOT_COPIED]
        bytes_ += sum(os.lstat(os.path.join(place, name)).st_size for name in files)
        require(
            bytes_ <= MOST_COPIED, f"--copy: {folder} holds more than {MOST_COPIED >> 30} GB: start it in a smaller one"
        )
    return path


def _check_out(out: Path) -> None:
    require(not out.exists() or out.is_dir(), f"--out {out} is not a folder")
    there = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    require(there.is_dir(), f"--out: {there} is not a folder")
    require(os.access(there, os.W_OK), f"--out: cannot write to {there}")


def _check_report(path: Path) -> None:
    from labs.doctor import report  # imports torch

    with naming("--compare"):
        report.load(path)


def _modes(only: Sequence[str], without: Sequence[str]) -> tuple[str, ...] | None:
    """Names of counterfactuals; None: all but those that take long."""
    if not only and not without:
        return None
    from labs.doctor.counterfactuals import MODES  # imports torch

    for name in (*only, *without):
        require(
            name in MODES,
            f"nothing is tried by the name {name!r}: {did_you_mean(name, MODES)}there are {', '.join(MODES)}",
        )
    wanted = only or [name for name, mode in MODES.items() if not mode.on_request]
    return tuple(name for name in MODES if name in wanted and name not in without)


def _refuse(message: str) -> typing.NoReturn:
    """By one rank of each machine."""
    with suppress(BadInput):
        if Place.of(os.environ, one_machine=False).local_rank:
            time.sleep(10)  # until torchrun ends this rank, which it does when the one that tells is gone
            sys.exit(2)
    fail(PROG, message)


def print_report(profiles: list[Profile], wanted: Wanted, machine: int, matches: list[Match]) -> None:
    """Print the page, and write the report."""
    from labs.doctor import report

    found = report.make(profiles, matches)
    out = wanted.out if machine == 0 else wanted.out.with_name(f"{wanted.out.name}-machine-{machine}")
    if (
        len(profiles) == 1 and (rank := report.group_of(profiles[0])[0]) != profiles[0].rank
    ):  # nobody has told it which it is
        out = wanted.out.with_name(f"{wanted.out.name}-rank-{rank}")
    compared = "" if wanted.compare is None else _compared(wanted.compare, found)
    paths, failed = (), ""
    try:  # before it is printed: who reads that may leave early
        paths = report.save(found, out)
    except OSError as e:
        failed = f"could not write to {out} ({e.strerror}): the page above is all there is"
    with closed_pipe_is_no_error():
        print(report.page(found, wanted.everything), end="")
        for line in last_words(profiles):
            print(line)
        if compared:
            print(compared)
        if paths:
            print("\nreport: " + ", ".join(map(str, paths)))
    if failed:
        print(failed, file=sys.stderr)


def _compared(before: Path, after: typing.Any) -> str:
    from labs.doctor import compare, report

    try:
        return "\n" + compare.page(report.load(before), after)
    except BadInput as e:
        return f"\nnot compared: {e}"


def last_words(profiles: list[Profile]) -> list[str]:
    """What a script that did not come to its end had printed, and what may have been our own fault."""
    lines = []
    for f in profiles:
        if f.output and f.ended in ("error", "exit", "killed", "silent", "stopped"):
            rank = f" of rank {f.rank}" if f.ranks > 1 else ""
            lines += ["", f"LAST LINES OF ITS OUTPUT{rank.upper()}", *(f"  {line}" for line in f.output)]
    if any(f.error.startswith("EOFError") or os.strerror(errno.ENOTTY) in f.error for f in profiles):
        lines += ["", "It has no terminal and no keyboard here: echo ANSWER | " + PROG + " ..."]
    return lines


def main() -> None:
    """Check, run the script, report."""
    try:
        wanted, place = options(sys.argv[1:]), Place.of(os.environ, one_machine=False)
        # Before the run: what goes wrong in it costs no measurement, and the script is as the run will find it
        matches = [] if place.local_rank else static_rules.check(Path(wanted.order.argv[0]))
        profiles = supervisor.examine(
            wanted.order, place, lambda found: print_report(found, wanted, place.machine, matches)
        )
    except BadInput as e:
        _refuse(str(e))
    sys.exit(0 if any(f.step_s for f in profiles) else 1)


if __name__ == "__main__":
    main()
