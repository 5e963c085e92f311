"""Before and after a cure: how much faster the training has become, and what became of each bound that was promised.

Two runs, one after the other: what the machine did between them is in their ratio. Samples per second count, not steps.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from labs.doctor import bounds
from labs.doctor.bounds import part_s
from labs.doctor.causes import CAUSES, HOLDS_BACK, PARTS, READING, Cause
from labs.doctor.diagnosis import FROM_PARTS, OWN, Finding, lateness, ms, own_lines_s
from labs.doctor.facts import KINDS, Facts
from labs.doctor.report import COLUMNS, SMALL, Report, capital, cut, wrapped
from labs.kit.errors import require
from labs.kit.measure import Estimate, differs

MILDER = {"tiny_batches": "larger_batch", "optimizer_loop": "fused_optimizer", "python_overhead": "compile"}
"""What a finding is called once it matters less."""
NEAR = 1.2
"""A gain within this factor of its bound is as promised, even outside of the interval."""
SAME_MACHINE = ("cpu", "cores", "gpus", "torch")


@dataclass(frozen=True)
class Comparison:
    """Of two reports of the same script, or of a script and its cured version."""

    gain: Estimate
    """How many times as many samples per second; steps, where samples were not counted in both."""
    unit: str
    """ "samples/s" or "steps/s"."""
    cured: list[Finding]
    """Findings with a bound that the second run does not have any more, and shows to be gone."""
    untold: list[Finding]
    """The second run does not have them either, but did not try them, or could not tell."""
    left: list[tuple[Finding, Finding]]
    """In both: before, after."""
    new: list[Finding]
    together: Estimate | None
    """At most so many times as fast without all that is cured, by arithmetic; None if nothing is."""
    warnings: list[str]


def compare(before: Report, after: Report) -> Comparison:
    """BadInput if one of them has seen no steps."""
    for name, report in (("before", before), ("after", after)):
        require(bool(report.seen), f"the report from {name} the cure has seen no steps: there is nothing to compare")
    counted = all(bounds.samples_per_s(r.seen) for r in (before, after))
    gain = ratio(rates(after.seen, counted), rates(before.seen, counted))
    priced = [f for f in before.findings if f.bound]
    left = [(f, now) for f in priced if (now := _now(f, before, after))]
    absent = [f for f in priced if not _now(f, before, after) and (f.kind == HOLDS_BACK or _in_use(f, after))]
    cured = [f for f in absent if _is_gone(f, after)]
    names = {name for f in before.findings for name in (f.name, MILDER.get(f.name))}
    new = [f for f in after.findings if f.name not in names]
    return Comparison(
        gain,
        "samples/s" if counted else "steps/s",
        cured,
        [f for f in absent if f not in cured],
        left,
        new,
        together([f.bound for f in cured]),
        list(_warnings(before, after, counted)),
    )


def _now(finding: Finding, before: Report, after: Report) -> Finding | None:
    """What the second run says of it. With the batch as it was, tiny batches that look better are tiny all the same."""
    same_batch = before.seen[0].samples == after.seen[0].samples
    names = [finding.name, *([MILDER[finding.name]] if finding.name in MILDER and same_batch else [])]
    return next((f for f in after.findings if f.name in names), None)


def _in_use(option: Finding, after: Report) -> bool:
    """Whether it could not be tried any more, for the training has it now. Or its gain has gone among others."""
    return any(_not_there(cause.mode, after) for cause in _causes_of(option))


def _is_gone(finding: Finding, after: Report) -> bool:
    """Whether the second run shows it: it is not there, it was tried and gives little, or its parts are small."""
    causes = _causes_of(finding)
    if finding.name == "recompiles":
        return not any(f.compiles.get("in_steps") for f in after.seen)
    if any(_not_there(cause.mode, after) for cause in causes):
        return True
    if (now := next((bounds.in_turn(after.seen, cause.mode) for cause in causes), None)) is not None:
        return bounds.standing(now) == "fine"
    now = _by_parts(finding, after)
    return now is not None and bounds.standing(now, bounds.WORTH_BY_PARTS) == "fine"


def _causes_of(finding: Finding) -> list[Cause]:
    return [cause for cause in CAUSES if finding.name in (cause.name, MILDER.get(cause.name))]


def _not_there(mode: str, after: Report) -> bool:
    return all(mode in f.gone for f in after.seen)


def _by_parts(finding: Finding, after: Report) -> Estimate | None:
    """What it costs by the parts of the second run's steps; None if they do not hold all of it."""
    seen = after.seen
    if finding.name == "own_code":
        least = min(seen, key=lambda f: part_s(f, *OWN))
        return bounds.without(least.step_s, own_lines_s(least)[0])
    if finding.name == "straggler":
        late = lateness(seen)
        return late and late.bound
    if finding.name == "exchange" and finding.by != FROM_PARTS:
        return None  # DDP's is within backward
    kinds = ("copy",) if finding.name == "copies" else next((c.parts for c in _causes_of(finding)), ())
    return bounds.from_parts(seen, *kinds)[0] if kinds else None


