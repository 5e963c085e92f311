"""Judging claims from records, and the table that shows the verdicts."""

from __future__ import annotations

import html
import re
import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from labs.kit.claims.registry import WORDS, Claim, Verdict, articles, claims, judge_of
from labs.kit.record import Record, Records

SIGNS = {"does not hold": "✗", "depends": "~", "holds": "✓"}  # not by colour alone; shown in this order
Row = tuple[Claim, Verdict]


def judge(claim: Claim, evidence: Iterable[Record] = (), gpus: int | None = None, strict: bool = False) -> Verdict:
    """The verdict on `claim` that `evidence` supports, on a machine with `gpus` GPUs (default: those here).

    Missing evidence gives "not tried yet" or "needs N GPUs", never a guess. A function that fails in another
    way gives "not tried yet" with the error; with `strict`, for tests, it raises.
    """
    function = judge_of(claim)
    if function is None:
        return _untried(claim, gpus, "no lab of this course tests it yet")
    records = evidence if isinstance(evidence, Records) else Records(evidence)
    try:
        found = function(records)
    except LookupError as e:
        if strict and type(e) is not LookupError:  # an IndexError or KeyError is a slip in the function
            raise
        return _untried(claim, gpus, f"no evidence: {e}")
    except Exception as e:
        if strict:
            raise
        return Verdict("not tried yet", f"its test failed: {type(e).__name__}: {e}", "")
    if found.word == "needs N GPUs":
        return Verdict(_needs(claim), found.because, "")
    return Verdict(found.word, found.because, _honest(found.kind, {r.kind for r in records}))


def _honest(kind: str, given: set[str]) -> str:
    """`kind`, unless it says "measured" and none of the records is: then "recorded", or nothing."""
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
    """GPUs that CUDA would show this process, found without initialising CUDA."""
    from labs.kit import nvml, visible

    return len(visible.visible(nvml.report()) or [])


@dataclass(frozen=True)
class Table:
    """Claims with their verdicts; displays as a table in a notebook and as text elsewhere.

    What does not hold comes first, what has no verdict here last; in a notebook the latter is folded away.
    """

    rows: tuple[Row, ...]
    """In the order of claims.toml."""

    @property
    def counts(self) -> dict[str, int]:
        """How many claims got each verdict, in the order of WORDS."""
        found = Counter("needs N GPUs" if v.word.startswith("needs") else v.word for _, v in self.rows)
        return {word: found[word] for word in WORDS if found[word]}

    def verdict(self, claim_id: str) -> Verdict:
        """The verdict on one claim. LookupError if it is not in this table."""
        for claim, found in self.rows:
            if claim.id == claim_id:
                return found
        raise LookupError(f"claim {claim_id!r} is not in this table; it has {', '.join(c.id for c, _ in self.rows)}")

    def as_json(self) -> list[dict[str, Any]]:
        """Each row as plain data."""
        return [{**asdict(c), "verdict": v.word, "because": v.because, "kind": v.kind} for c, v in self.rows]

    def _judged(self) -> list[Row]:
        return [row for word in SIGNS for row in self.rows if row[1].word == word]

    def _open(self) -> list[Row]:
        """Needs GPUs, then not tried yet."""
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
        return f"{len(self.rows)} claims: {counts}"

    def _sources(self) -> list[str]:
        used = {c.id[0] for c, _ in self.rows}
        return [str(a) for key, a in articles().items() if key in used]

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """In a notebook: the table, and one line where only text can be shown. The whole text is `print(table)`."""
        return {"text/html": self._repr_html_(), "text/plain": self._summary()}

    def _repr_html_(self) -> str:
        judged, left = self._judged(), self._open()
        shown = self._table(judged) if judged else ""
        if left:
            shown += f"<details><summary>{self._folded(left)}</summary>{self._table(left)}</details>"
        notes = "<br>".join(html.escape(line) for line in (self._summary(), *self._sources()))
        return f"{shown}<p>{notes}</p>"

    def _folded(self, left: list[Row]) -> str:
        gpus = sum(v.word.startswith("needs") for _, v in left)
        words = ((gpus, f"need{'s' if gpus == 1 else ''} more GPUs"), (len(left) - gpus, "not tried yet"))
        parts = [f"{n} {what}" for n, what in words if n]
        return f"{len(left)} more without a verdict here: {', '.join(parts)}"

    def _table(self, rows: list[Row]) -> str:
        head = "".join(f"<th {LEFT}>{h}</th>" for h in HEADINGS)
        body = "".join(f"<tr>{''.join(f'<td {LEFT}>{cell}</td>' for cell in self._cells(c, v))}</tr>" for c, v in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _cells(self, claim: Claim, found: Verdict) -> tuple[str, ...]:
        word = f"<b>{SIGNS.get(found.word, '…')}&nbsp;{html.escape(found.word)}</b>"
        takeaway = f"<br><i>{_code(claim.takeaway)}</i>" if found.word in SIGNS else ""
        kind = f"<br>{found.kind}" if found.kind else ""
        return f"{claim.id}<br>{claim.source}", _code(claim.claim) + takeaway, word + kind, html.escape(found.because)


HEADINGS = ("article, lines", "claim", "verdict here", "because")
LEFT = 'style="text-align:left"'  # in every cell, since JupyterLab aligns cells of tables to the right
CODE = re.compile(
    r"(?<![\w.])("
    r"(?:\w+\.)*\w+_\w+(?:\.\w+)*(?:\([^()]*\)|=\[[^\]]*\]|=\w+)?"  # a_name, with its arguments or its value
    r"|(?:\w+\.)+\w+\([^()]*\)"  # a.call()
    r"|--?[a-z][\w-]+)"  # an --option
)


def _code(text: str) -> str:
    """HTML of a sentence, with what looks like an identifier or an option set as code."""
    return CODE.sub(r"<code>\1</code>", html.escape(text, quote=False))


def table(notebook: str | None = None, evidence: Iterable[Record] = (), *, gpus: int | None = None,
          strict: bool = False) -> Table:  # fmt: skip
    """Every claim of `notebook` ("03"; all, if None) with its verdict from `evidence`; see `judge`."""
    records = evidence if isinstance(evidence, Records) else Records(evidence)
    here = gpu_count() if gpus is None else gpus
    return Table(tuple((c, judge(c, records, here, strict)) for c in claims(notebook)))
