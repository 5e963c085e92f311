"""Claims on trial: what five articles state, and what this course's records say about it.

    from labs.kit.claims import Verdict, table, verdict

    @verdict("A13")                                  # in labs/claims/nb03.py
    def a13_time_of_an_epoch(evidence):
        step_s = evidence.one("step_s", ranks=2)     # LookupError here means "not tried yet"
        return Verdict("does not hold", f"{step_s.value:.3f} s per step on 2 ranks", step_s.kind)

    table(notebook="03", evidence=records)           # in the notebook

The statements are in claims.toml. `python -m labs.claims` prints them all.
"""

from __future__ import annotations

import html
import importlib
import importlib.util
import re
import textwrap
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from labs.kit import nvml
from labs.kit.evidence import keep, kept_of_gpus, launches
from labs.kit.measure import Estimate, estimate, paired_ratio
from labs.kit.record import KINDS, Record, Records, origin

WORDS = ("holds", "does not hold", "depends", "not tested", "needs N GPUs", "not tried yet")
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
    """One statement. `paper` is the verdict from reading alone; `gpus` is the smallest number that a test needs.

    `changes` says which observation would change the verdict; `command` decides it on a machine with GPUs.
    """

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
    """Its topic, for example "data parallelism": the notebook's, unless claims.toml sets one for this claim."""
    verdict: str = ""
    """One of WORDS, if the course no longer runs the experiment behind it. Such a claim has no verdict function."""
    because: str = ""
    decided: str = ""
    """How `verdict` was reached: "a run of labs.lr_scaling, 2026-11-27", "documentation", "arithmetic"."""
    kind: str = ""
    """The kind of number `verdict` rests on, one of KINDS; empty if on none."""

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
        chapter = re.match(r"labs\.(?:chapters|claims)\.(nb\d\d)\b", judge.__module__)
        if chapter and chapter[1] != f"nb{known.notebook}":
            raise ValueError(f"claims.toml puts {claim_id} into notebook {known.notebook}, not into {chapter[1]}")
        there = _judges.get(claim_id)
        if there is not None and _place(there) != _place(judge):  # the same place means that a module was reloaded
            raise ValueError(f"claim {claim_id} has two verdict functions, at {_place(there)} and {_place(judge)}")
        _judges[claim_id] = judge
        return judge

    return register


def _place(judge: Judge) -> str:
    code = judge.__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


def judge_of(claim: Claim) -> Judge | None:
    """Return a claim's registered function; imports labs.claims.nbNN or labs.chapters.nbNN.claims if needed."""
    chapter = f"labs.chapters.nb{claim.notebook}"
    if importlib.util.find_spec(f"labs.claims.nb{claim.notebook}") is not None:
        importlib.import_module(f"labs.claims.nb{claim.notebook}")
    elif importlib.util.find_spec(chapter) is not None and importlib.util.find_spec(f"{chapter}.claims") is not None:
        importlib.import_module(f"{chapter}.claims")
    return _judges.get(claim.id)


def claims(notebook: str | None = None) -> list[Claim]:
    """Return all statements, or those of one notebook ("03"), in the order of claims.toml."""
    return [c for c in _by_id().values() if notebook in (None, c.notebook)]


def articles() -> dict[str, Article]:
    """Return the source articles by their letter."""
    return {key: Article(key, **a) for key, a in _read()["articles"].items()}


@cache
def _by_id() -> dict[str, Claim]:
    found: dict[str, Claim] = {}
    for row in _read()["claim"]:
        claim = Claim(**{"subject": _read()["subjects"][row["notebook"]]} | row)
        if claim.id in found:
            raise ValueError(f"claims.toml holds {claim.id} twice")
        if claim.paper not in PAPER or claim.id[0] not in _read()["articles"]:
            raise ValueError(f"claims.toml, {claim.id}: unknown article, or paper = {claim.paper!r}")
        if claim.subject not in _read()["subjects"].values():
            raise ValueError(f"claims.toml, {claim.id}: unknown subject {claim.subject!r}")
        found[claim.id] = claim
    return found


@cache
def _read() -> dict:
    return tomllib.loads(Path(__file__).with_name("claims.toml").read_text(encoding="utf-8"))


GB, MB = 1e9, 1e6  # decimal, as memory is sold
GAIN = 1.05  # smaller ratios don't count as a gain


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


def gain(a: Record, b: Record) -> Estimate:
    """Return a - b of shares in percentage points, pair by pair (by seed). Raises LookupError if they aren't pairs."""
    if len(a.samples) != len(b.samples):
        raise LookupError(f"{a.case} and {b.case} of {a.metric!r} have {len(a.samples)} and {len(b.samples)} samples")
    return estimate([100 * (x - y) for x, y in zip(a.samples, b.samples, strict=True)], "points")


