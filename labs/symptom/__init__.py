"""What does this error mean, how can I be sure, and what cures it?

    python -m labs.symptom "Expected to have finished reduction in the prior iteration"
    python train.py 2>&1 | tee train.log; python -m labs.symptom --file train.log
    python -m labs.symptom --list                     # the whole chart, by subject
    python -m labs.symptom --table                    # a line for each row: its name, and what shows it
    python -m labs.symptom --try unused_parameters    # make the fault here, see its message, apply the cure

Reads a traceback, a log, or a few words of your own, and prints the rows of the chart that fit, the best one first.
Exit code: 0, 1 if no row fits, 2 for bad input. No GPU is needed, and nothing is sent anywhere.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from labs.kit.cli import fail
from labs.kit.errors import did_you_mean
from labs.symptom.catalog import SUBJECTS, Found, Row, rows, search

PROG = "python -m labs.symptom"
ALSO = 2
"""Rows beside the best one that are named."""
NEAR = 0.5
"""And score at least this share of it."""


def answer(found: list[Found]) -> Iterator[str]:
    """Lines about what `search` found, which is not empty: the best row in full, the names of the next."""
    best = found[0]
    yield f"{best.row.name}"
    yield from _wrapped("found in", best.line[:200])
    yield from in_full(best.row)
    if other := [f.row.name for f in found[1 : 1 + ALSO] if f.score >= NEAR * best.score]:
        yield from _wrapped("or", "; ".join(other) + f" ({PROG} --list)")


def in_full(row: Row) -> Iterator[str]:
    """Lines about a row."""
    yield from _wrapped("means", row.means)
    if row.ask != "-":
        yield from _wrapped("to be sure", row.ask)
    yield from _wrapped("cure", row.cure)
    shown = f"{PROG} --try {row.drill}" if row.drill else row.command
    yield from _wrapped("shown by", shown) if shown else ()
    yield from _wrapped("source", row.source) if row.source else ()
    yield from _wrapped("asked in", row.asked) if row.asked else ()


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(f"  {head + ':':11} {text}", 112, subsequent_indent=" " * 14, break_on_hyphens=False)


def chart() -> Iterator[str]:
    """The whole chart by subject, a row in a few lines."""
    for subject in SUBJECTS:
        yield f"== {subject} =="
        yield ""
        for row in (row for row in rows() if row.subject == subject):
            yield row.name
            yield from _wrapped("see", row.see[0])
            yield from in_full(row)
            yield ""


def table() -> Iterator[str]:
    """The chart by subject, a row in one line: its name and what shows it here."""
    wide = max(len(row.name) for row in rows())
    for subject in SUBJECTS:
        here = [row for row in rows() if row.subject == subject]
        yield f"== {subject}: {len(here)} =="
        yield from (
            f"  {row.name:{wide}}  {f'--try {row.drill}' if row.drill else row.command}".rstrip() for row in here
        )


def tried(name: str) -> Iterator[str]:
    """The drill `name` without and with its cure: lines. Takes up to half a minute."""
    from labs.symptom import drills  # imports torch, which a search does not need

    row = next(row for row in rows() if row.drill == name)
    yield "As it is:"
    yield textwrap.indent(drills.seen(name, cured=False).strip()[-2000:], "  ")
    yield f"With the cure: {row.cure}"
    yield textwrap.indent(drills.seen(name, cured=True).strip()[-2000:] or "no error, no warning", "  ")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("text", nargs="*", help="what you see: words of an error, or your own")
    parser.add_argument("--file", type=Path, help="a log or a traceback; - reads standard input")
    parser.add_argument("--list", action="store_true", help="print the chart")
    parser.add_argument("--table", action="store_true", help="print the names of its rows, and what shows each here")
    parser.add_argument("--try", dest="drill", metavar="NAME", help="make a fault here and cure it")
    args = parser.parse_args()
    if sum(map(bool, (args.text, args.file, args.list, args.table, args.drill))) != 1:
        fail(PROG, "give the text of an error in quotes, or one of --file, --list, --table and --try")
    if args.list or args.table:
        print("\n".join(chart() if args.list else table()))
    elif args.drill:
        known = [row.drill for row in rows() if row.drill]
        if args.drill not in known:
            hint = did_you_mean(args.drill, known)
            fail(PROG, f"--try knows no fault {args.drill!r}: {hint}it is one of {', '.join(known)}")
        for line in tried(args.drill):
            print(line, flush=True)
    else:
        try:
            text = _read(args.file) if args.file else " ".join(args.text)
        except OSError as e:
            fail(PROG, f"--file {e.filename}: {e.strerror}")
        if not (found := search(text)):
            print("The chart has no row for this; --list prints it. The first rank that failed tells most.")
            sys.exit(1)
        print("\n".join(answer(found)))


def _read(path: Path) -> str:
    """What a log holds, its last megabytes if it is long; `-` is standard input."""
    if str(path) == "-":
        return sys.stdin.read()
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4_000_000))
        return file.read().decode("utf-8", "replace")
