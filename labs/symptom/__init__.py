"""What does this error mean, how can you check that, and what fixes it?

    python -m labs.symptom "Expected to have finished reduction in the prior iteration"
    python train.py 2>&1 | tee train.log; python -m labs.symptom --file train.log
    python -m labs.symptom --list                     # the whole catalog, by subject

Reads a traceback, a log, or a few words of your own, and prints the matching rows of the catalog, the best one first.
Exit code: 0, 1 if no row has the cause, 2 for bad input. It needs no GPU and sends nothing anywhere.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from labs.kit.cli import fail
from labs.symptom.catalog import Match, Row, rows, search, subjects, unknown_error

PROG = "python -m labs.symptom"
RATE = "On 29 November 2026 the right row came first for 16 of 26 texts from public threads that it wasn't built with."
MORE = 2
"""Maximum number of further rows to name."""
NEAR = 0.5
"""A further row needs at least this share of the best score."""


def answer(matches: list[Match], unknown: str = "") -> Iterator[str]:
    """Yield lines about the non-empty result of `search`: the best row in full, the names of the next.

    `unknown` is an error that no row knows. It comes first, because the matches are only its consequences.
    """
    best = matches[0]
    if unknown:
        yield "The catalog has no row for the first error. What it does know only follows from an error."
        yield from _wrapped("first error", unknown[:200])
    yield f"{best.row.name}"
    yield from _wrapped("found in", best.line[:200])
    yield from in_full(best.row)
    others = [m.row.name for m in matches[1 : 1 + MORE] if m.score >= NEAR * best.score and not m.row.follows]
    if others:
        yield from _wrapped("or", "; ".join(others) + f" ({PROG} --list)")


def in_full(row: Row) -> Iterator[str]:
    """Yield lines about a row."""
    yield from _wrapped("cause", row.why)
    yield from _wrapped("fix", row.fix)
    if row.follows:
        yield from _wrapped("look further", "usually this only follows from another error, above or on another rank.")


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(f"  {head + ':':13} {text}", 112, subsequent_indent=" " * 16, break_on_hyphens=False)


def whole_catalog() -> Iterator[str]:
    """Yield all rows by subject, each in a few lines."""
    for subject in subjects():
        here = [row for row in rows() if row.subject == subject]
        yield f"== {subject}: {len(here)} =="
        yield ""
        for row in here:
            yield row.name
            yield from _wrapped("you see", row.see[0].partition(" && ")[0])
            yield from in_full(row)
            yield ""


def main() -> None:
    """Run the command line."""
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__, epilog=RATE, formatter_class=form)
    parser.error = lambda message: fail(PROG, message)  # one line, without the usage
    parser.add_argument("text", nargs="*", help="what you see: words of an error, or your own")
    parser.add_argument("--file", type=Path, help="a log or a traceback; - reads standard input")
    parser.add_argument("--list", action="store_true", help="print the catalog")
    args = parser.parse_args()
    if sum(map(bool, ("".join(args.text).strip(), args.file, args.list))) != 1:
        fail(PROG, "give the text of an error in quotes, or one of --file and --list")
    if args.list:
        print("\n".join(whole_catalog()))
        return
    try:
        text = _read(args.file) if args.file else " ".join(args.text)
    except OSError as e:
        fail(PROG, f"--file {e.filename}: {e.strerror}")
    unknown = unknown_error(text)
    if not (matches := search(text)):
        print("The catalog has no row for this; --list prints it. Look at the first rank that failed.")
        if unknown:
            print(f"The first error is: {unknown[:200]}")
        sys.exit(1)
    print("\n".join(answer(matches, unknown)))
    sys.exit(1 if unknown else 0)


def _read(path: Path) -> str:
    """Read a log, or standard input for `-`; only the last 4 MB of a long log."""
    if str(path) == "-":
        return sys.stdin.read()
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4_000_000))
        return file.read().decode("utf-8", "replace")
