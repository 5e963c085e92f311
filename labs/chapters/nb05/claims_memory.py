"""What notebook 05's records say of a training step's memory: steps that were traced, and the same ones for real."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any, NamedTuple

from labs.kit.claims import GB, last, size
from labs.kit.record import Record, Records

LAB = "memory_oracle"
WORKSPACE = 2 * 32 * 2**20
"""Bytes that kernels of a GPU may take beside tensors in a step however small, as cuDNN does: our choice. cuBLAS, whose
own is taken before the step and not counted, takes 32 MiB for a handle and a stream on an H100, and backward has a
handle of its own (docs.pytorch.org/docs/stable/notes/cuda.html, cuBLAS workspaces)."""
NAMES = {"resnet152": "ResNet-152", "bert_large": "BERT-large"}
FIXED = ("parameters", "gradients", "optimizer")  # categories that do not grow with the batch
CUT = {"stage": "one checkpoint per stage", "block": "one per block"}
HOW = {"sgd": "SGD", "momentum": "SGD with momentum", "adam": "Adam", "fp32": "FP32"}


class Step(NamedTuple):
    """One traced step: the bytes of each category at its peak, and in which phase that is."""

    case: dict[str, Any]
    parts: dict[str, float]
    phase: str

    @property
    def batch(self) -> int:
        """Rows of the step."""
        return self.case["batch"]

    @property
    def peak(self) -> float:
        """Bytes of all categories."""
        return sum(self.parts.values())

    @property
    def fixed(self) -> float:
        """Bytes that do not grow with the batch."""
        return sum(self.parts[c] for c in FIXED)

    @property
    def per_row(self) -> float:
        """Bytes that each row adds."""
        return (self.peak - self.fixed) / self.batch

    @property
    def settings(self) -> str:
        """Optimizer and format, and how attention is computed where that was recorded."""
        given = [HOW.get(self.case[k], self.case[k]) for k in ("optimizer", "precision")]
        if "attention" in self.case:
            given.append(f"{self.case['attention']} attention")
        return ", ".join(given)

    def line(self, rows: float) -> float:
        """Peak bytes with so many rows, by a straight line."""
        return self.fixed + rows * self.per_row

    def rows_in(self, nbytes: float) -> float:
        """The batch with this peak, by a straight line; inf if rows add nothing."""
        return (nbytes - self.fixed) / self.per_row if self.per_row > 0 else math.inf

    def fitting(self, nbytes: float) -> str:
        """The largest batch in so much memory, by a straight line, in words."""
        rows = self.rows_in(nbytes)
        return f"{f'batch {math.floor(max(0, rows))}' if math.isfinite(rows) else 'any batch'} in {nbytes / GB:g} GB"


def near(nbytes: float, claimed: float) -> bool:
    """Whether it is what was claimed, when rounded as the statements are, to a GB."""
    return abs(nbytes - claimed) <= GB / 2


def traced(evidence: Records, model: str) -> list[Step]:
    """Steps of the last launch that traced this model, the smallest batch first. LookupError if there is none."""
    run, found = last(evidence, LAB, "peak_bytes", model=model), {}
    for r in run.where("peak_bytes", model=model):
        case = {k: v for k, v in r.case.items() if k != "category"}
        step = found.setdefault(json.dumps(case, sort_keys=True), Step(case, {}, _phase(run, case)))
        step.parts[r.case["category"]] = r.value
    return sorted(found.values(), key=lambda s: s.batch)


def _phase(run: Records, case: dict[str, Any]) -> str:
    return next((r.case["phase"] for r in run.where("peak_op", **case)), "")


def plain(steps: list[Step]) -> list[list[Step]]:
    """Those without checkpoints, one list for all that differ only in the batch; a line can be drawn from its last.

    Not one whose peak is in the optimizer's step, where activations are gone. LookupError if there is none.
    """
    found: dict[str, list[Step]] = {}
    for s in (s for s in steps if s.case["policy"] == "none" and s.phase != "optimizer"):
        found.setdefault(json.dumps({k: v for k, v in s.case.items() if k != "batch"}), []).append(s)
    if not found:
        raise LookupError(f"launch({LAB!r}) of a model without checkpoints, whose peak is in backward, is needed")
    return list(found.values())


# -- with checkpoints


class Cut(NamedTuple):
    """A step without checkpoints, and the same one with them."""

    whole: Step
    cut: Step

    def __str__(self) -> str:
        policy = self.cut.case["policy"]
        return f"{size(self.cut.peak)} ({CUT.get(policy, policy)})"


def cuts(steps: list[Step]) -> dict[int, list[Cut]]:
    """{batch: each policy against none}. LookupError with fewer than two policies."""
    whole, found = {s.batch: s for group in plain(steps) for s in group}, {}
    for s in steps:
        if s.case["policy"] != "none" and s.batch in whole:
            found.setdefault(s.batch, []).append(Cut(whole[s.batch], s))
    if len({c.cut.case["policy"] for row in found.values() for c in row}) < 2:
        raise LookupError(f"launch({LAB!r}) with policy none and at least two others at the same batch is needed")
    return found


# -- the largest batch that fits


class Limit(NamedTuple):
    """The largest batch that fits, looked for by traces."""

    case: dict[str, Any]
    rows: int
    next_bytes: float | None
    """Peak with one row more; None if no batch was too large."""
    predicted: float | None
    """The same batch from a single step of another size: what is left of the memory, over the bytes per row"""

    @property
    def exceeded(self) -> bool:
        """Whether a larger batch needs more than there is."""
        return self.next_bytes is not None and self.next_bytes > self.case["memory_gb"] * GB

    def __str__(self) -> str:
        more = "no batch is too large"
        if self.next_bytes:
            more = f"{self.rows + 1} would take {self.next_bytes / GB:.2f} GB"
        guess = "" if self.predicted is None else f" (predicted: {self.predicted:.0f})"
        policy = self.case["policy"]
        cut = "" if policy == "none" else f" with {CUT.get(policy, policy)}"
        name = NAMES.get(self.case["model"], self.case["model"].rpartition(":")[2])
        return f"{name}{cut} in {self.case['memory_gb']:g} GB: batch {self.rows} fits{guess}, {more}"


def limits(evidence: Records) -> list[Limit]:
    """The last launch's. LookupError if no batch was looked for."""
    run = last(evidence, LAB, "largest_batch")
    return [_limit(run, r) for r in run.where("largest_batch")]


