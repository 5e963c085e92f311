"""What five articles claim, and what this course found: print verdicts, show one claim, or repeat its launches.

python -m labs.claims                                  # every claim, by the recorded evidence
python -m labs.claims --article C --subject precision --verdict "does not hold"
python -m labs.claims C16                              # one claim: what decided it, what would change it
python -m labs.claims C16 --again                      # repeat what decided it on this machine, and judge that
python -m labs.claims --own                            # by what the notebooks measured on this machine
python -m labs.claims C16 --evidence FILE ...          # by your own records: a lab's --out FILE
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from labs.kit import docket
from labs.kit.claims import claims, table
from labs.kit.cli import fail
from labs.kit.docket import Docket
from labs.kit.errors import BadInput
from labs.kit.failure import RankFailed, RankTimeout
from labs.kit.record import Records, load

PROG = "python -m labs.claims"


def main() -> int:
    """Run the command line; returns the exit code: 0, 1 if a launch failed, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("id", nargs="?", help="one claim, for example C16")
    parser.add_argument("--again", action="store_true", help="run anew what decided the claim")
    parser.add_argument("--article", default="", help="A to E")
    parser.add_argument("--subject", default="", help="for example precision")
    parser.add_argument("--verdict", default="", help='for example "does not hold"')
    parser.add_argument("--notebook", help='only the claims of one notebook, for example "03"')
    parser.add_argument("--own", action="store_true", help="judge by what was measured on this machine")
    parser.add_argument("--evidence", nargs="+", type=Path, default=[], metavar="FILE", help="record files to judge by")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    args = parser.parse_args()
    try:
        return one(args) if args.id else many(args)
    except (BadInput, OSError, ValueError) as e:
        return fail(PROG, str(e))
    except (RankFailed, RankTimeout) as e:
        print(e, file=sys.stderr)
        return 1


def one(args: argparse.Namespace) -> int:
    if args.evidence:
        found = docket.sheet(args.id, given(args))
    else:
        found = docket.again(args.id) if args.again else docket.sheet(args.id)
    print(found)
    return 0


def given(args: argparse.Namespace) -> Records:
    """Return the records of the files named by --evidence."""
    return sum((load(p) for p in args.evidence), Records())


def many(args: argparse.Namespace) -> int:
    if args.again:
        raise BadInput("--again needs a claim, for example C16")
    if args.notebook and not claims(args.notebook):
        known = ", ".join(sorted({c.notebook for c in claims()}))
        raise BadInput(f"no claims for notebook {args.notebook!r}: there are {known}")
    of_others = docket.own if args.own else docket.recorded
    found = Docket(table(None, given(args)).rows) if args.evidence else of_others()
    found = Docket(tuple(row for row in found.rows if args.notebook in (None, row[0].notebook)))
    found = found.where(article=args.article, subject=args.subject, verdict=args.verdict)
    print(json.dumps(found.as_json(), indent=1) if args.json else found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
