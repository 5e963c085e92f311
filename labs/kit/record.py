"""Measurements as JSON lines: every sample, its unit, its kind and where it was taken.

A file holds one provenance line, then one line per Record. It is written whole or not at all, and read back
with errors that name the file, the line and the field.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from labs.kit import strict_json
from labs.kit.provenance import provenance
from labs.kit.strict_json import LARGEST, brief

__all__ = ["KINDS", "Kind", "Record", "Records", "as_json", "attach_provenance", "load", "provenance", "write_atomic"]

Kind = Literal["measured", "recorded", "modelled", "published"]
KINDS: tuple[str, ...] = get_args(Kind)
FIELDS = {"lab": str, "metric": str, "unit": str, "samples": list, "kind": str, "case": dict, "config": dict,
          "layout": dict}  # fmt: skip
COLUMNS = {"lab", "metric", "value", "unit", "n", "kind"}


@dataclass(frozen=True)
class Record:
    """One quantity, with every sample that was taken of it.

    `case` tells this measurement from the others of its lab run, for example `{"mode": "ddp", "ranks": 2}`.
    `layout` is `{"world_size", "rank", "backend", "device"}`; rank None means the whole job, and then each
    sample is that of the slowest rank.
    """

    lab: str
    metric: str
    unit: str
    samples: tuple[float, ...]
    kind: Kind = "measured"
    case: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", tuple(self.samples))
        for name in ("case", "config", "layout"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        if problem := self._problem():
            raise ValueError(f"record {brief(self.metric)} of lab {brief(self.lab)}: {problem}")
        object.__setattr__(self, "samples", tuple(float(s) for s in self.samples))

    def _problem(self) -> str:
        """What would make this record unreadable once it is saved; found while the lab still runs."""
        if self.kind not in KINDS:
            return f"kind must be one of {', '.join(KINDS)}, not {self.kind!r}"
        if not self.samples:
            return "there are no samples"
        if bad := [s for s in self.samples if not abs(s) <= LARGEST]:
            return f"a sample is not finite: {brief(bad[0])}"
        for name in ("lab", "metric", "unit", "case", "config", "layout", "provenance"):
            value, kind = getattr(self, name), FIELDS.get(name, dict)
            if not isinstance(value, kind):
                return f"{name} must be a {kind.__name__}, not {brief(value)}"
            if problem := strict_json.problem(value):
                return f"{name}: {problem}"
        if taken := sorted(COLUMNS & self.case.keys()):
            return f"case {taken[0]!r} has the name of a column of the table: choose another"
        return ""

    @property
    def value(self) -> float:
        """Median of the samples, in `unit`."""
        return statistics.median(self.samples)


class Records(Sequence[Record]):
    """An immutable list of records that can be filtered, joined, tabulated and saved."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._records = tuple(records)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return Records(self._records[index]) if isinstance(index, slice) else self._records[index]

    def __add__(self, other: Iterable[Record]) -> Records:
        return Records((*self, *other))

    def __repr__(self) -> str:
        metrics = sorted({r.metric for r in self})
        return f"<{len(self)} records: {', '.join(metrics)}>"

    def _repr_html_(self) -> str:
        return self.frame.to_html(index=False, max_rows=20)

    def where(self, metric: str | None = None, **case: Any) -> Records:
        """Records of `metric` (any, if None) whose case holds all of `case`."""
        keep = (r for r in self if metric in (None, r.metric))
        return Records(r for r in keep if all(r.case.get(k) == v for k, v in case.items()))

    def one(self, metric: str, **case: Any) -> Record:
        """The only record of `metric` with this case. LookupError says what there is instead."""
        found = self.where(metric, **case)
        if len(found) == 1:
            return found[0]
        cases = [r.case for r in self.where(metric)]
        raise LookupError(
            f"{len(found)} records of {metric!r} with {case or 'any case'}; "
            + (f"cases of that metric: {cases}" if cases else f"metrics here: {sorted({r.metric for r in self})}")
        )

    @property
    def frame(self):  # type: ignore[no-untyped-def]
        """A pandas DataFrame, one row per record; `value` is the median of `n` samples."""
        import pandas

        rows = [
            {"lab": r.lab, "metric": r.metric, **r.case, "value": r.value, "unit": r.unit, "n": len(r.samples),
             "kind": r.kind}
            for r in self
        ]  # fmt: skip
        return pandas.DataFrame(rows)

    @property
    def provenance(self) -> dict[str, Any]:
        """Provenance of the first record; empty if there is none."""
        return self[0].provenance if len(self) else {}

    def save(self, path: str | os.PathLike) -> Path:
        """Write all records to `path` as JSON lines, whole or not at all. OSError if that cannot be done."""
        return write_atomic(Path(path), "".join(self.lines()))

    def lines(self) -> Iterator[str]:
        """JSON lines, grouped by provenance: a header line for each group, then its records."""
        header: dict[str, Any] | None = None
        for r in self:
            if r.provenance != header:
                header = r.provenance
                yield json.dumps({"provenance": header}, allow_nan=False) + "\n"
            row = {name: getattr(r, name) for name in FIELDS}
            yield json.dumps(row, allow_nan=False) + "\n"


