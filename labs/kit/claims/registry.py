"""The statements of claims.toml, and the functions that turn records into verdicts on them."""

from __future__ import annotations

import importlib
import importlib.util
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from labs.kit.record import KINDS, Records

WORDS = ("holds", "does not hold", "depends", "needs N GPUs", "not tried yet")
PAPER = ("true", "true with conditions", "outdated", "wrong")


@dataclass(frozen=True)
class Article:
    """A source: its own title (empty if the text has none), that title in English, and its date."""

    key: str
    title: str
    title_en: str
    date: str

    def __str__(self) -> str:
        original = f" ({self.title})" if self.title else " (no title in the text; this one is ours)"
        return f'{self.key}: "{self.title_en}"{original}, {self.date}'


@dataclass(frozen=True)
class Claim:
    """One statement. `paper` is the verdict of reading alone, `gpus` the fewest that a test needs."""

    id: str
    lines: str
    claim: str
    paper: str
    takeaway: str
    notebook: str
    gpus: int

    @property
    def source(self) -> str:
        """Where it is stated, for example "A, lines 50-51"."""
        return f"{self.id[0]}, line{'' if self.lines.isdigit() else 's'} {self.lines}"


@dataclass(frozen=True)
class Verdict:
    """A word of WORDS, the reason with its numbers, and which kind of number it rests on ("" if on none)."""

    word: str
    because: str
    kind: str = "measured"

    def __post_init__(self) -> None:
        if self.word not in WORDS and not re.fullmatch(r"needs \d+ GPUs?", self.word):
            raise ValueError(f"a verdict is one of {', '.join(WORDS)}, not {self.word!r}")
        if self.kind not in (*KINDS, ""):
            raise ValueError(f"the kind of a verdict is one of {', '.join(KINDS)}, not {self.kind!r}")


Judge = Callable[[Records], Verdict]
_judges: dict[str, Judge] = {}


def verdict(claim_id: str) -> Callable[[Judge], Judge]:
    """Register a function of the records as the judge of claim `claim_id`.

    ValueError if there is no such claim, it has a judge already, or it belongs to another notebook's module.
    """

    def register(judge: Judge) -> Judge:
        known = _by_id().get(claim_id)
        if known is None:
            raise ValueError(f"there is no claim {claim_id!r} in claims.toml")
        chapter = re.match(r"labs\.chapters\.(nb\d\d)\.", judge.__module__)
        if chapter and chapter[1] != f"nb{known.notebook}":
            raise ValueError(f"claims.toml puts {claim_id} into notebook {known.notebook}, not into {chapter[1]}")
        there = _judges.get(claim_id)
        if there is not None and _place(there) != _place(judge):  # the same place again: a module was reloaded
            raise ValueError(f"claim {claim_id} has two verdict functions, at {_place(there)} and {_place(judge)}")
        _judges[claim_id] = judge
        return judge

    return register


def _place(judge: Judge) -> str:
    code = judge.__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


def judge_of(claim: Claim) -> Judge | None:
    """The registered function of a claim; imports labs/chapters/nbNN/claims.py when first asked."""
    name = f"labs.chapters.nb{claim.notebook}"
    if importlib.util.find_spec(name) is not None and importlib.util.find_spec(f"{name}.claims") is not None:
        importlib.import_module(f"{name}.claims")
    return _judges.get(claim.id)


def claims(notebook: str | None = None) -> list[Claim]:
    """All statements, or those of one notebook ("03"), in the order of claims.toml."""
    return [c for c in _by_id().values() if notebook in (None, c.notebook)]


def articles() -> dict[str, Article]:
    """The source articles by their letter."""
    return {key: Article(key, **a) for key, a in _read()["articles"].items()}


@cache
def _by_id() -> dict[str, Claim]:
    found: dict[str, Claim] = {}
    for row in _read()["claim"]:
        claim = Claim(**row)
        if claim.id in found:
            raise ValueError(f"claims.toml holds {claim.id} twice")
        if claim.paper not in PAPER or claim.id[0] not in _read()["articles"]:
            raise ValueError(f"claims.toml, {claim.id}: unknown article, or paper = {claim.paper!r}")
        found[claim.id] = claim
    return found


@cache
def _read() -> dict:
    return tomllib.loads(files("labs.kit.claims").joinpath("claims.toml").read_text(encoding="utf-8"))