def _why_untold(finding: Finding, after: Report) -> str:
    """Of one that the second run does not have, and does not show to be gone."""
    modes = [cause.mode for cause in _causes_of(finding)]
    known = [why for f in after.seen for mode, why in (f.not_tried | f.left_out).items() if mode in modes]
    if known:
        return f"the second run did not try it: {known[0]}"
    return "the second run did not try it, or cannot tell (--steps and --seconds give it more time)"


def rates(facts: Sequence[Facts], samples: bool) -> list[float]:
    """Of each step as it is, of the whole job: samples or steps per second."""
    amount = sum(f.samples or 0 for f in facts) if samples else 1.0
    return [amount / s for s in bounds.even_s(facts)]


def ratio(after: Sequence[float], before: Sequence[float], resamples: int = 2_000) -> Estimate:
    """Ratio of two medians of unpaired samples, with its bootstrap interval: each side is drawn by itself."""
    draw = random.Random(0)
    drawn = sorted(
        statistics.median(draw.choices(after, k=len(after))) / statistics.median(draw.choices(before, k=len(before)))
        for _ in range(resamples)
    )
    value = statistics.median(after) / statistics.median(before)
    low, high = drawn[round(0.025 * resamples)], drawn[round(0.975 * resamples) - 1]
    return Estimate(value, min(low, value), max(high, value), min(len(after), len(before)), "x")


def together(found: Sequence[Estimate]) -> Estimate | None:
    """Bounds b_i of parts that do not overlap save 1 - 1/b_i of a step each: at most 1 / (1 - their sum) as fast.

    Infinite where they save all of it. None without any.
    """
    if not found:
        return None

    def at_most(values: list[float]) -> float:
        left = 1 - sum(1 - 1 / v for v in values)
        return 1 / left if left > 1e-9 else math.inf

    value, low, high = (at_most([getattr(b, end) for b in found]) for end in ("value", "low", "high"))
    return Estimate(value, low, high, min(b.n for b in found), "x")


def _warnings(before: Report, after: Report, counted: bool) -> Iterator[str]:
    p, q = before.provenance, after.provenance
    for name in (n for n in SAME_MACHINE if p.get(n) != q.get(n)):
        yield f"another machine or torch: {name} was {p.get(name)}, now {q.get(name)}"
    a, b = before.seen[0], after.seen[0]
    if "cpu" not in (a.device, b.device) and bool(bounds.beside_s(before.seen)) != bool(bounds.beside_s(after.seen)):
        yield "only one of the two runs took steps in turn: the other one's steps hold a wait for the device"
    if not counted:
        yield "samples could not be counted in both: steps per second are compared, and say nothing if batches differ"
    elif a.samples != b.samples:
        yield f"a step had {a.samples:g} samples per rank and has {b.samples:g}: only samples per second compare"
    if a.ranks != b.ranks:
        yield f"there were {a.ranks} ranks, now {b.ranks}: more devices are no cure of what held one back"
    if len(a.step_s) != len(b.step_s):
        yield f"{len(a.step_s)} steps were looked at, now {len(b.step_s)}"
    sizes = [f.training.get("parameters") for f in (a, b)]
    if sizes[0] != sizes[1]:
        yield f"the model had {sizes[0]} parameters, now {sizes[1]}: it is another training"