def percent(shares: Record) -> Estimate:
    """Convert a record of shares to percent."""
    return estimate(shares.samples).scaled(100, "%")


def ends(said: Sequence[str]) -> str:
    """Return "first to last" of sorted parts, or the single part."""
    return " to ".join(dict.fromkeys((said[0], said[-1])))


def size(nbytes: float) -> str:
    """Format bytes as "10.3 GB", or in MB below 1 GB."""
    return f"{nbytes / GB:.1f} GB" if nbytes >= GB else f"{nbytes / MB:.1f} MB"


def within(ratio: Estimate, margin: float = 0.05, null: float = 1.0) -> bool:
    """Return whether the whole interval is within `margin` of `null`. Stronger than "no difference shown"."""
    return null - margin <= ratio.low and ratio.high <= null + margin


def model_of(run: Records) -> str:
    """Return the model of a launch, without the module of its factory."""
    return str(run[0].config.get("model", "?")).rpartition(":")[2]


def word(right: Sequence[bool], wrong: Sequence[bool]) -> str:
    """Return "holds" if every comparison is shown right, "does not hold" if every one is shown wrong, else "depends".

    "depends": cases differ, or the samples are inconclusive. Raises LookupError without a comparison.
    """
    if not right:
        raise LookupError("nothing to compare was run")
    return "holds" if all(right) else "does not hold" if all(wrong) else "depends"


CANNOT_TELL = "inconclusive in this run: "
"""Starts the reason of a "depends" that comes from inconclusive samples, not from cases that differ."""


def judged(right: Sequence[bool], wrong: Sequence[bool], because: str, kind: str = "measured") -> Verdict:
    """Return the verdict `word` with its reason. Where samples are inconclusive, the reason starts by saying so.

    Raises LookupError without a comparison.
    """
    found = word(right, wrong)
    return Verdict(found, _before(_untold(right, wrong) if found == "depends" else "", because), kind)


def in_general(right: Sequence[bool], wrong: Sequence[bool], because: str, kind: str = "measured") -> Verdict:
    """Judge a statement about every case: one case that is shown wrong refutes it."""
    return judged(right, [any(wrong)] * len(wrong), because, kind)


def cannot_tell(because: str, kind: str = "measured") -> Verdict:
    """Return "depends" for a run that is inconclusive."""
    return Verdict("depends", _before(CANNOT_TELL, because), kind)


def depends(shown: bool, because: str, kind: str = "measured") -> Verdict:
    """Return "depends": because cases are shown to differ, or because this run is inconclusive."""
    return Verdict("depends", because, kind) if shown else cannot_tell(because, kind)


def only_on(run: Iterable[Record], what: str = "") -> str:
    """Return " (two models on one CPU; other machines may differ)", to limit a reason that sounds general.

    `what` is what was measured, such as "two models". GPUs are named; the evidence's caption names the CPU.
    """
    found = (origin("measured", {**r.provenance, "source": ""}, str(r.layout.get("device") or "")) for r in run)
    names = dict.fromkeys((facts[1], int(facts[2]) > 0) for facts in found)
    cpus = sum(not is_gpu for _, is_gpu in names)
    machines = [name for name, is_gpu in names if is_gpu] + [f"{cpus} CPUs" if cpus > 1 else "one CPU"] * (cpus > 0)
    return f" ({what + ' ' if what else ''}on {' and '.join(machines)}; other machines may differ)"


def _before(untold: str, because: str) -> str:
    """Put `untold` before the reason, capitalised if the reason is a whole sentence."""
    return (untold[:1].upper() + untold[1:] if because[:1].isupper() else untold) + because


def _untold(right: Sequence[bool], wrong: Sequence[bool]) -> str:
    """Say which cases are inconclusive: "2 of 5 cases are shown to hold, of the rest ..."; "" if cases truly differ."""
    if any(right) and any(wrong):
        return ""
    if not any(right) and not any(wrong):
        return CANNOT_TELL
    shown, how = (right, "hold") if any(right) else (wrong, "be wrong")
    are = "is" if sum(shown) == 1 else "are"
    return f"{sum(shown)} of {len(shown)} cases {are} shown to {how}; the rest are inconclusive: "


def pairs(a: Record, b: Record) -> Estimate:
    """Return a / b of two interleaved records. Raises LookupError if they aren't pairs, or only one."""
    if len(a.samples) < 2:
        raise LookupError(f"{a.case} of {a.metric!r} has one round: at least two are needed")
    return ratio(a, b)


ROWS = 15
"""Judged claims that a notebook shows unfolded."""
SIGNS = {"does not hold": "✗", "depends": "~", "holds": "✓"}  # not colour alone; displayed in this order
Row = tuple[Claim, Verdict]


