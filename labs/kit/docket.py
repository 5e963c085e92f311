"""All claims with their verdicts, from recorded evidence or from this machine's.

    from labs.kit.docket import again, own, recorded, sheet

    recorded().where(article="C", verdict="does not hold")    # displays as a table
    sheet("C16")                                              # one claim: what decided it, what would change it
    again("C16")                                              # repeat the launches that decided it

The recorded verdicts are the same everywhere. `own()` judges the notebooks that have been run on this machine.
"""

from __future__ import annotations

import html
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import chain

from labs.kit import evidence
from labs.kit.claims import (
    SIGNS,
    WORDS,
    Claim,
    Table,
    Verdict,
    articles,
    by_a_recorded_gpu,
    claims,
    deciding,
    gpu_count,
    judge,
)
from labs.kit.errors import did_you_mean, require
from labs.kit.evidence import Call, call_of
from labs.kit.lab import CELL, experiments
from labs.kit.launch import launch
from labs.kit.record import Records

NEEDS = "needs N GPUs"


def kind_of(verdict: Verdict) -> str:
    """Return a verdict's word, one of WORDS; "needs N GPUs" for any number."""
    return NEEDS if verdict.word.startswith("needs") else verdict.word


@dataclass(frozen=True, repr=False)
class Docket(Table):
    """Claims with their verdicts, shown as one table per article."""

    def where(self, *, article: str = "", subject: str = "", verdict: str = "") -> Docket:
        """Return the claims of one article ("C"), subject or verdict. BadInput lists the valid values."""
        article, subject, verdict = article.upper(), subject.lower(), verdict.lower()
        if verdict.startswith("needs"):  # as it is printed: "needs 1 GPU"
            verdict = NEEDS
        for what, name, known in (
            (article, "article", {c.id[0] for c, _ in self.rows}),
            (subject, "subject", {c.subject for c, _ in self.rows}),
            (verdict, "verdict", set(WORDS)),
        ):
            hint = did_you_mean(what, known)
            require(not what or what in known, f"no {name} {what!r}: {hint}There are {', '.join(sorted(known))}.")
        return Docket(
            tuple(
                (c, v)
                for c, v in self.rows
                if article in ("", c.id[0]) and subject in ("", c.subject)
                if verdict in ("", kind_of(v))
            )
        )

    def _summary(self) -> str:
        if not self.rows:
            return "No claim matches: remove a filter, or run a notebook on this machine first."
        return super()._summary()

    def count(self, by: Callable[[Claim], str]) -> dict[str, Counter[str]]:
        """Count the words of each group of claims; `count(lambda c: c.id[0])` groups by article."""
        found: dict[str, Counter[str]] = {}
        for claim, verdict in self.rows:
            found.setdefault(by(claim), Counter())[kind_of(verdict)] += 1
        return found

    def _repr_html_(self) -> str:
        blocks = []
        for key, article in articles().items():
            rows = [row for row in self._judged() + self._open() if row[0].id[0] == key]
            if rows:
                summary = html.escape(f"{len(rows)} of article {article}")
                table = self._table(rows, brief=True)
                opened = " open" if len(self.rows) <= OPEN else ""
                blocks.append(f"<details{opened}><summary>{summary}</summary>{table}</details>")
        return "".join(blocks) + f"<p>{html.escape(self._summary())}</p>"


OPEN = 30
"""Rows shown without a click."""


@cache
def recorded() -> Docket:
    """Return all claims, judged by the committed run's records, or a recorded GPU run's if they need a GPU."""
    return Docket(tuple((c, recorded_case(c)[0]) for c in claims()))


@cache
def recorded_case(claim: Claim) -> tuple[Verdict, Records]:
    """Return the recorded verdict on `claim` and the evidence behind it."""
    usual = recorded_evidence(claim.notebook)
    found, of_gpus = by_a_recorded_gpu(claim, judge(claim, usual, gpus=0))
    return found, of_gpus or usual


def own() -> Docket:
    """Return the claims of the notebooks run on this machine, judged by its own records."""
    gpus = gpu_count()
    here = {n: evidence.kept(n) for n in {c.notebook for c in claims()}}
    return Docket(tuple((c, judge(c, here[c.notebook], gpus)) for c in claims() if here[c.notebook]))


@cache
def recorded_evidence(notebook: str) -> Records:
    """Return the recorded evidence for the claims of `notebook` ("03"); empty if that notebook launches nothing."""
    return evidence.kept(notebook, evidence.RECORDED)


