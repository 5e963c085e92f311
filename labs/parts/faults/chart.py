"""The chart of symptoms, and the row that fits a text: a traceback, a log, or a few words of one's own."""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

CHART = Path(__file__).with_name("chart.toml")
FOLLOWS = 0.6
"""Weight of a row that follows another, for each level: with its cause in the same text, the cause comes first."""
WHOLE = 1.5
"""Weight of words that stand in the text in the chart's own order."""
LEAST_SHARE, LEAST_WORDS, LEAST_SCORE = 0.3, 2, 3.8
"""Of a phrase by weight, of its words, and of the score: no row is better than a wrong one. The score parts right from
wrong rows in the texts of tests/public_error_texts.toml that are marked seen."""
COMMON = set(
    """a an and are as at be been but by can do for from has have if in is it its may might more no not of on or so some
    such than that the their then there this to up was when where which with you your after all any because during each
    error runtimeerror valueerror typeerror attributeerror indexerror oserror assertionerror warning
    userwarning futurewarning modulenotfounderror named module python torch line file traceback most recent call last
    original""".split()
)
"""Words that tell nothing, among them the names of exceptions."""


@dataclass(frozen=True)
class Row:
    """A symptom: fields as in chart.toml."""

    name: str
    see: tuple[str, ...]
    means: str
    ask: str
    cure: str
    drill: str = ""
    command: str = ""
    source: str = ""
    follows: int = 0

    def __post_init__(self) -> None:
        assert self.see and (self.drill or self.command or self.source), self.name


@dataclass(frozen=True)
class Found:
    """A row that fits, how well (larger is better) and the line of the text that it was found in."""

    row: Row
    score: float
    line: str


@cache
def rows() -> tuple[Row, ...]:
    """All rows, in the order of the file."""
    read = tomllib.loads(CHART.read_text("utf-8"))["row"]
    return tuple(Row(**{**row, "see": tuple(row["see"])}) for row in read)


def words(text: str) -> list[str]:
    """Words in lower case, without numbers, paths and punctuation: what two texts of one error have in common."""
    text = re.sub(r"exit ?code *: *-", "exitcode_minus_", text, flags=re.IGNORECASE)  # which signal it was matters
    text = re.sub(r"(?:0x[0-9a-f]+|(?<![a-z_])[\d.]+(?![a-z_]))", " ", text.lower())
    text = re.sub(r"\S*/\S+/\S+", " ", text)  # a path
    found = re.findall(r"[a-z_][a-z0-9_]*|\N{EM DASH}|\N{EN DASH}", text)
    return [word for word in found if word not in COMMON]


def search(text: str, most: int = 3) -> list[Found]:
    """The rows that fit best, best first; empty if none does.

    Each line of the text is held against each phrase of each row. A word weighs the more, the fewer rows have it. A
    phrase scores what its words weigh that are found, times the share of the phrase that this is.
    """
    weigh = _weights()
    best: dict[str, Found] = {}
    lines = text.splitlines()
    lines += [f"{a} {b}" for a, b in pairwise(lines)]  # a terminal breaks messages
    told = {" ".join(words(line)): line for line in reversed(lines)}  # a log says one thing many times
    for said, line in reversed(told.items()):
        known, joined = set(said.split()), f" {said} "
        for row, phrase, total in _phrases():
            hits = [w for w in phrase if w in known]
            found = sum(weigh[w] for w in hits)
            if found < LEAST_SHARE * total or len(hits) < min(LEAST_WORDS, len(phrase)):
                continue
            score = found * found / total * FOLLOWS**row.follows
            score *= WHOLE if f" {' '.join(phrase)} " in joined else 1.0
            if score >= LEAST_SCORE and (row.name not in best or score > best[row.name].score):
                best[row.name] = Found(row, score, line.strip())
    return sorted(best.values(), key=lambda f: -f.score)[:most]


@cache
def _phrases() -> list[tuple[Row, list[str], float]]:
    weigh = _weights()
    said = [(row, part) for row in rows() for phrase in row.see for part in {phrase, phrase.split(". ")[0]}]
    phrases = [(row, list(dict.fromkeys(words(part)))) for row, part in said]  # people quote the first sentence only
    return [(row, phrase, sum(weigh[w] for w in phrase)) for row, phrase in phrases]


@cache
def _weights() -> dict[str, float]:
    """{word: log(rows / rows that have it)}, at least a little."""
    having = Counter(w for row in rows() for w in {w for phrase in row.see for w in words(phrase)})
    return {word: math.log(1 + len(rows()) / count) for word, count in having.items()}