def _limit(run: Records, r: Record) -> Limit:
    predicted, alike = None, {k: v for k, v in r.case.items() if k != "memory_gb"}
    with contextlib.suppress(LookupError):
        steps = [s for s in traced(run, r.case["model"]) if alike.items() <= s.case.items() and s.phase != "optimizer"]
        if steps and steps[0].per_row > 0:
            predicted = math.floor(steps[0].rows_in(r.case["memory_gb"] * GB))
    following = run.where("next_batch_bytes", **r.case)
    return Limit(r.case, int(r.value), following[0].value if len(following) else None, predicted)


# -- traces against real steps


class Checked(NamedTuple):
    """A trace and the same step for real."""

    name: str
    error: float
    """Bytes of tensors in the trace over real ones, less 1."""
    beyond: float
    """All that the allocator gave, workspace of kernels too, over the bytes in the trace; on a GPU less WORKSPACE."""
    together: bool
    """On a GPU: its peak is that of tensors and workspace in one, and nothing tells them apart."""


def checked(run: Records) -> list[Checked]:
    """Each step of this launch that was run for real, too."""
    found = []
    for r in run.where("measured_bytes"):
        trace = sum(p.value for p in run.where("peak_bytes", **r.case))
        apart = run.where("workspace_bytes", **r.case)
        together = not len(apart) and r.layout.get("device") == "cuda"
        given = r.value - WORKSPACE if together else r.value + sum(w.value for w in apart)
        name = f"{NAMES.get(r.case['model'], r.case['model'])}, policy {r.case['policy']}"
        found.append(Checked(name, trace / r.value - 1, max(given, 0.0) / trace, together))
    return found


def effort(run: Records) -> tuple[float, float, float]:
    """(seconds of the slowest trace, memory that all of them took, the largest peak that they say).

    The memory is inf if it was not recorded.
    """
    seconds = max((r.value for r in run.where("trace_s")), default=math.inf)
    resident = math.inf
    with contextlib.suppress(LookupError):
        resident = run.one("resident_bytes").value
    models = dict.fromkeys(r.case["model"] for r in run.where("peak_bytes"))
    return seconds, resident, max(s.peak for m in models for s in traced(run, m))