def sentence(before: Report, after: Report, found: Comparison) -> str:
    """The one sentence that comes first."""
    was, now = (f"{statistics.median(rates(r.seen, found.unit == 'samples/s')):,.4g}" for r in (before, after))
    if not differs(found.gain):
        return (
            f"{after.script}: no difference that these two runs can show: {was} {found.unit} before, {now} now "
            f"({found.gain})."
        )
    how = f"{found.gain} as fast as before" if found.gain.value > 1 else f"slower than before, {found.gain} as fast"
    return f"{after.script} is {how}: {was} {found.unit}, now {now}."


def verdict(promised: Estimate, gain: Estimate) -> str:
    """What came of a bound."""
    if promised.low <= gain.value <= promised.high:
        return "as promised, within the interval"
    if 1 / NEAR <= gain.value / promised.value <= NEAR:
        return "as promised, within 20 %"
    if gain.value > promised.value:
        return "more than promised: something else has changed, too"
    return "less than the bound: a cure gives at most that, and this one left some of it, or costs something itself"


def page(before: Report, after: Report) -> str:
    """For a terminal. BadInput as `compare`."""
    return "\n".join(_lines(before, after, compare(before, after))) + "\n"


def _lines(before: Report, after: Report, found: Comparison) -> Iterator[str]:
    yield from wrapped(sentence(before, after, found))
    for warning in found.warnings:
        yield from wrapped(f"Beware: {warning}.", "  ")
    if found.cured:
        yield ""
        yield "CURED"
        for f in found.cured:
            yield from wrapped(f"{f.name}: promised at most {f.bound}, {f.by}", "  ", "    ")
        yield from wrapped(_what_came(found), "  ")
    if found.untold:
        yield ""
        yield "NOT SHOWN TO BE CURED"
        for f in found.untold:
            yield from wrapped(f"{f.name}: at most {f.bound} before; {_why_untold(f, after)}", "  ", "    ")
    if found.left:
        yield ""
        yield "STILL THERE"
        for was, now in found.left:
            price = f", now {now.bound}" if now.bound else ", now not priced"
            yield from wrapped(f"{was.name}: at most {was.bound} before{price}", "  ", "    ")
    if fresh := [f for f in found.new if f.kind != READING]:
        yield ""
        yield "NEW, OR NO LONGER HIDDEN"
        for f in fresh:
            yield from wrapped(f"{f.name}: {capital(f.what)}{f'; at most {f.bound}' if f.bound else ''}", "  ", "    ")
    yield ""
    yield "WHERE A STEP WENT, AND GOES"
    yield from _parts(before.seen, after.seen)
    yield from wrapped("Two runs, one after the other: what the machine did between them is in their ratio.", "  ")


def _what_came(found: Comparison) -> str:
    promised = found.together
    if promised is None or math.isinf(promised.high):
        return f"What came: {found.gain}. Their bounds overlap, so that they promise nothing together."
    both = f" Together that is at most {promised}, by arithmetic." if len(found.cured) > 1 else ""
    return f"What came: {found.gain}.{both} {capital(verdict(promised, found.gain))}."


def _parts(before: Sequence[Facts], after: Sequence[Facts]) -> Iterator[str]:
    """Of the slowest rank of each run."""
    was, now = (max(facts, key=lambda f: sum(f.step_s)) for facts in (before, after))
    yield f"  {'':<32}{'before':>10}{'now':>10}"
    rows = [("a step", *(sum(f.step_s) / len(f.step_s) for f in (was, now)))]
    rows += [(PARTS[k], part_s(was, k), part_s(now, k)) for k in KINDS]
    for name, a, b in rows:
        if max(a, b) >= SMALL * rows[0][1]:
            yield cut(f"  {name:<32}{ms(a):>10}{ms(b):>10}", COLUMNS)
