"""What the records of `memory_oracle` hold, put together: peaks, timelines, and a paragraph on a model of your own."""

from __future__ import annotations

from dataclasses import dataclass

from labs.common.oracle.trace import CATEGORIES
from labs.kit.record import Records

GB = 1e9


def by_category(records: Records, **case: object) -> dict[str, float]:
    """Bytes by CATEGORIES at the peak of one traced step. LookupError if there is none with this case, or several."""
    return {c: records.one("peak_bytes", category=c, **case).value for c in CATEGORIES}


def peak(records: Records, **case: object) -> float:
    """Bytes of all categories together."""
    return sum(by_category(records, **case).values())


def relative_error(records: Records, **case: object) -> float:
    """How far the trace of a step is from the same step for real: above 0, it says more."""
    return peak(records, **case) / records.one("measured_bytes", **case).value - 1


def workspace(records: Records, **case: object) -> float:
    """What kernels took for themselves at the real peak, over the bytes of tensors; 0 where it was not told apart."""
    found = records.where("workspace_bytes", **case)
    return found[0].value / records.one("measured_bytes", **case).value if len(found) else 0.0


def checked(records: Records) -> list[dict]:
    """The cases of the steps that were really run, too."""
    return [r.case for r in records.where("measured_bytes")]


@dataclass(frozen=True)
class Timeline:
    """A step from its first operation to its last."""

    operations: list[float]
    """Numbers of the operations after which memory was looked at."""
    phases: list[str]
    """forward, backward or optimizer, for each."""
    bytes: dict[str, list[float]]
    """By CATEGORIES."""


def timeline(records: Records, **case: object) -> Timeline:
    """The timeline with this case. LookupError if there is none, or several."""
    phases = list(dict.fromkeys(r.case["phase"] for r in records.where("timeline_op", **case)))
    if not phases:
        raise LookupError(f"no record of 'timeline_op' with {case}")
    parts = [records.one("timeline_op", phase=p, **case).samples for p in phases]
    found = {
        c: [b for p in phases for b in records.one("timeline_bytes", phase=p, category=c, **case).samples]
        for c in CATEGORIES
    }
    names = [p for p, samples in zip(phases, parts, strict=True) for _ in samples]
    return Timeline([op for samples in parts for op in samples], names, found)


def report(records: Records) -> list[str]:
    """What an engineer asks of the model in `records`: how much, of what, when, how large a batch, on which cards.

    In sentences.
    """
    steps = [_step(r.case) for r in records.where("peak_bytes", part="model", category=CATEGORIES[0])]
    chosen, *others = steps
    said = [_on_peak(records, chosen)]
    for c in others:
        said.append(f"With policy {c['policy']} the peak is {_gb(peak(records, **c))}.")
    said += [_on_batch(records, r.case) for r in records.where("largest_batch", part="model")]
    return [*said, _on_cards(records)]


def _step(case: dict) -> dict:
    return {k: v for k, v in case.items() if k != "category"}


def _on_peak(records: Records, case: dict) -> str:
    parts = by_category(records, **case)
    total = sum(parts.values())
    largest = sorted((part for part in parts.items() if part[1] >= total / 200), key=lambda part: -part[1])
    shares = ", ".join(f"{c} {_gb(nbytes)} ({nbytes / total:.0%})" for c, nbytes in largest)
    phase = records.where("peak_op", **case)[0].case["phase"]
    return f"At batch {case['batch']} the peak is {_gb(total)}, in {phase}: {shares}."


def _on_batch(records: Records, case: dict) -> str:
    rows, memory = records.one("largest_batch", **case).value, case["memory_gb"]
    if not rows:
        return f"Not even the smallest batch fits in {memory:g} GB."
    return f"The largest batch in {memory:g} GB is {rows:g}."


def _on_cards(records: Records) -> str:
    verdicts = {
        v: [r.case["gpu"] for r in records.where("margin_bytes", part="model", verdict=v)]
        for v in ("fits", "tight", "does not fit")
    }
    lines = [f"{verdict}: {', '.join(gpus)}" for verdict, gpus in verdicts.items() if gpus]
    unknown = [r.case["gpu"] for r in records.where("unknown_memory")]
    lines += [f"memory not known: {', '.join(unknown)}"] if unknown else []
    return "By card, " + "; ".join(lines) + ". CUDA's context, workspace of kernels and fragmentation take more."


def _gb(nbytes: float) -> str:
    """As memory is sold, 10^9 bytes to the GB; MB below one."""
    return f"{nbytes / GB:.3g} GB" if nbytes >= GB else f"{nbytes / 1e6:.3g} MB"
