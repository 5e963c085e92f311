"""All claims with their verdicts: python -m labs.claims [--notebook 03] [--evidence FILE ...] [--json]"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from labs.kit.claims import claims, table
from labs.kit.cli import fail
from labs.kit.record import Records, load

PROG = "python -m labs.claims"


def main() -> None:
    parser = argparse.ArgumentParser(prog=PROG, description="What five articles claim, and what records say.")
    parser.add_argument("--notebook", help='only the claims of one notebook, for example "03"')
    parser.add_argument("--evidence", nargs="+", type=Path, default=[], metavar="FILE", help="record files to judge by")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    args = parser.parse_args()
    if args.notebook and not claims(args.notebook):
        known = ", ".join(sorted({c.notebook for c in claims()}))
        fail(PROG, f"no claims for notebook {args.notebook!r}: there are {known}")
    try:
        evidence = sum((load(p) for p in args.evidence), Records())
    except (OSError, ValueError) as e:
        fail(PROG, str(e))
    found = table(args.notebook, evidence)
    print(json.dumps(found.as_json(), indent=1) if args.json else found)


if __name__ == "__main__":
    main()
