"""Measurements as JSON lines: every sample, its unit, its kind and where it was taken.

A file holds one provenance line, then one line per Record. It is written whole or not at all, and read back
with errors that name the file, the line and the field.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import statistics
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

Kind = Literal["measured", "recorded", "modelled", "published"]
KINDS: tuple[str, ...] = get_args(Kind)
FIELDS = {"lab": str, "metric": str, "unit": str, "samples": list, "kind": str, "case": dict, "config": dict,
          "layout": dict}  # fmt: skip


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
        object.__setattr__(self, "samples", tuple(float(s) for s in self.samples))
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {self.kind!r}")
        if not self.samples:
            raise ValueError(f"record {self.metric!r} of lab {self.lab!r} has no samples")

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
    """Write `text` to `path` through a temporary file beside it, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes 0600, which a colleague could not read
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def load(path: str | os.PathLike) -> Records:
    """Records of a JSON lines file; what was measured when it was written is now `recorded`.

    Raises ValueError naming the file, the line and the field of the first thing that is wrong.
    """
    records, header = [], None
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as e:
            raise ValueError(f"{where}: not JSON ({e.msg} at column {e.colno})") from None
        if not isinstance(row, dict):
            raise ValueError(f"{where}: a JSON object is needed, this is {type(row).__name__}")
        if "provenance" in row:
            header = row["provenance"]
        elif header is None:
            raise ValueError(f"{where}, field 'provenance': missing, the first line of a file must hold it")
        else:
            records.append(_parse(row, header, where))
    if not records:
        raise ValueError(f"{path}: holds no records")
    return Records(records)


def _parse(row: dict[str, Any], header: dict[str, Any], where: str) -> Record:
    for name, kind in FIELDS.items():
        if name not in row:
            raise ValueError(f"{where}, field {name!r}: missing")
        if not isinstance(row[name], kind):
            raise ValueError(f"{where}, field {name!r}: {kind.__name__} needed, not {row[name]!r}")
    if extra := set(row) - set(FIELDS):
        raise ValueError(f"{where}, field {min(extra)!r}: unknown")
    bad = [s for s in row["samples"] if isinstance(s, bool) or not isinstance(s, int | float) or not math.isfinite(s)]
    if bad or not row["samples"]:
        raise ValueError(f"{where}, field 'samples': finite numbers needed, not {bad[0] if bad else 'an empty list'!r}")
    if row["kind"] not in KINDS:
        raise ValueError(f"{where}, field 'kind': one of {', '.join(KINDS)} needed, not {row['kind']!r}")
    if row["kind"] == "measured":
        row["kind"] = "recorded"
    return Record(**row, provenance=header)


def attach_provenance(records: Iterable[Record]) -> Records:
    """`records` with where and when they were taken: this machine, now."""
    here = provenance()
    return Records(dataclasses.replace(r, provenance=here) for r in records)


def provenance() -> dict[str, Any]:
    """What a reader needs to judge a number from this machine, taken now (UTC)."""
    return {**_machine(), "utc": datetime.now(UTC).isoformat(timespec="seconds")}


@cache
def _machine() -> dict[str, Any]:
    import torch

    from labs.kit import hardware

    return {
        **hardware.summary(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": hardware.nccl_version(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Commit of this checkout, with '-dirty' if it was edited; None outside of git."""
    try:
        out = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return out.stdout.strip() or None


def as_json(config: Any) -> dict[str, Any]:
    """A Config dataclass as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))
