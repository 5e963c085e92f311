"""The catalog of errors, and a search for the row that fits a traceback, a log, or a few words of your own."""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

CATALOG = Path(__file__).with_name("catalog.toml")
FOLLOWS = (1.0, 0.5, 0.12, 0.05)
"""Weight by a row's `follows`: a cause in the same text ranks above its consequences."""
CLEAR = 8.0
"""An error with this score ranks above a consequence, whose message may be much longer: NCCL's are."""
IN_ORDER = (0.4, 0.8, 0.3)
"""Factors of the score: base (any order), share of adjacent word pairs that are adjacent, bonus for a whole phrase."""
OTHER_KIND = 0.6
"""Weight if the text names a different kind of exception than the catalog."""
SOURCE_LINE, WARNS, AFTERMATH = 0.4, 0.6, 0.8
"""Weights of a traceback's source line (which shows what was called, not what went wrong), of a warning, and of an
exception raised while handling another one.
"""
EVERYDAY_WEIGHT = 0.5
LEAST_SHARE, LEAST_SCORE, SHORT_WEIGHT = 0.6, 5.0, 3.5
"""Minimum share of a phrase's weight, minimum score, and minimum weight of a short phrase that matches word for word.
No row is better than a wrong one.
"""
COMMON = set(
    """a an and are as at be been but by can do for from has have if in is it its may might more no not of on or so some
    such than that the their then there this to up was when where which with you your after all any because during each
    error runtimeerror valueerror typeerror attributeerror indexerror oserror assertionerror warning
    userwarning futurewarning modulenotfounderror named module python torch line file traceback most recent call last
    original""".split()
)
"""Words without information, including names of exceptions."""
EVERYDAY = set(
    """again already another before called cannot could different does expected failed first following found get given
    got index had into last let like line list long make memory model must name named new none number object one
    only open other please present process rank raised range read required run running same set should size
    supported system take time too training two type unable use used using value values version waiting write
    argument device function input output tensor data dataset batch gpu gpus cuda exit code status loss""".split()
)
LOOSE = {"RuntimeError", "ValueError", "AssertionError", "Exception", "DistBackendError", "AcceleratorError", "Error"}
"""Kinds of exceptions that libraries swap for one another between versions."""
NAMES_DECIDE = {
    "NameError": slice(None),
    "KeyError": slice(None),
    "ModuleNotFoundError": slice(None),
    "AttributeError": slice(1),  # the object or module, not the attribute
    "ImportError": slice(1, 2),  # the module
    "TypeError": slice(-1, None),
    "CalledProcessError": slice(1),  # the program
}
"""Kinds whose message varies only in quoted names, and which of these names must match."""
FIXED = re.compile(
    "returned non-zero|unexpected keyword|cannot import name|has no attribute|No module named|is not defined|KeyError"
)
KIND = re.compile(r"(?:^|[\s.\]:(])([A-Z]\w*(?:Error|Exception|Warning|Failed|Hit))(?::(?:\s|$)|\()")
MODULES = re.compile(r"(?:[a-z_]\w*\.){2,}(?:(?=[A-Z])|\w+:(?=\S))")
"""Modules before a class name, or before a logger's message."""
FRAME = re.compile(r"\s*File \"[^\"]*\", line \d+")
COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\[\d+(?:;\d+)*m")
"""Colour codes from Python 3.13 and loggers, also around an exception's name. Web pages drop the escape character."""
PREFIX = re.compile(r"^\s*(?:\[(?:rank)?\d+[\],:]\S*\s*|\(\w+ pid=\d+[^)]*\)\s*|[|│>+❱]\s?)*")
"""Prefix of a line: a launcher's rank, a terminal's frame, or a mail's quote marks."""
TOKEN = re.compile(r"\w+")
QUOTED = re.compile(r"['\"`]([\w./-]+)['\"`]")
URL = re.compile(r"https://\S+")


@dataclass(frozen=True)
class Row:
    """One kind of error, with the fields of catalog.toml."""

    name: str
    subject: str
    see: tuple[str, ...]
    why: str
    fix: str
    follows: int = 0

    @property
    def source(self) -> str:
        """Address of the thread or page behind the row; empty if it has none."""
        return (URL.findall(f"{self.why} {self.fix}") or [""])[0]


@dataclass(frozen=True)
class Match:
    """A matching row, its score (larger is better) and the line of the text that matched."""

    row: Row
    score: float
    line: str


@dataclass(frozen=True, eq=False)
class _Phrase:
    """A phrase of a row: its unique words in order, their weight, its exception and the names that must match."""

    row: Row
    words: tuple[str, ...]
    total: float
    kind: str
    names: frozenset[str]
    beside: str
    """Lower-case text that must also occur somewhere."""


@cache
def rows() -> tuple[Row, ...]:
    """Return all rows, in file order."""
    read = tomllib.loads(CATALOG.read_text("utf-8"))
    return tuple(
        Row(name, subject, **{**of, "see": tuple(of["see"])}) for subject in read for name, of in read[subject].items()
    )


def subjects() -> tuple[str, ...]:
    """Return the catalog's chapters, in file order."""
    return tuple(dict.fromkeys(row.subject for row in rows()))


def words(text: str) -> list[str]:
    """Return lower-case words without numbers, paths and punctuation: what two reports of one error share."""
    text = re.sub(
        r"torch_\d+_\d+(?:_\d+)?", "torch_shared_file", MODULES.sub(" ", text)
    )  # as torch names them in /dev/shm
    text = re.sub(
        r"(?:exit|return) ?code *[:=]? *\(?-", "exitcode_minus_", text, flags=re.IGNORECASE
    )  # keeps the signal
    text = re.sub(r"exit code (\d+)", r"exit_code_\1", text)
    text = re.sub(r"errno:? (\d+)", r"errno_\1", text, flags=re.IGNORECASE)
    text = re.sub(r"(?:0x[0-9a-f]+|(?<![a-z_])[\d.]+(?![a-z_]))", " ", text.lower())
    text = re.sub(r"\S*/\S+/(\S*)", r" \1 ", text)  # keeps only the file of a path
    found = re.findall(r"[a-z_][a-z0-9_]*|\N{EM DASH}|\N{EN DASH}", text)
    return [word for word in found if word not in COMMON]


def search(text: str, most: int = 3) -> list[Match]:
    """Return the best matching rows, best first; empty if none match.

    Compares each line of the text with each phrase of each row. The fewer rows contain a word, the more it weighs. A
    phrase scores the weight of its words found, times their share of the phrase, times how well they keep its order. So
    the most specific line decides, and a row that only follows from another ranks last.
    """
    best: dict[str, Match] = {}
    whole = text.lower()
    for line, trust in _lines(text):
        for match in _fitting(line, trust, whole):
            if match.row.name not in best or match.score > best[match.row.name].score:
                best[match.row.name] = match
    ranked = sorted(best.values(), key=lambda m: -m.score)
    if ranked and ranked[0].row.follows:
        first = ranked[0].line
        ranked.sort(key=lambda m: not _is_clear_cause(m) or m.line in first or first in m.line)
    return ranked[:most]


def unknown_error(text: str) -> str:
    """Return the first error that no row knows, if all matches are only consequences of an error; else ""."""
    known = search(text, most=1)
    if known and not known[0].row.follows:
        return ""
    whole = text.lower()
    for line, trust in _lines(text):
        if trust == 1.0 and _kind(line).endswith("Error") and not any(_fitting(line, trust, whole)):
            return line.strip()
    return ""


def _is_clear_cause(match: Match) -> bool:
    return not match.row.follows and match.score >= CLEAR and not _kind(match.line).endswith("Warning")


def _fitting(line: str, trust: float, whole: str) -> Iterator[Match]:
    """Yield the rows that match one line, some more than once."""
    weigh = _weights()
    said = words(line)
    pairs, kind, joined = set(pairwise(said)), _kind(line), f" {' '.join(said)} "
    there = set(said)
    for phrase in dict.fromkeys(phrase for word in there for phrase in _having().get(word, ())):
        known = sum(weigh[word] for word in phrase.words if word in there)
        if known < LEAST_SHARE * phrase.total or phrase.beside not in whole:
            continue
        if phrase.names and not phrase.names <= set(TOKEN.findall(line)):
            continue
        is_whole = f" {' '.join(phrase.words)} " in joined
        score = trust * known * known / phrase.total * _order(phrase.words, pairs, is_whole)
        score *= OTHER_KIND if _differ(kind, phrase.kind) else 1.0
        if (is_whole and phrase.total >= SHORT_WEIGHT) or (phrase.names and kind == phrase.kind):
            score = max(score, LEAST_SCORE)
        if phrase.beside:
            score *= 1.5  # two places in the text agree
        if score >= LEAST_SCORE:
            yield Match(phrase.row, score * FOLLOWS[phrase.row.follows], line.strip())


def _lines(text: str) -> Iterator[tuple[str, float]]:
    """Yield each distinct line, and each pair of adjacent lines joined (terminals break messages), with its trust.

    The trust says how reliably a line tells what went wrong.
    """
    text = COLOUR.sub("", text).replace("\\n", "\n")
    lines = [PREFIX.sub("", line).rstrip(" │") for line in text.splitlines()]
    lines = [line for line in lines if line.strip()]
    trusted, before, later = [], "", False
    for line in lines:
        later |= "another exception occurred" in line
        source = FRAME.match(before) and not _kind(line)
        if not FRAME.match(line):
            trust = SOURCE_LINE if source else WARNS if _kind(line).endswith("Warning") else AFTERMATH if later else 1.0
            trusted.append((line, trust))
        before = line
    joined = [(f"{a} {b}", min(s, t)) for (a, s), (b, t) in pairwise(trusted)]
    seen: dict[str, tuple[str, float]] = {}
    for line, trust in [*trusted, *joined]:
        seen.setdefault(" ".join(words(line)), (line, trust))  # a log repeats itself
    yield from seen.values()


def _order(phrase: tuple[str, ...], pairs: set[tuple[str, str]], is_whole: bool) -> float:
    """Weigh a phrase's order by the share of its adjacent words that are adjacent in the text, using IN_ORDER."""
    neighbours = list(pairwise(phrase))
    share = sum(pair in pairs for pair in neighbours) / len(neighbours) if neighbours else 1.0
    return IN_ORDER[0] + IN_ORDER[1] * share + IN_ORDER[2] * is_whole


def _kind(text: str) -> str:
    """Return the exception that a line names, or ""."""
    found = KIND.findall(text)
    return found[-1] if found else ""


def _differ(a: str, b: str) -> bool:
    return bool(a and b) and a != b and not (a in LOOSE and b in LOOSE)


@cache
def _phrases() -> list[_Phrase]:
    weigh = _weights()
    found = []
    for row in rows():
        for entry in row.see:
            text, _, beside = entry.partition(" && ")
            said, kind = tuple(dict.fromkeys(words(text))), _kind(text)
            fixed = kind in NAMES_DECIDE and FIXED.search(text)
            names = TOKEN.findall(" ".join(QUOTED.findall(text)[NAMES_DECIDE[kind]])) if fixed else ()
            found.append(_Phrase(row, said, sum(weigh[w] for w in said), kind, frozenset(names), beside.lower()))
    return found


@cache
def _having() -> dict[str, list[_Phrase]]:
    """Index phrases by the rarer half of their words: without any of these, a phrase can't match well."""
    weigh = _weights()
    found: dict[str, list[_Phrase]] = {}
    for phrase in _phrases():
        rarest = sorted(phrase.words, key=lambda word: -weigh[word])
        for word in rarest[: max(2, (len(rarest) + 1) // 2)]:
            found.setdefault(word, []).append(phrase)
    return found


@cache
def _weights() -> dict[str, float]:
    """Return {word: log(1 + rows / rows that contain it)}, reduced for everyday words."""
    having = Counter(w for row in rows() for w in {w for entry in row.see for w in words(entry.partition(" && ")[0])})
    rare = {word: math.log(1 + len(rows()) / count) for word, count in having.items()}
    return {word: weight * (EVERYDAY_WEIGHT if word in EVERYDAY else 1.0) for word, weight in rare.items()}