def write_atomic(path: Path, text: str) -> Path:
    """Write `text` to `path` through a temporary file beside it, so that a reader never sees half of it.

    A device or pipe (/dev/stdout, /dev/full) is written to, not replaced. OSError if there is no room or no right.
    """
    path = Path(os.path.realpath(path))  # a link stays a link; one that leads to itself does not
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:40]}.{os.getpid()}-{secrets.token_hex(4)}")  # a name has 255 bytes
    try:
        with temporary.open("x", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def load(path: str | os.PathLike) -> Records:
    """Records of a JSON lines file; what was measured when it was written is now `recorded`.

    Raises ValueError naming the file, the line and the field of the first thing that is wrong.
    """
    records, header = [], None
    for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        where = f"{path}, line {number}"
        row = _object(line, where)
        if "provenance" in row:
            header = row["provenance"]
            if not isinstance(header, dict) or len(row) > 1:
                raise ValueError(f"{where}, field 'provenance': a line with one object needed, not {brief(row)}")
            if problem := strict_json.problem(header):
                raise ValueError(f"{where}, field 'provenance': {problem}")
        elif header is None:
            raise ValueError(f"{where}, field 'provenance': missing, the first line of a file must hold it")
        else:
            records.append(_parse(row, header, where))
    if not records:
        raise ValueError(f"{path}: holds no records")
    return Records(records)


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = strict_json.parse(line)
    except ValueError as e:
        raise ValueError(f"{where}: {e}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a JSON object is needed, this is {type(row).__name__}")
    return row


def _parse(row: dict[str, Any], header: dict[str, Any], where: str) -> Record:
    for name, kind in FIELDS.items():
        if name not in row:
            raise ValueError(f"{where}, field {name!r}: missing")
        if not isinstance(row[name], kind):
            raise ValueError(f"{where}, field {name!r}: {kind.__name__} needed, not {brief(row[name])}")
    if extra := set(row) - set(FIELDS):
        raise ValueError(f"{where}, field {brief(min(extra))}: unknown")
    bad = [s for s in row["samples"] if not _is_number(s)]
    if bad or not row["samples"]:
        raise ValueError(f"{where}, field 'samples': finite numbers needed, not {brief(bad[0] if bad else [])}")
    if row["kind"] not in KINDS:
        raise ValueError(f"{where}, field 'kind': one of {', '.join(KINDS)} needed, not {brief(row['kind'])}")
    if taken := sorted(COLUMNS & row["case"].keys()):
        raise ValueError(f"{where}, field 'case': {taken[0]!r} is the name of a column")
    if row["kind"] == "measured":
        row["kind"] = "recorded"
    try:
        return Record(**row, provenance=header)
    except ValueError as e:
        raise ValueError(f"{where}: {e}") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def attach_provenance(records: Iterable[Record]) -> Records:
    """`records` with where and when they were taken: this machine, now."""
    here = provenance()
    return Records(dataclasses.replace(r, provenance=here) for r in records)


def as_json(config: Any) -> dict[str, Any]:
    """A Config dataclass as plain JSON values."""
    return plain(dataclasses.asdict(config))


def plain(values: Any) -> Any:
    """As JSON would give it back: tuples are lists, NumPy and torch numbers are numbers, other things their text."""
    return json.loads(json.dumps(values, default=lambda x: x.item() if hasattr(x, "item") else str(x)))
