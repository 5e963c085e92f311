"""Static rules: patterns in a training script that are wrong, outdated or cost time, found in its source alone.

Nothing is run or imported. A rule is silent where the source does not settle the matter: a false alarm is worse than a
miss, for what a miss costs shows in the measurement. The rules stand in rules_*.py, each with code that has the pattern
and code that has not.
"""

from __future__ import annotations

import ast
from pathlib import Path

from labs.doctor import (
    rules_loading,
    rules_modes,
    rules_precision,
    rules_processes,
    rules_ranks,
    rules_saving,
    rules_steps,
    rules_waiting,
)
from labs.doctor.hits import CERTAINTIES, Found, Hit, Rule
from labs.doctor.syntax import Program, above
from labs.doctor.training_loops import Training

MODULES = (
    rules_precision,
    rules_steps,
    rules_modes,
    rules_ranks,
    rules_processes,
    rules_saving,
    rules_loading,
    rules_waiting,
)
RULES: tuple[Rule, ...] = tuple(found for module in MODULES for found in module.RULES)
UNREADABLE = "unreadable"


def check(script: Path) -> list[Hit]:
    """Of the script and what it imports from its own folder: the most certain first, then by file and line.

    A mistake of ours is a hit that says so: beside it the training is measured all the same.
    """
    try:
        program = Program(Path(script))
        training = Training(program)
    except Exception as e:
        return [_untold(str(script), 0, f"this script: {_failure(e)}")]
    hits = [_untold(str(p.path), p.line, f"this file, for it cannot be read: {p}") for p in program.problems]
    if program.left_out:
        hits.append(_untold(str(script), 0, f"{program.left_out} of the files that it imports: there are too many"))
    for rule in RULES:
        try:
            hits += _hits(rule, program, training)
        except Exception as e:
            hits.append(_untold(str(script), 0, f"what {rule.name} is about: {_failure(e)}"))
    return sorted(hits, key=lambda hit: (CERTAINTIES.index(hit.certainty), hit.file, hit.line))


def _hits(rule: Rule, program: Program, training: Training) -> list[Hit]:
    """One for each line of what this program runs."""
    found = [f for f in rule.find(program, training) if not _of_another_script(program, f)]
    return list({(hit.file, hit.line): hit for hit in (_hit(rule, f) for f in found)}.values())


def _of_another_script(program: Program, found: Found) -> bool:
    """Under `if __name__ == "__main__":` of a file that is imported."""
    tests = (ast.unparse(p.test) for p in above(found.node) if isinstance(p, ast.If))
    return found.node.file is not program.files[0] and any("__name__" in test for test in tests)


def _hit(rule: Rule, found: Found) -> Hit:
    file, line = found.node.file, found.node.lineno
    cure = (found.change.diff() if found.change else "") or rule.cure
    return Hit(
        rule.name,
        str(file.path),
        line,
        file.lines[line - 1].strip(),
        found.why or rule.why,
        cure,
        rule.notebook,
        rule.section,
        found.certainty or rule.certainty,
        rule.source,
    )


def _failure(error: Exception) -> str:
    if isinstance(error, RecursionError):  # an expression of a thousand terms
        return "it is nested too deeply"
    return f"they failed ({type(error).__name__}: {error})"


def _untold(file: str, line: int, what: str) -> Hit:
    return Hit(UNREADABLE, file, line, "", f"The rules have not looked at {what}.", "", "", "", "look at it", "")
