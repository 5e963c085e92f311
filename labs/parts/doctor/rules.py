"""Static rules: patterns in a training script that are wrong, outdated or cost time, found in its source alone.

Nothing is run or imported. A rule is silent where the source does not settle the matter: a false alarm is worse than a
miss, for what a miss costs shows in the measurement. The rules stand in rules_*.py, each with code that has the pattern
and code that has not.
"""

from __future__ import annotations

from pathlib import Path

from labs.parts.doctor import rules_loading, rules_precision, rules_ranks, rules_saving, rules_steps, rules_waiting
from labs.parts.doctor.hits import CERTAINTIES, Found, Hit, Rule
from labs.parts.doctor.syntax import Program, Unreadable
from labs.parts.doctor.training_loops import Training

MODULES = (rules_precision, rules_steps, rules_ranks, rules_saving, rules_loading, rules_waiting)
RULES: tuple[Rule, ...] = tuple(found for module in MODULES for found in module.RULES)
UNREADABLE = "unreadable"


def check(script: Path) -> list[Hit]:
    """Of the script and what it imports from its own folder: the most certain first, then by file and line."""
    program = Program(Path(script))
    training = Training(program)
    hits = [_unreadable(problem) for problem in program.problems]
    for rule in RULES:
        seen = set()
        for found in rule.find(program, training):
            place = found.node.file, found.node.lineno
            if place not in seen:
                seen.add(place)
                hits.append(_hit(rule, found))
    return sorted(hits, key=lambda hit: (CERTAINTIES.index(hit.certainty), hit.file, hit.line))


def _hit(rule: Rule, found: Found) -> Hit:
    file, line = found.node.file, found.node.lineno
    cure = (found.change.diff() if found.change else "") or rule.cure
    return Hit(
        rule.name, str(file.path), line, file.lines[line - 1].strip(), found.why or rule.why, cure, rule.notebook,
        rule.section, found.certainty or rule.certainty, rule.source,
    )  # fmt: skip


def _unreadable(problem: Unreadable) -> Hit:
    why = f"The rules have not looked at this file, for it cannot be read: {problem}."
    return Hit(UNREADABLE, str(problem.path), problem.line, "", why, "", "", "", "look at it", "")
