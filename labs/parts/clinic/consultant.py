"""The consultant: names an illness from what was measured, by rules that can be read.

Each measurement has signs: readings outside of what a healthy training of this kind shows. A cause is named by its key
sign; where several are there, the rarer one counts. The gain is what the reading itself promises.
"""

from __future__ import annotations

from collections.abc import Mapping

from labs.parts.clinic.illnesses import BY_NAME, ILLNESSES
from labs.parts.clinic.measurements import OF_TRAINING, Findings

FREE_DATA, WAITING, LARGER, SMALL, THREADED = (
    1.1,
    0.1,
    1.8,
    16,
    1.3,
)  # from which a reading is a sign: ratios, a share, samples


def signs(measurement: str, found: Findings) -> list[str]:
    """What is out of the ordinary in one measurement's findings; nothing for a healthy patient."""
    return [name for name, is_there in RULES[measurement](found).items() if is_there]


def _steps(f: Findings) -> dict[str, bool]:
    return {"grows": f["growth"] > 1.5}


def _shares(f: Findings) -> dict[str, bool]:
    return {"data": f["data"] > 0.22, "overhead": f["overhead"] > 0.25, "exchange": f["exposed communication"] > 0.4}


def _ops(f: Findings) -> dict[str, bool]:
    return {"extra forwards": f["forwards per backward"] > 1.5, "foreign operator": bool(foreign(f))}


def foreign(f: Findings) -> str:
    """An operator that a training of this kind has no use for and that takes a tenth of all; "" for none."""
    for name, share in f.items():
        operator = name.removeprefix("share of ")
        bare = operator.removeprefix("aten::").lstrip("_").lower()
        if name != operator and share > 0.1 and bare != "t" and not bare.startswith(OF_TRAINING):
            return operator
    return ""


def _memory(f: Findings) -> dict[str, bool]:
    return {"grows": f["growth MB per step"] > 0.06}


def _arrivals(f: Findings) -> dict[str, bool]:
    late = sorted(f.values())
    return {"late": late[-1] > 0.2 and late[-1] > 4 * late[0]}


def _cores(f: Findings) -> dict[str, bool]:
    return {"threads": f["threads"] > f["cores"] and f["step over one thread per core"] > THREADED}


def _disk(f: Findings) -> dict[str, bool]:
    return {
        "fsync": f["fsyncs per step"] >= 1,
        "writes": f["written bytes per step"] > 2e5,
        "reads": f["read bytes per step"] > 2e5,
    }


def _census(f: Findings) -> dict[str, bool]:
    return {"float64": f["float64 share of parameters"] > 0, "anomaly": f["anomaly detection"] > 0}


def _traffic(f: Findings) -> dict[str, bool]:
    return {
        "bytes": f["bytes over parameters"] > 1.5,
        "buckets": f["buckets per step"] > 6,
        "collectives": f["other collectives per step"] >= 1 and f["bytes over parameters"] <= 1.5,
    }


def _same_batch(f: Findings) -> dict[str, bool]:
    return {"data": f["gain if data were free"] > FREE_DATA and f["share of waiting for data"] > WAITING}


def _batch(f: Findings) -> dict[str, bool]:
    return {"tiny": f["gain of a batch 4 x as large"] > LARGER and f["samples"] <= SMALL}


def _alone(f: Findings) -> dict[str, bool]:
    return {"exchange": f["gain if the exchange were free"] > 2}


RULES = {
    "steps": _steps,
    "shares": _shares,
    "ops": _ops,
    "memory": _memory,
    "arrivals": _arrivals,
    "cores": _cores,
    "disk": _disk,
    "census": _census,
    "traffic": _traffic,
    "same_batch": _same_batch,
    "batch": _batch,
    "alone": _alone,
}
ORDER = (
    "threads",
    "float64",
    "anomaly",
    "tiny_batches",
    "checkpoint",
    "fsync",
    "archive",
    "validation",
    "growing",
    "statistics",
    "averaging",
    "sync_batchnorm",
    "tiny_buckets",
    "straggler",
    "slow_loader",
)
"""Which key sign counts first: settings and counts, which no neighbour disturbs, before times."""


def diagnosed(findings: Mapping[str, Findings]) -> str:
    """The cause that the bought measurements name; "healthy" where none of them has a key sign."""
    seen = {measurement: signs(measurement, found) for measurement, found in findings.items()}
    return next((c for c in ORDER if BY_NAME[c].sign in seen.get(BY_NAME[c].key, ())), "healthy")


def names(measurement: str, found: Findings) -> str:
    """What this measurement alone would make one say."""
    return diagnosed({measurement: found})


def promised(cause: str, findings: Mapping[str, Findings]) -> float | None:
    """Gain, as a ratio of samples per second, that the findings promise if `cause` is cured; None if they cannot tell.

    A cause whose share s of the step goes away makes it 1/(1-s) times as fast; an upper limit where something else
    takes the place of what was removed.
    """
    if cause == "healthy":
        return 1.0
    key = findings.get(BY_NAME[cause].key, {})
    rest = findings.get("shares", {}).get("overhead")
    if cause in ("slow_loader", "archive"):
        free = findings.get("same_batch", {}).get("gain if data were free")
        return free if free else _without(key.get("share of waiting"))
    if cause == "threads":
        return key.get("step over one thread per core")
    if cause in ("float64", "anomaly"):
        return _without(key.get("share of step saved if plain"))
    if cause == "tiny_batches":
        return key.get("gain of a batch 4 x as large")
    if cause in ("fsync", "checkpoint"):
        return _without(key.get("share of waiting"))
    if cause in ("sync_batchnorm", "averaging"):
        return key.get("step over one without other collectives")
    if cause == "straggler":
        return _without(max(key.values(), default=None))
    if cause == "tiny_buckets":
        return key.get("step over default buckets")
    return _without(rest)


def _without(share: float | None) -> float | None:
    return None if share is None else 1 / (1 - min(share, 0.95))


assert set(ORDER) == {illness.name for illness in ILLNESSES}
