"""The schema of all exercises: task, check, reference solution, known mistakes.

    EXERCISES = {"03.1": Exercise("03.1", 20, "write the sampler", observe, shard, (KnownMistake(...), ...))}

`observe(answer)` calls the answer and returns what it did, as `{where, in words: value}`. An answer passes if the
reference does the same. Otherwise the first difference decides: a known mistake that differs there in the same way is
named. If none does, the learner reads where the difference is, what was expected and what came.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labs.kit import timeouts
from labs.kit.check import Mistake
from labs.kit.errors import brief

Observations = Mapping[str, Any]
TOLERANCE = 1e-4  # relative, for floats


@dataclass(frozen=True)
class KnownMistake:
    """A mistake, a hint at what to do instead, and an answer that makes this mistake."""

    what: str
    hint: str
    answer: Callable[..., Any]


@dataclass(frozen=True)
class Exercise:
    """One exercise. `check(id, answer)` in a notebook judges an answer with it."""

    id: str
    minutes: int
    task: str
    observe: Callable[[Callable[..., Any]], Observations]
    reference: Callable[..., Any]
    mistakes: Sequence[KnownMistake] = ()
    timeout_s: float = timeouts.EXERCISE_S

    def checker(self, answer: Callable[..., Any]) -> None:
        """Raise Mistake unless `answer` does what the reference does. The answer's own errors propagate."""
        got, expected = self.observe(answer), self.observe(self.reference)
        where = first_difference(expected, got)
        if where is None:
            return
        for mistake in self.mistakes:
            other = self.observe(mistake.answer)
            if first_difference(expected, other) == where and alike(other[where], got.get(where)):
                raise Mistake(mistake.what, mistake.hint)
        if where not in got:
            raise Mistake(f"{where}: expected {shown(expected[where])}, got nothing")
        raise Mistake(f"{where}: expected {shown(expected[where])}, got {shown(got[where])}")


def first_difference(expected: Observations, got: Observations) -> str | None:
    """Return the first key at which `got` differs from `expected`; None if there is none."""
    return next((where for where, value in expected.items() if where not in got or not alike(value, got[where])), None)


def alike(a: Any, b: Any) -> bool:
    """Return whether two observations are equal: floats within TOLERANCE, lists item by item."""
    if isinstance(a, bool) or isinstance(b, bool) or not isinstance(a, (int, float, list, tuple)):
        return type(a) is type(b) and a == b
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(alike, a, b))
    if not isinstance(b, (int, float)):
        return False
    return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-7) or (math.isnan(a) and math.isnan(b))


def shown(value: Any) -> str:
    """Format `value` in one line, for a learner."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, float) for v in value):
        return f"[{', '.join(f'{v:.4g}' for v in value[:6])}{', ...' if len(value) > 6 else ''}]"
    return brief(value)
