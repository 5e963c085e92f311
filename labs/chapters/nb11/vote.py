"""Votes before the trial: how sure the reader is that a statement holds, and how well that was known.

A vote is a probability in percent that a claim *holds as it is written*: not sometimes, and not under conditions that
it does not name. The Brier score is the mean of (probability - outcome)², with outcome 1 if it holds and 0 otherwise:
0 is perfect, 0.25 what saying 50 % to everything gets. (Brier, Monthly Weather Review 78, 1950.)
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from labs.kit.check import predict
from labs.kit.claims import SIGNS, Claim, Verdict, claims
from labs.kit.display import say
from labs.kit.docket import Docket, by_id
from labs.kit.errors import require
from labs.kit.measure import proportion

EVERYTHING_50 = 0.25
BINS = ((0, 33), (33, 67), (67, 100))
"""Votes in percent that are counted together."""
ABOUT_A_TEXT = re.compile(
    r"\bimplied|\blisting|\btable\b|\bexample\b|\bThe text\b|\barticle|\bimage\b|\bprinted\b", re.IGNORECASE
)
"""Claims that nobody can judge who has not seen what the article shows."""


def drawn(seed: int, n: int = 12) -> list[Claim]:
    """`n` claims that no GPU is needed for, by lot: the same for everybody with the same seed. BadInput for n < 1."""
    pool = [c for c in claims() if c.gpus == 0 and not ABOUT_A_TEXT.search(c.claim)]
    require(1 <= n <= len(pool), f"n must be from 1 to {len(pool)}, not {n}")
    return sorted(random.Random(seed).sample(pool, n), key=lambda c: c.id)


def statements(seed: int = 1, n: int = 12) -> None:
    """Show the claims of this lot, without their verdicts."""
    say("\n".join(f"* **{c.id}**: {c.claim}" for c in drawn(seed, n)))


@dataclass(frozen=True)
class Votes:
    """How sure somebody is, in percent, that each claim holds."""

    sure: dict[str, float]

    def judged(self, docket: Docket) -> list[tuple[Claim, float, Verdict]]:
        """Those on which there is a verdict, with it."""
        found = ((by_id(i), sure, docket.verdict(i)) for i, sure in self.sure.items())
        return [row for row in found if row[2].word in SIGNS]

    def brier(self, docket: Docket) -> float:
        """Mean of (probability - outcome)² over the judged ones; NaN without any."""
        return brier((sure, v.word == "holds") for _, sure, v in self.judged(docket))

    def __repr__(self) -> str:
        made = {i: s for i, s in self.sure.items() if s != 50}
        return f"{len(self.sure)} votes, {len(made)} of them other than 50 %"


def brier(votes: Iterable[tuple[float, bool]]) -> float:
    """Mean of (probability - outcome)² of pairs of percent and outcome; NaN without any."""
    squares = [(sure / 100 - held) ** 2 for sure, held in votes]
    return sum(squares) / len(squares) if squares else math.nan


def cast(votes: Mapping[str, float]) -> Votes:
    """Keep the votes, also in the room if there is one. BadInput names a claim or a number that cannot be."""
    require(isinstance(votes, Mapping) and bool(votes), 'votes are {"A13": 50, ...}: how sure you are of each, in %')
    for claim_id, sure in votes.items():
        by_id(claim_id)
        number = isinstance(sure, int | float) and not isinstance(sure, bool) and 0 <= sure <= 100
        require(number, f"{claim_id}: a vote is a number from 0 (surely not) to 100 (surely), not {sure!r}")
    return Votes({i: float(predict(sure, f"chance that claim {i} holds", "%")) for i, sure in votes.items()})


def calibration(votes: Votes, docket: Docket) -> list[str]:
    """Of the statements that were given little, middling and much confidence: how many held, with its interval."""
    rows, lines = votes.judged(docket), []
    for low, high in BINS:
        held = [v.word == "holds" for _, sure, v in rows if low <= sure < high or sure == high == 100]
        if held:
            share = proportion(sum(held), len(held))
            lines.append(
                f"of {len(held)} that you gave {low} to {high} %, {sum(held)} held "
                f"({100 * share.value:.0f} %, interval {100 * share.low:.0f} to {100 * share.high:.0f} %)"
            )
    return lines