def by_id(claim_id: str) -> Claim:
    """Return one claim. Raises BadInput for an unknown id."""
    known = {c.id: c for c in claims()}
    claim_id = claim_id.upper()
    hint = did_you_mean(claim_id, known)
    require(claim_id in known, f"there is no claim {claim_id!r}: {hint}Ids are {min(known)} to {max(known)}.")
    return known[claim_id]


@dataclass(frozen=True)
class Sheet:
    """One claim as its judge sees it: statement, verdict from reading, evidence, verdict, what would change it."""

    claim: Claim
    verdict: Verdict
    calls: tuple[Call, ...]
    provenance: dict
    others: tuple[tuple[str, Verdict], ...] = ()
    """(whose verdict, verdict) of other verdicts on it."""

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The (heading, text) pairs to show."""
        c, v = self.claim, self.verdict
        p = self.provenance
        where = f" on {', '.join([*dict.fromkeys(p.get('gpus', ())), p['cpu']])}, {p['utc'][:10]}" if p else ""
        said = [
            ("claim", f"{c.claim} [{c.source}]"),
            ("reading alone", c.paper),
            ("verdict", f"{v.word}" + (f", {v.kind}{where if v.kind == 'recorded' else ''}" if v.kind else "")),
            ("because", v.because),
            (
                "decided by",
                "; ".join(map(str, self.calls)) or "documentation, a published table or arithmetic (no launch)",
            ),
            *((whose, f"{other.word}: {other.because}") for whose, other in self.others),
            ("would change it", c.changes),
            ("on GPUs", c.command),
            ("take away", c.takeaway),
        ]
        return [(head, text) for head, text in said if text]

    def __repr__(self) -> str:
        wide = max(len(head) for head, _ in self.lines) + 2
        blocks = (
            textwrap.fill(f"{head + ':':{wide}}{text}", 110, subsequent_indent=" " * wide) for head, text in self.lines
        )
        return "\n".join([self.claim.id, *blocks])

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th style="text-align:left;vertical-align:top">{html.escape(head)}</th>'
            f'<td style="text-align:left">{self._marked(head, text)}</td></tr>'
            for head, text in self.lines
        )
        return f"<table><thead><tr><th></th><th>{self.claim.id}</th></tr></thead><tbody>{rows}</tbody></table>"

    def _marked(self, head: str, text: str) -> str:
        if head == "verdict":
            return f"<b>{SIGNS.get(self.verdict.word, '…')} {html.escape(text)}</b>"
        if head in ("decided by", "on GPUs") and (self.calls or head == "on GPUs"):
            return "<br>".join(f"<code>{html.escape(part)}</code>" for part in text.split("; "))
        return html.escape(text)


def sheet(claim_id: str, given: Records | None = None) -> Sheet:
    """Return one claim's sheet, from the `given` evidence (default: recorded). Raises BadInput for an unknown id."""
    claim = by_id(claim_id)
    verdict, found = recorded_case(claim) if given is None else (judge(claim, given, gpus=0), given)
    calls = tuple(call_of(run) for run in deciding(claim, found) if is_lab(run))
    return Sheet(claim, verdict, calls, found.provenance)


def is_lab(run: Records) -> bool:
    """Return whether these records came from a launch, not from a function called in a notebook."""
    return run[0].lab in experiments()


def again(claim_id: str, **options: str) -> Sheet:
    """Repeat the launches that decided a claim on this machine, and judge by their records.

    `options` go to launch(), such as `device`. Evidence that no launch produced is taken from the recorded run. Raises
    BadInput for an unknown id, RankFailed if a launch fails.
    """
    before = sheet(claim_id)
    own = sorted({str(v) for c in before.calls for v in c.parameters.values() if str(v).startswith(f"{CELL}:")})
    where = f"notebook {before.claim.notebook}"
    require(not own, f"{claim_id} was decided with functions of {where} ({', '.join(own)}): run that notebook again")
    runs = [launch(c.lab, c.nproc, oversubscribe=c.oversubscribe, **options, **c.parameters) for c in before.calls]
    others = [run for run in deciding(before.claim, recorded_case(before.claim)[1]) if not is_lab(run)]
    new = Records(chain.from_iterable([*runs, *others]))
    verdict = judge(before.claim, new)
    return Sheet(before.claim, verdict, before.calls, new.provenance, (("recorded", before.verdict),))