def judge(claim: Claim, evidence: Iterable[Record] = (), gpus: int | None = None, strict: bool = False) -> Verdict:
    """Return the verdict on `claim` that `evidence` supports, with `gpus` GPUs (default: this machine's).

    Without evidence the verdict is "not tried yet" or "needs N GPUs", never a guess. A function that fails in another
    way gives "not tried yet" with the error; with `strict`, for tests, the error is raised.
    """
    if claim.verdict:
        return Verdict(claim.verdict, f"{claim.because} (decided by {claim.decided})", claim.kind)
    function = judge_of(claim)
    if function is None:
        return _untried(claim, gpus, "the course has no experiment for it yet")
    records = evidence if isinstance(evidence, Records) else Records(evidence)
    try:
        found = function(records)
    except LookupError as e:
        if strict and type(e) is not LookupError:  # an IndexError or KeyError is a bug in the function
            raise
        return _untried(claim, gpus, f"no evidence: {e}")
    except Exception as e:
        if strict:
            raise
        return Verdict("not tried yet", f"its test failed: {type(e).__name__}: {e}", "")
    if found.word == "needs N GPUs":
        return Verdict(_needs(claim), found.because, "")
    return Verdict(found.word, found.because, _honest(found.kind, {r.kind for r in records}))


def by_a_recorded_gpu(claim: Claim, found: Verdict) -> tuple[Verdict, Records]:
    """If `found` needs a GPU, return the verdict of a recorded GPU run and its records; else `found` and no records."""
    if found.word.startswith("needs"):
        for records in kept_of_gpus(claim.notebook):
            verdict = judge(claim, records, gpus=0)
            if verdict.word not in SIGNS:
                continue
            where = ", ".join(dict.fromkeys(records.provenance["gpus"]))
            if not verdict.because.startswith(CANNOT_TELL):
                return replace(verdict, because=f"on {where}: {verdict.because}"), records
            found = replace(found, because=f"{found.because}; on {where} {verdict.because}")
    return found, Records()


def deciding(claim: Claim, evidence: Records) -> list[Records]:
    """Return the launches that the verdict on `claim` depends on: without any of them, verdict or reason changes.

    Found by leaving them out one at a time. Empty if documentation, a published table or arithmetic decides.
    """
    found, needed = judge(claim, evidence, gpus=0), launches(evidence)
    for run in list(needed):
        others = [other for other in needed if other is not run]
        without = judge(claim, Records(chain.from_iterable(others)), gpus=0)
        if (without.word, without.because) == (found.word, found.because):
            needed = others
    return needed


def _honest(kind: str, given: set[str]) -> str:
    """Return `kind`; but "measured" becomes "recorded" or "" if none of the records was measured."""
    if kind != "measured" or "measured" in given:
        return kind
    return "recorded" if "recorded" in given else ""


def _untried(claim: Claim, gpus: int | None, why: str) -> Verdict:
    here = gpu_count() if gpus is None and claim.gpus else gpus or 0
    if here >= claim.gpus:
        return Verdict("not tried yet", why, "")
    return Verdict(_needs(claim), f"this machine has {here or 'none'}", "")


def _needs(claim: Claim) -> str:
    n = max(1, claim.gpus)
    return f"needs {n} GPU{'s' if n > 1 else ''}"


def gpu_count() -> int:
    """Return how many GPUs CUDA would show this process, without initialising CUDA."""
    return len(nvml.visible(nvml.report(brief=True)) or [])


