"""Measurements as JSON lines, with every sample, its unit, its kind, and where and when it was taken.

A file holds one provenance line, then one line per Record. It is written completely or not at all. Read errors name the
file, the line and the field. All numbers are finite.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import secrets
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from labs.kit.errors import brief

Kind = Literal["measured", "recorded", "modelled", "published"]
KINDS: tuple[str, ...] = get_args(Kind)
FIELDS = {
    "lab": str,
    "metric": str,
    "unit": str,
    "samples": list,
    "kind": str,
    "case": dict,
    "config": dict,
    "layout": dict,
}
COLUMNS = {"lab", "metric", "value", "unit", "n", "kind"}


@dataclass(frozen=True)
class Record:
    """One quantity with all its samples.

    `case` distinguishes this measurement from others of the run, for example `{"mode": "ddp", "ranks": 2}`. `layout` is
    `{"world_size", "rank", "backend", "device"}`. Rank None means the whole job, and each sample is then the slowest
    rank's. "cores" is added if processes beside the ranks (DataLoader workers) could use that many logical CPUs.
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
        """Return what would make the saved record unreadable, while the lab still runs."""
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
            if problem := json_problem(value):
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
        """Return the records of `metric` (None: any) whose case contains `case`."""
        keep = (r for r in self if metric in (None, r.metric))
        return Records(r for r in keep if all(r.case.get(k) == v for k, v in case.items()))

    def one(self, metric: str, **case: Any) -> Record:
        """Return the only record of `metric` with this case. LookupError says what there is instead."""
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
            {
                "lab": r.lab,
                "metric": r.metric,
                **r.case,
                "value": r.value,
                "unit": r.unit,
                "n": len(r.samples),
                "kind": r.kind,
            }
            for r in self
        ]
        return pandas.DataFrame(rows)

    @property
    def provenance(self) -> dict[str, Any]:
        """Provenance of the first record; empty if there is none."""
        return self[0].provenance if len(self) else {}

    def save(self, path: str | os.PathLike) -> Path:
        """Write all records to `path` as JSON lines, completely or not at all. Raises OSError if that fails."""
        return write_atomic(Path(path), "".join(self.lines()))

    def lines(self) -> Iterator[str]:
        """Yield JSON lines, grouped by provenance: a header line for each group, then its records."""
        header: dict[str, Any] | None = None
        for r in self:
            if r.provenance != header:
                header = r.provenance
                yield json.dumps({"provenance": header}, allow_nan=False) + "\n"
            row = {name: getattr(r, name) for name in FIELDS}
            yield json.dumps(row, allow_nan=False) + "\n"


def write_atomic(path: Path, text: str) -> Path:
    """Write `text` to `path` through a temporary file beside it, so that a reader never sees half of it.

    Writes to a device or pipe (/dev/stdout, /dev/full) directly. Raises OSError without space or permission.
    """
    path = Path(os.path.realpath(path))  # keeps a link a link
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:40]}.{os.getpid()}-{secrets.token_hex(4)}")  # names: at most 255 bytes
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


MOVED = {b"labs.parts.precision.loss_": b"labs.loss_scaling.loss_", b"labs.parts.": b"labs.common."}
"""Old module names in committed records, which never change, and where the code is now."""


def load(path: str | os.PathLike) -> Records:
    """Load the records of a JSON lines file. What was measured when it was written is now `recorded`.

    Raises ValueError naming the file, line and field of the first error.
    """
    records, header = [], None
    for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        where = f"{path}, line {number}"
        for old, new in MOVED.items():
            line = line.replace(old, new)
        row = _object(line, where)
        if "provenance" in row:
            header = row["provenance"]
            if not isinstance(header, dict) or row.keys() - {"provenance"}:
                raise ValueError(f"{where}, field 'provenance': a line with one object needed, not {brief(row)}")
            if problem := json_problem(header):
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
        row = parse_json(line)
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
    if bad := [s for s in row["samples"] if isinstance(s, bool) or not isinstance(s, int | float)]:
        raise ValueError(f"{where}, field 'samples': numbers needed, not {brief(bad[0])}")
    if row["kind"] == "measured":
        row["kind"] = "recorded"
    try:
        return Record(**row, provenance=header)
    except ValueError as e:
        raise ValueError(f"{where}: {e}") from None


