"""Before and after a fix: how much faster the script has become, and what became of each estimated gain.

Two runs, one after the other: what the machine did between them is in their ratio. Samples per second count, not steps.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from labs.doctor import estimated_gain as gains
from labs.doctor.bottlenecks import BOTTLENECKS, PARTS, SLOW, UNPRICED
from labs.doctor.estimated_gain import part_s
from labs.doctor.findings import FROM_PARTS, Finding, lateness, ms
from labs.doctor.profile import KINDS, Profile
from labs.doctor.report import COLUMNS, SMALL, Report, capital, cut, wrapped
from labs.kit.errors import require
from labs.kit.measure import Estimate, differs

MILDER = {"tiny_batches": "larger_batch", "optimizer_loop": "fused_optimizer", "python_overhead": "compile"}
"""What a finding is called once it matters less."""
NEAR = 1.2  # A gain within this factor of its estimate is as estimated, even outside of the interval
SAME_MACHINE = ("cpu", "cores", "gpus", "torch")


@dataclass(frozen=True)
class Comparison:
    """Of two reports of the same script, as it was and with a fix."""

    gain: Estimate  # How many times as many samples per second; steps, where samples were not counted in both
    unit: str  # "samples/s" or "steps/s"
    fixed: list[Finding]  # Findings with a gain that the second run shows to be gone
    not_shown: list[Finding]  # The second run doesn't have them either, but didn't try them, or can't tell
    left: list[tuple[Finding, Finding]]  # In both: before, after
    new: list[Finding]
    warnings: list[str]


def compare(before: Report, after: Report) -> Comparison:
    """BadInput if one of them has seen no steps."""
    for name, report in (("before", before), ("after", after)):
        require(bool(report.seen), f"the report from {name} the fix has seen no steps: there is nothing to compare")
    counted = all(gains.samples_per_s(r.seen) for r in (before, after))
    priced = [f for f in before.findings if f.gain]
    left = [(f, now) for f in priced if (now := _now(f, before, after))]
    absent = [f for f in priced if not _now(f, before, after)]
    fixed = [f for f in absent if _is_shown(f, after)]
    names = {name for f in before.findings for name in (f.name, MILDER.get(f.name))}
    return Comparison(
        ratio(rates(after.seen, counted), rates(before.seen, counted)),
        "samples/s" if counted else "steps/s",
        fixed,
        [f for f in absent if f not in fixed and f.kind == SLOW],
        left,
        [f for f in after.findings if f.name not in names],
        list(_warnings(before, after, counted)),
    )


def _now(finding: Finding, before: Report, after: Report) -> Finding | None:
    """What the second run says of it. With the batch as it was, tiny batches that look better are tiny nevertheless."""
    same_batch = before.seen[0].samples == after.seen[0].samples
    names = [finding.name, *([MILDER[finding.name]] if finding.name in MILDER and same_batch else [])]
    return next((f for f in after.findings if f.name in names), None)


def _is_shown(finding: Finding, after: Report) -> bool:
    """Whether the second run could tell: what isn't tried any more, or too noisy, may be there still."""
    name = "slow_loader" if finding.name == "rows_one_by_one" else finding.name
    for mode in (b.mode for b in BOTTLENECKS if name in (b.name, MILDER.get(b.name)) and b.mode):
        if all(mode in f.gone for f in after.seen):
            return True
        tried = gains.interleaved(after.seen, mode)
        if finding.by != FROM_PARTS or tried is not None:
            return tried is not None and gains.standing(tried) == "fine" and finding.kind == SLOW
    late = lateness(after.seen)
    return finding.name != "straggler" or (late is not None and gains.standing(late.gain) == "fine")


def rates(ranks: Sequence[Profile], samples: bool) -> list[float]:
    """Of each step as it is, of the whole job: samples or steps per second."""
    amount = sum(f.samples or 0 for f in ranks) if samples else 1.0
    return [amount / s for s in gains.even_s(ranks)]


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


def _warnings(before: Report, after: Report, counted: bool) -> Iterator[str]:
    p, q = before.provenance, after.provenance
    for name in (n for n in SAME_MACHINE if p.get(n) != q.get(n)):
        yield f"another machine or torch: {name} was {p.get(name)}, now {q.get(name)}"
    a, b = before.seen[0], after.seen[0]
    if not counted:
        yield "samples could not be counted in both: steps per second are compared, and say nothing if batches differ"
    elif a.samples != b.samples:
        yield f"a step had {a.samples:g} samples per rank and has {b.samples:g}: only samples per second compare"
    if a.ranks != b.ranks:
        yield f"there were {a.ranks} ranks, now {b.ranks}: more devices fix nothing that held one back"
    sizes = [f.training.get("parameters") for f in (a, b)]
    if sizes[0] != sizes[1]:
        yield f"the model had {sizes[0]} parameters, now {sizes[1]}: it is another model"


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


def verdict(estimated: Estimate, gain: Estimate) -> str:
    """What came of an estimated gain."""
    if estimated.low <= gain.value <= estimated.high:
        return "as estimated, within the interval"
    if 1 / NEAR <= gain.value / estimated.value <= NEAR:
        return "as estimated, within 20 %"
    if gain.value > estimated.value:
        return "more than estimated: something else has changed as well"
    return "less than estimated: this fix left some of it, or costs something itself"


def page(before: Report, after: Report) -> str:
    """For a terminal. BadInput as `compare`."""
    return "\n".join(_lines(before, after, compare(before, after))) + "\n"


def _lines(before: Report, after: Report, found: Comparison) -> Iterator[str]:
    yield from wrapped(sentence(before, after, found))
    for warning in found.warnings:
        yield from wrapped(f"Beware: {warning}.", "  ")
    fixed = [f"{f.name}: estimated gain {f.gain}, {f.by}" for f in found.fixed]
    if len(fixed) == 1:
        fixed.append(f"measured {found.gain}, {verdict(found.fixed[0].gain, found.gain)}")
    elif fixed:
        fixed.append(f"measured {found.gain} for all of them together")
    not_shown = [f"{f.name}: estimated gain {f.gain} before; the second run didn't try it" for f in found.not_shown]
    left = [f"{was.name}: estimated gain {was.gain} before, now {now.gain or 'not priced'}" for was, now in found.left]
    new = [
        f"{f.name}: {capital(f.what)}{f'; estimated gain {f.gain}' if f.gain else ''}"
        for f in found.new
        if f.kind != UNPRICED
    ]
    rows = {"FIXED": fixed, "NOT SHOWN TO BE FIXED": not_shown, "STILL THERE": left, "NEW, OR NO LONGER HIDDEN": new}
    for title, texts in rows.items():
        if texts:
            yield ""
            yield title
            yield from (line for text in texts for line in wrapped(text, "  ", "    "))
    yield ""
    yield "WHERE A STEP WENT, AND GOES"
    yield from _parts(before.seen, after.seen)


def _parts(before: Sequence[Profile], after: Sequence[Profile]) -> Iterator[str]:
    """Of the slowest rank of each run."""
    was, now = (max(ranks, key=lambda f: sum(f.step_s)) for ranks in (before, after))
    yield f"  {'':<32}{'before':>10}{'now':>10}"
    rows = [("a step", *(statistics.fmean(f.step_s) for f in (was, now)))]
    rows += [(PARTS[k], part_s(was, k), part_s(now, k)) for k in KINDS]
    for name, a, b in rows:
        if max(a, b) >= SMALL * rows[0][1]:
            yield cut(f"  {name:<32}{ms(a):>10}{ms(b):>10}", COLUMNS)
