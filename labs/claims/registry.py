"""What five articles state, and what this course's records say about it.

    from labs.claims.registry import Verdict, verdict

    @verdict("A13")                                          # in labs/claims/nb03.py
    def a13_more_gpus_shorten_an_epoch(records):
        speedup = records.one("speedup", ranks=2)            # LookupError here means "not tried yet"
        return Verdict("does not hold", f"{speedup.value:.2f}x on 2 ranks", speedup.kind)

The statements are in claims.toml, which also holds the verdict if no notebook tests the statement any more.
`python -m labs.claims` prints all of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from labs.kit.claim_records import RECORDED, kept, kept_of_gpus, launches
from labs.kit.errors import did_you_mean, require
from labs.kit.measure import Estimate, paired_ratio
from labs.kit.record import KINDS, Record, Records

WORDS = ("holds", "does not hold", "depends", "not tested", "needs N GPUs", "not tried yet")
SIGNS = ("does not hold", "depends", "holds")
"""The words that judge a claim."""
PAPER = ("true", "true with conditions", "outdated", "wrong")
HOW = ("computed from a notebook's records", "earlier run", "documentation", "arithmetic", "judgement", "not tested")
GAIN = 1.05  # smaller ratios don't count as a gain


@dataclass(frozen=True)
class Article:
    """A source: its own title (empty if the text has none), that title in English, and its date."""

    key: str
    title: str
    title_en: str
    date: str


@dataclass(frozen=True)
class Claim:
    """One statement, in the words of claims.toml, which explains its fields."""

    id: str
    lines: str
    claim: str
    paper: str
    takeaway: str
    notebook: str
    gpus: int
    changes: str = ""
    command: str = ""
    subject: str = ""
    verdict: str = ""
    because: str = ""
    decided: str = ""
    kind: str = ""

    @property
    def source(self) -> str:
        """The place of the statement, for example "A, lines 50-51"."""
        return f"{self.id[0]}, line{'' if self.lines.isdigit() else 's'} {self.lines}"


@dataclass(frozen=True)
class Verdict:
    """A word from WORDS, the reason with its numbers, and the kind of number it rests on ("" if on none)."""

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

    Raises ValueError if the claim doesn't exist, already has a judge or belongs to another notebook's module.
    """

    def register(judge: Judge) -> Judge:
        known = _by_id().get(claim_id)
        if known is None:
            raise ValueError(f"there is no claim {claim_id!r} in claims.toml")
        module = re.match(r"labs\.claims\.(nb\d\d)\b", judge.__module__)
        if module and module[1] != f"nb{known.notebook}":
            raise ValueError(f"claims.toml puts {claim_id} into notebook {known.notebook}, not into {module[1]}")
        other = _judges.get(claim_id)
        if other is not None and _place(other) != _place(judge):  # the same place: a module was reloaded
            raise ValueError(f"claim {claim_id} has two verdict functions, at {_place(other)} and {_place(judge)}")
        _judges[claim_id] = judge
        return judge

    return register


def _place(judge: Judge) -> str:
    return f"{judge.__code__.co_filename}:{judge.__code__.co_firstlineno}"


def judge_of(claim: Claim) -> Judge | None:
    """Return a claim's registered function; imports labs.claims.nbNN if needed. None if the claim has none."""
    if importlib.util.find_spec(f"labs.claims.nb{claim.notebook}"):
        importlib.import_module(f"labs.claims.nb{claim.notebook}")
    return _judges.get(claim.id)


def claims(notebook: str | None = None) -> list[Claim]:
    """Return all statements, or those of one notebook ("03"), in the order of claims.toml."""
    return [c for c in _by_id().values() if notebook in (None, c.notebook)]


def by_id(claim_id: str) -> Claim:
    """Return one claim. Raises BadInput for an unknown id."""
    known = _by_id()
    hint = did_you_mean(claim_id.upper(), known)
    require(claim_id.upper() in known, f"there is no claim {claim_id!r}: {hint}Ids are {min(known)} to {max(known)}.")
    return known[claim_id.upper()]


def articles() -> dict[str, Article]:
    """Return the source articles by their letter."""
    return {key: Article(key, **a) for key, a in _read()["articles"].items()}


@cache
def _by_id() -> dict[str, Claim]:
    found: dict[str, Claim] = {}
    subjects = _read()["subjects"]
    for row in _read()["claim"]:
        claim = Claim(**{"subject": subjects[row["notebook"]]} | row)
        wrong = claim.id in found or claim.paper not in PAPER or claim.subject not in subjects.values()
        if wrong or claim.id[0] not in _read()["articles"]:
            raise ValueError(f"claims.toml, {claim.id}: there twice, or unknown article, subject or paper")
        found[claim.id] = claim
    return found


@cache
def _read() -> dict:
    return tomllib.loads(Path(__file__).with_name("claims.toml").read_text(encoding="utf-8"))


# -- verdicts


def judge(claim: Claim, evidence: Iterable[Record] = (), strict: bool = False) -> Verdict:
    """Return the verdict on `claim` that `evidence` supports.

    Without evidence the verdict is "not tried yet" or "needs N GPUs", never a guess. A function that fails in another
    way gives "not tried yet" with the error; with `strict`, for tests, the error is raised.
    """
    if claim.verdict:
        return Verdict(claim.verdict, f"{claim.because} (decided by {claim.decided})", claim.kind)
    function = judge_of(claim)
    if function is None:
        return _untried(claim, "the course has no experiment for it yet")
    records = evidence if isinstance(evidence, Records) else Records(evidence)
    try:
        found = function(records)
    except LookupError as e:
        if strict and type(e) is not LookupError:  # an IndexError or KeyError is a bug in the function
            raise
        return _untried(claim, f"no evidence: {e}")
    except Exception as e:
        if strict:
            raise
        return Verdict("not tried yet", f"its test failed: {type(e).__name__}: {e}", "")
    if found.word == "needs N GPUs":
        return Verdict(_needs(claim), found.because, "")
    kinds = {r.kind for r in records}
    if found.kind == "measured" and "measured" not in kinds:
        return replace(found, kind="recorded" if "recorded" in kinds else "")
    return found