def attach_provenance(records: Iterable[Record]) -> Records:
    """Add this machine and the present time to `records`."""
    here = provenance()
    return Records(dataclasses.replace(r, provenance=here) for r in records)


def as_json(config: Any) -> dict[str, Any]:
    """Convert a Config dataclass to plain JSON values."""
    return plain(dataclasses.asdict(config))


def plain(values: Any) -> Any:
    """Convert to what JSON returns: tuples to lists, NumPy and torch numbers to numbers, the rest to text."""
    return json.loads(json.dumps(values, default=lambda x: x.item() if hasattr(x, "item") else str(x)))


def provenance() -> dict[str, Any]:
    """Return what a reader needs to judge a number from this machine, with the time in UTC."""
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
    """Return this checkout's commit, with '-dirty' if it was edited; None outside git."""
    try:
        out = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return out.stdout.strip() or None


def provenance_line(records: Iterable[Any]) -> str:
    """Return one phrase per distinct origin of `records`, joined by "; ", for example

    "measured here on Xeon 8481C, 2 of 8 cores, torch 2.13.0, 2026-11-21 UTC", or "on 2 of 8 x H200". A published or
    modelled number can name its source in the record's provenance, under "source". If no record gives its number of
    ranks (an unpinned program), only the machine's cores or GPUs are named.
    """
    used: dict[tuple[str, ...], tuple[int, int]] = {}
    for r in records:
        key = origin(r.kind, r.provenance, str(r.layout.get("device") or ""))
        ranks, cores = used.get(key, (0, 0))
        ranks = max(ranks, int(r.layout.get("world_size") or 0))
        used[key] = ranks, max(cores, ranks, int(r.layout.get("cores") or 0))
    return "; ".join(_phrase(key, *n) for key, n in used.items())


def origin(kind: str, p: dict[str, Any], device: str = "") -> tuple[str, ...]:
    """Return (kind, facts); records with equal facts share a phrase. Dates count, times of day don't.

    GPUs aren't named for what ran on the device "cpu".
    """
    if kind == "modelled" or p.get("source"):
        return kind, str(p.get("source") or "")
    gpus = [g.get("name") if isinstance(g, dict) else g for g in p.get("gpus") or [] if device != "cpu"]
    names = " + ".join(f"{gpus.count(g)} x {g}" if gpus.count(g) > 1 else str(g) for g in dict.fromkeys(gpus))
    return (
        kind,
        names or str(p.get("cpu") or "unknown processor"),
        str(len(gpus)),
        "" if gpus else str(p.get("cores") or ""),
        f"torch {p['torch']}" if p.get("torch") else "",
        f"{str(p['utc'])[:10]} UTC" if p.get("utc") else "",
    )


def _phrase(key: tuple[str, ...], ranks: int, cores_used: int) -> str:
    kind, *facts = key
    if len(facts) == 1:
        return f"{kind}: {facts[0]}" if facts[0] else "modelled by this course"
    name, gpus, cores, *rest = facts
    if 0 < ranks < int(gpus):
        name = f"{ranks} of {name}"
    used = f"{cores} core{'' if cores == '1' else 's'}" if cores else ""
    if cores and ranks > int(cores):
        used = f"{ranks} ranks sharing {used}"
    elif cores and cores_used:
        used = f"{min(cores_used, int(cores))} of {cores} cores"
    place = "measured here on" if kind == "measured" else f"{kind} on"
    return f"{place} {', '.join(f for f in (name, used, *rest) if f)}"


LARGEST = sys.float_info.max


def parse_json(line: bytes) -> Any:
    """Parse one line of JSON. ValueError says in one line what is wrong."""
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError) as e:
        raise ValueError(f"not JSON ({e})") from None


def json_problem(value: Any) -> str:
    """Return why `value` can't be written as JSON, for example because it holds an infinite number; "" if it can."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        return str(e)
    return ""
