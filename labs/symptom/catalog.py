"""The chart of symptoms, and the row that fits a text: a traceback, a log, or a few words of one's own."""

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

CHART = Path(__file__).with_name("catalog.toml")
SUBJECTS = (
    "memory",
    "start-up",
    "DDP and sharding",
    "hangs and collectives",
    "loading data",
    "a step",
    "numbers",
    "files and checkpoints",
    "environment",
    "compiling",
)
FOLLOWS = (1.0, 0.5, 0.12, 0.05)
"""Weight of a row that follows another, by level: with its cause in the same text, the cause comes first."""
CLEAR = 15.0
"""From this score on an exception comes before what follows, however long the message of that: NCCL's are."""
IN_ORDER = (0.5, 1.0)
"""Weight of words that stand in the text in another order than in the chart, and what the same order adds."""
OTHER_KIND = 0.6
"""Weight if the text names an exception of another kind than the chart."""
SOURCE_LINE, WARNS, AFTERMATH = 0.4, 0.6, 0.8
"""Weight of a line of the program in a traceback (it says what was called, not what went wrong), of a warning, and of
what was raised while another exception was handled."""
PLAIN = 0.5
"""Weight of an everyday word."""
LEAST_SHARE, LEAST_WORDS, LEAST_SCORE, LEAST_WEIGHT = 0.3, 2, 5.0, 3.5
"""Of a phrase by weight, of its words, of the score, and of a short phrase that stands there whole: no row is better
than a wrong one. Chosen with the texts of tests/public_error_texts.toml."""
WINDOW, WHOLE = 6, 0.8
"""So many words in a row of a longer phrase are taken for it, if this share of them is there."""
COMMON = set(
    """a an and are as at be been but by can do for from has have if in is it its may might more no not of on or so some
    such than that the their then there this to up was when where which with you your after all any because during each
    error runtimeerror valueerror typeerror attributeerror indexerror oserror assertionerror warning
    userwarning futurewarning modulenotfounderror named module python torch line file traceback most recent call last
    original""".split()
)
"""Words that tell nothing, among them the names of exceptions."""
EVERYDAY = set(
    """again already another before called cannot could different does expected failed first following found get given
    got index had into last let like line list long make memory model must name named new none number object one
    only open other please present process rank raised range read required run running same set should size
    supported system take time too training two type unable use used using value values version waiting write
    argument device function input output tensor data dataset batch gpu gpus cuda exit code status loss""".split()
)
LOOSE = {"RuntimeError", "ValueError", "AssertionError", "Exception", "DistBackendError", "AcceleratorError", "Error"}
"""Kinds of exceptions that libraries exchange for each other between versions."""
NAMES_DECIDE = {
    "NameError": slice(None),
    "KeyError": slice(None),
    "ModuleNotFoundError": slice(None),
    "AttributeError": slice(1),  # of which object or module, not which attribute
    "ImportError": slice(1, 2),  # from which module
    "TypeError": slice(-1, None),
    "CalledProcessError": slice(1),  # which program
}
"""Kinds whose message is always the same but for names in quotes, and which of these must be the same."""
FIXED = (
    "returned non-zero",
    "unexpected keyword",
    "cannot import name",
    "has no attribute",
    "No module named",
    "is not defined",
    "KeyError",
)
RAISED = ("Error", "Exception")
CAUSES = re.compile(r"CUDA error:|oom[-_]kill")
"""In lines that name no kind of exception and are no consequence of another rank's."""
KIND = re.compile(r"(?:^|[\s.\]:(])([A-Z]\w*(?:Error|Exception|Warning)):(?:\s|$)")
MODULES = re.compile(r"(?:[a-z_]\w*\.){2,}(?:(?=[A-Z])|\w+:(?=\S))")
"""The modules before the name of a class, or before what a logger says."""
FRAME = re.compile(r"\s*File \"[^\"]*\", line \d+")
COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\[\d+(?:;\d+)*m")
"""As Python 3.13 and loggers print it to a terminal: around the kind of an exception, too. Pages drop the escape."""
PREFIX = re.compile(r"^\s*(?:\[(?:rank)?\d+[\],:]\S*\s*|[|│>+❱]\s?)*")
"""Of a line: the rank that a launcher names, what a terminal or a mail draws."""
TOKEN = re.compile(r"\w+")
QUOTED = re.compile(r"['\"`]([\w./-]+)['\"`]")


@dataclass(frozen=True)
class Row:
    """A symptom: fields as in catalog.toml."""

    name: str
    subject: str
    see: tuple[str, ...]
    means: str
    ask: str
    cure: str
    drill: str = ""
    command: str = ""
    source: str = ""
    asked: str = ""
    follows: int = 0

    def __post_init__(self) -> None:
        assert self.see and (self.drill or self.command or self.source), self.name
        assert self.subject in SUBJECTS, (self.name, self.subject)


@dataclass(frozen=True)
class Found:
    """A row that fits, how well (larger is better) and the line of the text that it was found in."""

    row: Row
    score: float
    line: str


@dataclass(frozen=True, eq=False)
class _Phrase:
    """A phrase of a row: its words once each, in order, what they weigh, its exception and the names that decide."""

    row: Row
    words: tuple[str, ...]
    total: float
    kind: str
    names: frozenset[str]
    least: float = LEAST_SHARE


@cache
def rows() -> tuple[Row, ...]:
    """All rows, in the order of the file."""
    read = tomllib.loads(CHART.read_text("utf-8"))["row"]
    return tuple(Row(**{**row, "see": tuple(row["see"])}) for row in read)


def words(text: str) -> list[str]:
    """Words in lower case, without numbers, paths and punctuation: what two texts of one error have in common."""
    text = MODULES.sub(" ", text)
    text = re.sub(r"(?:exit|return) ?code *[:=]? *-", "exitcode_minus_", text, flags=re.IGNORECASE)  # which signal
    text = re.sub(r"exit code (\d+)", r"exit_code_\1", text)
    text = re.sub(r"Errno (\d+)", r"errno_\1", text, flags=re.IGNORECASE)
    text = re.sub(r"errno: (\d+)", r"errno_\1", text, flags=re.IGNORECASE)
    text = re.sub(r"(?:0x[0-9a-f]+|(?<![a-z_])[\d.]+(?![a-z_]))", " ", text.lower())
    text = re.sub(r"\S*/\S+/(\S*)", r" \1 ", text)  # of a path the file
    found = re.findall(r"[a-z_][a-z0-9_]*|\N{EM DASH}|\N{EN DASH}", text)
    return [word for word in found if word not in COMMON]


def search(text: str, most: int = 3) -> list[Found]:
    """The rows that fit best, best first; empty if none does.

    Each line of the text is held against each phrase of each row. A word weighs the more, the fewer rows have it. A
    phrase scores what its words weigh that are found, times the share of the phrase that this is, times how far they
    stand in the phrase's order. A row that only tells of consequences is no answer to an error that the chart lacks.
    """
    best: dict[str, Found] = {}
    unknown = False
    for line, trust in _lines(text):
        here = list(_fitting(line, trust))
        unknown |= not here and trust == 1.0 and _kind(line).endswith(RAISED)
        for found in here:
            if found.row.name not in best or found.score > best[found.row.name].score:
                best[found.row.name] = found
    ranked = sorted(best.values(), key=lambda f: -f.score)
    if ranked and ranked[0].row.follows:
        first = ranked[0].line
        ranked.sort(key=lambda f: not _is_clear_cause(f) or f.line in first or first in f.line)
    if unknown and ranked and ranked[0].row.follows > 1:
        return []
    return ranked[:most]


def _is_clear_cause(found: Found) -> bool:
    raised = _kind(found.line).endswith(RAISED) or CAUSES.search(found.line)
    return bool(raised) and not found.row.follows and found.score >= CLEAR


def _fitting(line: str, trust: float) -> Iterator[Found]:
    """The rows that fit one line, some more than once."""
    weigh = _weights()
    said = words(line)
    pairs, kind, joined = set(pairwise(said)), _kind(line), f" {' '.join(said)} "
    there = set(said)
    for phrase in dict.fromkeys(phrase for word in there for phrase in _having().get(word, ())):
        known = [word for word in phrase.words if word in there]
        found = sum(weigh[w] for w in known)
        if found < phrase.least * phrase.total or len(known) < min(LEAST_WORDS, len(phrase.words)):
            continue
        if phrase.names and not phrase.names <= set(TOKEN.findall(line)):
            continue
        score = trust * found * found / phrase.total * _order(phrase.words, pairs)
        score *= OTHER_KIND if _differ(kind, phrase.kind) else 1.0
        if len(known) == len(phrase.words) and phrase.total >= LEAST_WEIGHT and f" {' '.join(phrase.words)} " in joined:
            score = max(score, LEAST_SCORE)  # short, but all of it
        if score >= LEAST_SCORE:
            yield Found(phrase.row, score * FOLLOWS[phrase.row.follows], line.strip())


def _lines(text: str) -> Iterator[tuple[str, float]]:
    """Each line that says something new, and two that follow each other as one (a terminal breaks messages).

    With each line how far it can be trusted to say what went wrong.
    """
    text = COLOUR.sub("", text).replace("\\n", "\n")
    lines = [PREFIX.sub("", line).rstrip(" │") for line in text.splitlines()]
    lines = [line for line in lines if line.strip()]
    kept, before, later = [], "", False
    for line in lines:
        later |= "another exception occurred" in line
        source = FRAME.match(before) and not _kind(line)
        if not FRAME.match(line):
            trust = SOURCE_LINE if source else WARNS if _kind(line).endswith("Warning") else AFTERMATH if later else 1.0
            kept.append((line, trust))
        before = line
    joined = [(f"{a} {b}", min(s, t)) for (a, s), (b, t) in pairwise(kept)]
    told: dict[str, tuple[str, float]] = {}
    for line, trust in [*kept, *joined]:
        told.setdefault(" ".join(words(line)), (line, trust))  # a log says one thing many times
    yield from told.values()


def _order(phrase: tuple[str, ...], pairs: set[tuple[str, str]]) -> float:
    """IN_ORDER by the share of neighbours in the phrase that are neighbours in the text."""
    neighbours = list(pairwise(phrase))
    share = sum(pair in pairs for pair in neighbours) / len(neighbours) if neighbours else 1.0
    return IN_ORDER[0] + IN_ORDER[1] * share


def _kind(text: str) -> str:
    """The exception that a line names, "" if none."""
    found = KIND.findall(text)
    return found[-1] if found else ""


def _differ(a: str, b: str) -> bool:
    return bool(a and b) and a != b and not (a in LOOSE and b in LOOSE)


@cache
def _phrases() -> list[_Phrase]:
    weigh = _weights()
    found = []
    for row in rows():
        for text in {part for phrase in row.see for part in (phrase, phrase.split(". ")[0])}:  # often quoted alone
            said, kind = tuple(dict.fromkeys(words(text))), _kind(text)
            fixed = kind in NAMES_DECIDE and any(part in text for part in FIXED)
            names = TOKEN.findall(" ".join(QUOTED.findall(text)[NAMES_DECIDE[kind]])) if fixed else ()
            found.append(_Phrase(row, said, sum(weigh[w] for w in said), kind, frozenset(names)))
            parts = [said[i : i + WINDOW] for i in range(0, len(said) - WINDOW + 1, WINDOW // 2)]
            for part in parts if not names and len(said) > WINDOW else ():  # a terminal or a person broke the message
                found.append(_Phrase(row, part, sum(weigh[w] for w in part), kind, frozenset(), WHOLE))
    return found


@cache
def _having() -> dict[str, list[_Phrase]]:
    """Phrases by the rarer half of their words: without any of these a phrase fits badly."""
    weigh = _weights()
    found: dict[str, list[_Phrase]] = {}
    for phrase in _phrases():
        rarest = sorted(phrase.words, key=lambda word: -weigh[word])
        for word in rarest[: max(2, (len(rarest) + 1) // 2)]:
            found.setdefault(word, []).append(phrase)
    return found


@cache
def _weights() -> dict[str, float]:
    """{word: log(rows / rows that have it)}, at least a little."""
    having = Counter(w for row in rows() for w in {w for phrase in row.see for w in words(phrase)})
    rare = {word: math.log(1 + len(rows()) / count) for word, count in having.items()}
    return {word: weight * (PLAIN if word in EVERYDAY else 1.0) for word, weight in rare.items()}