@dataclass(frozen=True)
class Table:
    """Claims with their verdicts, shown as a table in a notebook and as text elsewhere.

    Claims that don't hold come first, those without a verdict here last. A notebook shows ROWS of them and the first
    sentence of each reason, and folds the rest.
    """

    rows: tuple[Row, ...]
    """In the order of claims.toml."""

    @property
    def counts(self) -> dict[str, int]:
        """The number of claims per verdict, in the order of WORDS."""
        found = Counter("needs N GPUs" if v.word.startswith("needs") else v.word for _, v in self.rows)
        return {word: found[word] for word in WORDS if found[word]}

    def verdict(self, claim_id: str) -> Verdict:
        """Return the verdict on one claim. Raises LookupError if it isn't in this table."""
        for claim, found in self.rows:
            if claim.id == claim_id:
                return found
        raise LookupError(f"claim {claim_id!r} is not in this table; it has {', '.join(c.id for c, _ in self.rows)}")

    def as_json(self) -> list[dict[str, Any]]:
        """Return each row as plain data."""
        return [{**asdict(c), "verdict": v.word, "because": v.because, "kind": v.kind} for c, v in self.rows]

    def _judged(self) -> list[Row]:
        return [row for word in SIGNS for row in self.rows if row[1].word == word]

    def _open(self) -> list[Row]:
        """Return the rows without a verdict: first those that need GPUs."""
        rows = [row for row in self.rows if row[1].word not in SIGNS]
        return sorted(rows, key=lambda row: not row[1].word.startswith("needs"))

    def __repr__(self) -> str:
        blocks = [self._text(c, v) for c, v in self._judged() + self._open()]
        return "\n".join([*blocks, self._summary(), *self._sources()])

    def _text(self, claim: Claim, found: Verdict) -> str:
        head = f"{claim.id}  {found.word.upper()}" + (f" ({found.kind})" if found.kind else "")
        body = f"{claim.claim} [{claim.source}]"
        lines = [*textwrap.wrap(body, 100), *textwrap.wrap(f"because: {found.because}", 100)]
        return "\n".join([head, *(f"     {line}" for line in lines)])

    def _summary(self) -> str:
        counts = ", ".join(f"{n} {word}" for word, n in self.counts.items())
        return f"{len(self.rows)} claim{'' if len(self.rows) == 1 else 's'}: {counts}"

    def _sources(self) -> list[str]:
        used = {c.id[0] for c, _ in self.rows}
        return [str(a) for key, a in articles().items() if key in used]

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """Show the table, or one line where only text can be shown. `print(table)` gives the full text."""
        return {"text/html": self._repr_html_(), "text/plain": self._summary()}

    def _repr_html_(self) -> str:
        judged, left = self._judged(), self._open()
        shown = self._table(judged[:ROWS], brief=True) if judged else ""
        for rows, summary in ((judged[ROWS:], f"{len(judged) - ROWS} more with a verdict"), (left, self._folded(left))):
            shown += f"<details><summary>{summary}</summary>{self._table(rows)}</details>" if rows else ""
        notes = "<br>".join(html.escape(line) for line in (self._summary(), *self._sources()))
        return f"{shown}<p>{notes}</p>"

    def _folded(self, left: list[Row]) -> str:
        gpus = sum(v.word.startswith("needs") for _, v in left)
        words = ((gpus, f"need{'s' if gpus == 1 else ''} more GPUs"), (len(left) - gpus, "not tested"))
        parts = [f"{n} {what}" for n, what in words if n]
        return f"{len(left)} more without a verdict here: {', '.join(parts)}"

    def _table(self, rows: list[Row], brief: bool = False) -> str:
        head = "".join(f"<th {LEFT}>{h}</th>" for h in HEADINGS)
        cells = (self._cells(c, v, brief) for c, v in rows)
        body = "".join(f"<tr>{''.join(f'<td {LEFT}>{cell}</td>' for cell in row)}</tr>" for row in cells)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _cells(self, claim: Claim, found: Verdict, brief: bool) -> tuple[str, ...]:
        word = f"<b>{SIGNS.get(found.word, '…')}&nbsp;{html.escape(found.word)}</b>"
        takeaway = f"<br><i>{_code(claim.takeaway)}</i>" if found.word in SIGNS else ""
        kind = f"<br>{found.kind}" if found.kind else ""
        first, *more = SENTENCES.split(found.because, 1) if brief else [found.because]
        folded = f"<details><summary>more</summary>{html.escape(more[0])}</details>" if more else ""
        because = html.escape(first) + folded
        return f"{claim.id}<br>{claim.source}", _code(claim.claim) + takeaway, word + kind, because


HEADINGS = ("article, lines", "claim", "verdict here", "because")
LEFT = 'style="text-align:left"'  # in every cell, because JupyterLab right-aligns table cells
SENTENCES = re.compile(r"(?<=[.;]) (?=[A-Z'\"(])")
CODE = re.compile(
    r"(?<![\w.])("
    r"(?:\w+\.)*\w+_\w+(?:\.\w+)*(?:\([^()]*\)|=\[[^\]]*\]|=\w+)?"  # a_name, with its arguments or value
    r"|(?:\w+\.)+\w+\([^()]*\)"  # a.call()
    r"|--?[a-z][\w-]+)"  # an --option
)


def _code(text: str) -> str:
    """Return a sentence as HTML, with identifiers and options marked as code."""
    return CODE.sub(r"<code>\1</code>", html.escape(text, quote=False))


def table(
    notebook: str | None = None, evidence: Iterable[Record] = (), *, gpus: int | None = None, strict: bool = False
) -> Table:
    """Return the claims of `notebook` ("03"; None: all) with their verdicts from `evidence`; see `judge`.

    A claim that needs GPUs missing here gets the verdict of a recorded GPU run, if there is one. If you pass `gpus`,
    the table assumes that many GPUs and uses no recorded run. In a notebook, saves the evidence for notebook 11.
    """
    records = evidence if isinstance(evidence, Records) else Records(evidence)
    if notebook is not None:
        keep(notebook, records)
    here = gpu_count() if gpus is None else gpus
    rows = [(c, judge(c, records, here, strict)) for c in claims(notebook)]
    return Table(tuple((c, by_a_recorded_gpu(c, v)[0] if gpus is None else v) for c, v in rows))
