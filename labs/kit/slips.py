"""Answers in numbers: the slip that explains all of them by name, else the first wrong one with its facts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from labs.kit.check import Mistake

Slip = tuple[Callable[[Any], float], str, str]
"""What a mistake makes of a case, what the mistake is, and a hint."""


@dataclass(frozen=True)
class Question:
    """One number, asked for several cases."""

    name: str
    cases: Sequence[Any]
    slips: Sequence[Slip]
    facts: Callable[[Any], str]
    """A case in words, for answers that no slip explains."""
    hint: str

    def judge(self, got: Sequence[float], want: Sequence[float]) -> None:
        """Mistake unless all of `got` are `want`, to a part in a thousand; zeros and infinities exactly."""
        if _alike(got, want):
            return
        for wrong, what, hint in self.slips:
            if _alike(got, [wrong(case) for case in self.cases]):
                raise Mistake(what, hint)
        first = next(i for i in range(len(got)) if not _alike(got[i], want[i]))
        raise Mistake(
            f"{self.facts(self.cases[first])}: {self.name} is {want[first]:.6g}, and you return {got[first]:.6g}",
            self.hint,
        )


def _alike(a: Any, b: Any, rtol: float = 1e-3) -> bool:
    return bool(np.allclose(a, b, rtol=rtol, atol=0))
