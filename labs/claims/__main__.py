"""What five articles claim, and what this course found: print all verdicts, or one claim.

python -m labs.claims                                  # every claim, by the recorded runs
python -m labs.claims --subject precision --verdict "does not hold"
python -m labs.claims C16                              # one claim: what decided it, what would change it
python -m labs.claims C07 --own                        # by what notebook 01 measured on this machine: run it first
python -m labs.claims --evidence FILE ...              # by your own records: a lab's --out FILE
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

from labs.claims.registry import (
    Claim,
    Verdict,
    articles,
    by_id,
    claims,
    how_decided,
    judge,
    judge_of,
    recorded_verdict,
)
from labs.kit.claim_records import kept
from labs.kit.cli import fail
from labs.kit.errors import BadInput, did_you_mean, require
from labs.kit.record import Records, load

PROG = "python -m labs.claims"


def main() -> int:
    """Run the command line; returns the exit code: 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("id", nargs="?", help="one claim, for example C16")
    parser.add_argument("--subject", default="", help="for example precision")
    parser.add_argument("--verdict", default="", help='for example "does not hold"')
    parser.add_argument("--notebook", default="", help='only the claims of one notebook, for example "03"')
    parser.add_argument("--own", action="store_true", help="judge by what notebooks measured on this machine")
    parser.add_argument("--evidence", nargs="+", type=Path, default=[], metavar="FILE", help="record files to judge by")
    args = parser.parse_args()
    try:
        found = [(c, decide(c, args)) for c in ([by_id(args.id)] if args.id else chosen(args))]
    except (BadInput, OSError, ValueError) as e:
        return fail(PROG, str(e))
    found = [(c, v) for c, v in found if v.word.startswith(args.verdict.lower())]
    for claim, verdict in found:
        print(page(claim, verdict) if args.id else paragraph(f"{claim.id}  {verdict.word}: {claim.claim}", 5))
        if not args.id:
            print(paragraph(f"     {verdict.because}", 5))
    if not found:
        print("No claim has this verdict.")
    return 0


def chosen(args: argparse.Namespace) -> list[Claim]:
    """Return the claims of the subject and notebook. BadInput lists the valid values."""
    for field, asked in (("subject", args.subject.lower()), ("notebook", args.notebook)):
        known = {getattr(c, field) for c in claims()}
        hint = did_you_mean(asked, known)
        require(asked in ("", *known), f"no claims with {field} {asked!r}: {hint}There are {', '.join(sorted(known))}.")
    return [c for c in claims() if args.subject.lower() in ("", c.subject) and args.notebook in ("", c.notebook)]


def decide(claim: Claim, args: argparse.Namespace) -> Verdict:
    """Return the verdict by the records that the options name."""
    if args.evidence:
        return judge(claim, sum((load(p) for p in args.evidence), Records()))
    return judge(claim, kept(claim.notebook)) if args.own else recorded_verdict(claim)


def page(claim: Claim, verdict: Verdict) -> str:
    """Return one claim with its verdict, what decided it, and what would change it."""
    function = None if claim.verdict else judge_of(claim)
    where = f", by {function.__name__} in {function.__module__}" if function else ""
    parts = {
        "claim": f"{claim.claim} [{articles()[claim.id[0]].title_en}, {claim.source}]",
        "verdict": f"{verdict.word}{f' ({verdict.kind})' if verdict.kind else ''}",
        "because": verdict.because,
        "decided by": f"{how_decided(claim, verdict)}, notebook {claim.notebook}{where}",
        "would change it": claim.changes,
        "on GPUs": claim.command,
        "take away": claim.takeaway,
    }
    return "\n".join([claim.id, *(paragraph(f"{name + ':':17}{text}", 17) for name, text in parts.items() if text)])


def paragraph(text: str, indent: int) -> str:
    """Wrap `text`, all lines but the first indented."""
    return textwrap.fill(text, 110, subsequent_indent=" " * indent, drop_whitespace=True)


if __name__ == "__main__":
    sys.exit(main())
