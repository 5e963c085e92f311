"""Notebook 11 on installing: what pip took from which index, and what a second copy of a library does."""

from __future__ import annotations

from typing import Any

from labs import pip_indexes
from labs.kit.check import Prediction
from labs.kit.display import say, show_table
from labs.kit.record import Records

ASKED = {
    "then": "an article's line, when 1.13.1 was the newest",
    "now": "the same line since then",
    "swapped": "the two indexes swapped",
    "pinned": "the version pinned",
    "one_index": "one index",
    "first_build": "no version, first build",
    "second_build": "no version, second build",
    "constrained": "a constraints file, second build",
    "other_cuda": "another CUDA",
    "other_system": "another system",
    "other_python": "another Python",
    "no_wheel": "a Python without wheels",
}


def choices(run: Records, guess: Prediction | None = None) -> None:
    """A table: each line, the machine it is for, what pip took, what the rule says; `guess`: how many took cu116."""
    import pandas

    rule = {r.case["asked"]: r.case["version"] for r in run.where("wheels_by_rule")}
    rows = [_row(r.case, rule[r.case["asked"]]) for r in run.where("wheels")]
    if rows:
        show_table(pandas.DataFrame(rows).set_index("what"))
    for why in sorted({r.case["why"] for r in run.where("no_answer")}):
        say(f"* No answer from pip: {why}")
    asked = [r.case for r in run.where("wheels") if "cu116" in pip_indexes.CASES[r.case["asked"]].indexes]
    if guess is not None and asked:
        say(f"* {guess.against(sum(case['version'].endswith('+cu116') for case in asked))}")


def _row(case: dict[str, Any], by_rule: str) -> dict[str, str]:
    index = pip_indexes.CASES[case["asked"]].index
    return {
        "what": ASKED[case["asked"]],
        "pip install ...": case["line"],
        "main index": index if index.startswith("main") else "",
        "for": f"Python {case['python']}, {case['system']}",
        "pip takes": f"{case['version']} from {case['index']}" if case["version"] else "nothing fits",
        "the rule": "the same" if by_rule == case["version"] else by_rule or "nothing",
    }


def environment(run: Records) -> None:
    """Sentences on the torch that runs here: its CUDA packages, who installed what, and its OpenMP runtimes."""
    packages = {r.case["installer"]: r.value for r in run.where("packages")}
    told = [f"Packages here, by who installed them: {', '.join(f'{name} {n:.0f}' for name, n in packages.items())}."]
    told += pip_indexes.of_the_installed(run)
    say("\n".join(f"* {line}" for line in told))
