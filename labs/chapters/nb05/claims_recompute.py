"""What notebook 05's records say of activation checkpointing: time, operations, what is kept, and long sequences."""

from __future__ import annotations

import math
from typing import NamedTuple

from labs.activation_checkpointing import report
from labs.kit.claims import last, model_of, runs, size
from labs.kit.measure import Estimate
from labs.kit.record import Records

LAB = "activation_checkpointing"
LEAST_ROUNDS = 5  # with fewer an interval says little
LONG = 1024  # tokens: twice the longest sequence of BERT


class Price(NamedTuple):
    """What one policy costs."""

    model: str
    device: str
    policy: str
    share: float
    """Of the blocks that run again."""
    time: Estimate
    """% that a step takes longer"""
    operations: float
    """% more of them in a step, counted."""

    def __str__(self) -> str:
        return f"{self.time} ({self.model}, {self.policy})"


def prices(evidence: Records) -> list[Price]:
    """Every policy of the last run of each model and kind of device, the cheapest first. LookupError without one."""
    found: dict[tuple[str, str], list[Price]] = {}
    for run in runs(evidence, LAB, "step_s", part="pareto", policy="none"):
        none = run.one("step_s", part="pareto", policy="none")
        if len(none.samples) >= LEAST_ROUNDS:
            device = "GPU" if run[0].layout["device"] == "cuda" else "CPU"
            found[model_of(run), device] = _prices(run, model_of(run), device)
    flat = sorted((p for ps in found.values() for p in ps), key=lambda p: p.time.value)
    if not flat:
        raise LookupError(f"launch({LAB!r}) with at least one policy and {LEAST_ROUNDS} rounds is needed")
    return flat


def _prices(run: Records, model: str, device: str) -> list[Price]:
    times, none = report.price(run), run.one("flops", part="pareto", policy="none").value
    found = []
    for policy, e in times.items():
        flops = run.one("flops", part="pareto", policy=policy)
        time = Estimate(*(100 * (x - 1) for x in (e.value, e.low, e.high)), e.n, "%")
        found.append(Price(model, device, policy, flops.case["share"], time, 100 * (flops.value / none - 1)))
    return found


class Kept(NamedTuple):
    """What forward leaves behind under a policy, and how many operations a step has, both against none."""

    policy: str
    saved_bytes: float
    none_bytes: float
    flops_ratio: float

    @property
    def selective(self) -> bool:
        """Whether it keeps results of some operations by design; others keep none inside a segment."""
        return self.policy.startswith("selective")

    def __str__(self) -> str:
        by_design = ", which keeps results of matrix products by design" if self.selective else ""
        return f"{size(self.saved_bytes)} and {self.flops_ratio:.2f} x the operations ({self.policy}{by_design})"


def kept(evidence: Records) -> list[Kept]:
    """Every policy of the last launch, the one that leaves least first. LookupError without one but selective."""
    run = last(evidence, LAB, "saved_bytes", part="pareto")
    found, (none, flops) = [], (run.one(m, part="pareto", policy="none").value for m in ("saved_bytes", "flops"))
    for r in run.where("saved_bytes", part="pareto"):
        policy = r.case["policy"]
        if policy != "none":
            ratio = run.one("flops", part="pareto", policy=policy).value / flops
            found.append(Kept(policy, r.value, none, ratio))
    if all(k.selective for k in found):
        raise LookupError(f"launch({LAB!r}) with a policy that cuts blocks into segments is needed")
    return sorted(found, key=lambda k: k.saved_bytes)


class Called(NamedTuple):
    """torch's checkpoint, called without use_reentrant, and with use_reentrant=False."""

    scenario: str
    error: str
    missing: int
    """Parameters without a gradient"""
    announced: str
    """The warning about use_reentrant; empty if there was none."""
    repaired: bool
    """Whether use_reentrant=False neither fails, nor warns, nor leaves a gradient out"""
    torch: str
    """Its version; empty where the records do not say."""

    @property
    def trains(self) -> bool:
        """Without an error, and every parameter gets its gradient."""
        return not self.error and not self.missing

    @property
    def fine(self) -> bool:
        """Trains, and no future version is announced to refuse it."""
        return self.trains and not self.announced

    def __str__(self) -> str:
        gone = f"{self.missing} parameters get no gradient"
        return f"{self.scenario}: {self.error or (gone if self.missing else 'trains')}"


def announces(found: list[Called]) -> str:
    """How many warn, and the sentence of the warning that is about a version to come."""
    texts = [c.announced for c in found if c.announced]
    sentences = [s for text in texts[:1] for s in text.split(". ")]
    chosen = [s for s in sentences if "will" in s] or sentences
    return f"{len(texts)} warn" + "".join(f' ("{" ".join(s.split())}")' for s in chosen[:1])


def called(evidence: Records) -> list[Called]:
    """By scenario, of the last launch. LookupError if none was tried."""
    run = last(evidence, LAB, "raised", variant="left out")
    return [_called(run, r.case["scenario"]) for r in run.where("raised", variant="left out")]


def _called(run: Records, scenario: str) -> Called:
    out, repaired = (
        {m: run.one(m, scenario=scenario, variant=v) for m in ("raised", "parameters_without_gradient", "warnings")}
        for v in ("left out", "use_reentrant=False")
    )
    announced = next((t for t in out["warnings"].case["texts"] if "use_reentrant" in t), "")
    version = str(run[0].provenance.get("torch", "")).partition("+")[0]
    return Called(
        scenario,
        out["raised"].case["error"],
        int(out["parameters_without_gradient"].value),
        announced,
        not any(r.value for r in repaired.values()),
        version,
    )


class Long(NamedTuple):
    """Peak of the activations of one sequence, without and with a checkpoint per block."""

    attention: str
    seq: int
    none: float
    block: float
    order: float
    """With checkpoints it grows as this power of the length, between the two longest"""

    @property
    def falls(self) -> float:
        """By how many %."""
        return 100 * (1 - self.block / self.none)

    def __str__(self) -> str:
        return (
            f"from {size(self.none)} to {size(self.block)} with {self.attention} attention, which then grow as "
            f"length^{self.order:.2g}"
        )


def sdpa_alone(found: list[Long]) -> str:
    """How much less SDPA takes than attention that is written out, without checkpoints; empty if not both were run."""
    by = {x.attention: x for x in found}
    if not {"eager", "sdpa"} <= by.keys():
        return ""
    times = by["eager"].none / by["sdpa"].none
    return f". Without checkpoints eager attention takes {times:.1f} x as much as SDPA"


def longest(evidence: Records) -> list[Long]:
    """For each kind of attention. LookupError without two lengths, the longer of at least LONG tokens."""
    run, found = last(evidence, LAB, "peak_bytes", part="sequences"), []
    for attention in dict.fromkeys(r.case["attention"] for r in run.where("peak_bytes", part="sequences")):
        case = {"part": "sequences", "attention": attention}
        lengths = sorted({r.case["seq"] for r in run.where("peak_bytes", **case)})[-2:]
        if len(lengths) < 2 or lengths[-1] < LONG:
            raise LookupError(f"launch({LAB!r}) with two lengths, one of at least {LONG} tokens, is needed")
        before, block = (run.one("peak_bytes", policy="block", seq=s, **case).value for s in lengths)
        none = run.one("peak_bytes", policy="none", seq=lengths[-1], **case).value
        order = math.log(block / before) / math.log(lengths[-1] / lengths[0])
        found.append(Long(attention, lengths[-1], none, block, order))
    return found
