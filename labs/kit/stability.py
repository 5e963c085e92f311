"""Count how often an experiment gives the same answer.

    python -m labs.kit.stability ddp_speedup --runs 20 --model mlp

Runs the experiment with its own options and counts the categories that its `category(records)` returns. A notebook's
round is decisive if at least 18 of 20 runs on two ordinary cores give the same category.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from labs.kit import cli
from labs.kit.errors import BadInput, require
from labs.kit.lab import lab_module
from labs.kit.launch import launch

PROG = "python -m labs.kit.stability"


def categories(lab: str, runs: int, **options: Any) -> Iterator[str]:
    """Yield the category of each of `runs` launches of `lab`."""
    for _ in range(runs):
        yield lab_module(lab).category(launch(lab, **options))


def main() -> int:
    args = sys.argv[1:]
    try:
        require(bool(args) and not args[0].startswith("-"), "name an experiment: ddp_speedup --runs 20")
        lab, runs = args.pop(0), 20
        if "--runs" in args:
            at = args.index("--runs")
            require(args[at + 1 : at + 2] != [] and args[at + 1].isdigit(), "--runs needs a whole number")
            runs = int(args[at + 1])
            del args[at : at + 2]
        require(runs > 0, "--runs must be at least 1")
        module = lab_module(lab)
        require(hasattr(module, "category"), f"{lab} has no category(records): its answer is not one of a few")
        command = cli.parse(module, PROG, args)
        counted: Counter[str] = Counter()
        options = vars(command.launch) | vars(command.config)
        for done, found in enumerate(categories(lab, runs, **options), start=1):
            counted[found] += 1
            print(f"run {done:2} of {runs}: {found}", flush=True)
    except BadInput as e:
        cli.fail(PROG, str(e))
    for found, n in counted.most_common():
        print(f"{n:3} of {runs}: {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