def _untried(claim: Claim, why: str) -> Verdict:
    return Verdict(_needs(claim) if claim.gpus else "not tried yet", why, "")


def _needs(claim: Claim) -> str:
    n = max(1, claim.gpus)
    return f"needs {n} GPU{'s' if n > 1 else ''}"


@cache
def recorded_verdict(claim: Claim) -> Verdict:
    """Return the verdict by the committed run's records, or by a recorded GPU run's if it needs a GPU."""
    found = judge(claim, kept(claim.notebook, RECORDED))
    for records in kept_of_gpus(claim.notebook) if found.word.startswith("needs") else ():
        verdict = judge(claim, records)
        where = ", ".join(dict.fromkeys(records.provenance["gpus"]))
        if verdict.word in SIGNS and not verdict.because.startswith(INCONCLUSIVE):
            return replace(verdict, because=f"on {where}: {verdict.because}")
    return found


def how_decided(claim: Claim, found: Verdict) -> str:
    """Return one of HOW."""
    if found.word not in SIGNS:
        return "not tested"
    if not claim.verdict:
        return HOW[0] if found.kind in ("measured", "recorded", "modelled") else "documentation"
    starts = {"arithmetic": "arithmetic", "documentation": "documentation", "a published table": "documentation"}
    starts["reading"] = "judgement"
    return next((how for start, how in starts.items() if claim.decided.startswith(start)), "earlier run")


# -- what verdict functions use


def runs(evidence: Records, lab: str, metric: str, **case: object) -> list[Records]:
    """Return the launches of `lab` that hold such a record, in order. Raises LookupError if there is none."""
    fit = [run for run in launches(r for r in evidence if r.lab == lab) if len(run.where(metric, **case))]
    if not fit:
        raise LookupError(f"no launch({lab!r}) with {metric!r}{f' and {case}' if case else ''} here")
    return fit


def last(evidence: Records, lab: str, metric: str, **case: object) -> Records:
    """Return the last launch of `lab` that holds such a record. Raises LookupError if there is none."""
    return runs(evidence, lab, metric, **case)[-1]


def ratio(a: Record, b: Record) -> Estimate:
    """Return a / b, pair by pair. Raises LookupError if their samples aren't pairs."""
    if len(a.samples) != len(b.samples):
        raise LookupError(f"{a.case} and {b.case} of {a.metric!r} have {len(a.samples)} and {len(b.samples)} samples")
    return paired_ratio(a.samples, b.samples)


def ends(said: Sequence[str]) -> str:
    """Return "first to last" of sorted parts, or the single part."""
    return " to ".join(dict.fromkeys((said[0], said[-1])))


def within(ratio: Estimate, margin: float = 0.05, null: float = 1.0) -> bool:
    """Return whether the whole interval is within `margin` of `null`. Stronger than "no difference shown"."""
    return null - margin <= ratio.low and ratio.high <= null + margin


def model_of(run: Records) -> str:
    """Return the model of a launch, without the module of its factory."""
    return str(run[0].config.get("model", "?")).rpartition(":")[2]


INCONCLUSIVE = "inconclusive in this run: "
"""Starts the reason of a "depends" that comes from inconclusive samples, not from cases that differ."""


def verdict_word(right: Sequence[bool], wrong: Sequence[bool]) -> str:
    """Return "holds" if every comparison is shown right, "does not hold" if every one is shown wrong, else "depends".

    "depends": cases differ, or the samples are inconclusive. Raises LookupError without a comparison.
    """
    if not right:
        raise LookupError("nothing to compare was run")
    return "holds" if all(right) else "does not hold" if all(wrong) else "depends"


def verdict_for(right: Sequence[bool], wrong: Sequence[bool], because: str, kind: str = "measured") -> Verdict:
    """Return a verdict by `verdict_word`, with its reason. Where samples are inconclusive, the reason says so first.

    Raises LookupError without a comparison.
    """
    found, doubt = verdict_word(right, wrong), ""
    if found == "depends" and not any(right) and not any(wrong):
        doubt = INCONCLUSIVE
    elif found == "depends" and not (any(right) and any(wrong)):
        shown, how = (right, "hold") if any(right) else (wrong, "be wrong")
        are = "is" if sum(shown) == 1 else "are"
        doubt = f"{sum(shown)} of {len(shown)} cases {are} shown to {how}; the rest are inconclusive: "
    return Verdict(found, doubt + because, kind)


def in_general(right: Sequence[bool], wrong: Sequence[bool], because: str, kind: str = "measured") -> Verdict:
    """Judge a statement about every case: one case that is shown wrong refutes it."""
    return verdict_for(right, [any(wrong)] * len(wrong), because, kind)


def depends(shown: bool, because: str, kind: str = "measured") -> Verdict:
    """Return "depends": because cases are shown to differ, or because this run is inconclusive."""
    return Verdict("depends", because if shown else INCONCLUSIVE + because, kind)
