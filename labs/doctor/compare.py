"""Compare the runs before and after a fix: how much faster the script got, and what became of each finding.

The runs aren't interleaved, so their ratio includes changes of the machine. It compares samples/s, or else steps/s.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import numpy as np

from labs.doctor import estimated_gain as gains
from labs.doctor.bottlenecks import BY_NAME, OPTION, PARTS, UNPRICED
from labs.doctor.findings import Finding, ms
from labs.doctor.profile import KINDS, Profile
from labs.doctor.report import SMALL, Report, wrapped
from labs.kit.measure import Estimate, differs


def rates(ranks: Sequence[Profile], samples: bool) -> list[float]:
    """Return the whole job's samples (or steps) per second in each unchanged step."""
    amount = sum(f.samples or 0 for f in ranks) if samples else 1.0
    return [amount / s for s in gains.even_s(ranks)]


def ratio(after: Sequence[float], before: Sequence[float]) -> Estimate:
    """Return the ratio of the medians of unpaired samples. Its bootstrap interval resamples each side separately."""
    draw, value = np.random.default_rng(0), statistics.median(after) / statistics.median(before)
    medians = (np.median(draw.choice(of, (gains.RESAMPLES, len(of))), axis=1) for of in (after, before))
    low, high = np.quantile(np.divide(*medians), (0.025, 0.975))
    return Estimate(value, min(float(low), value), max(float(high), value), min(len(after), len(before)), "x")


def became(finding: Finding, after: Report) -> str:
    """Describe what the second run shows about a finding of the first."""
    now = next((f for f in after.findings if f.name == finding.name), None)
    if now is not None:
        return f"still there, {f'estimated gain {now.gain}' if now.gain else 'not priced'}"
    row = BY_NAME.get(finding.name)
    mode = row.mode if row else ""
    tried = gains.interleaved(after.seen, mode) if mode else None
    if mode and (tried is None or gains.standing(tried) != "fine"):
        return f"not shown to be gone ({after.seen[0].not_tried.get(mode, 'this run cannot tell')})"
    return "gone"


def page(before: Report, after: Report) -> str:
    """Return the comparison for a terminal. Both runs must have measured steps."""
    return "\n".join(_lines(before, after)) + "\n"


def _lines(before: Report, after: Report) -> Iterator[str]:
    counted = all(gains.samples_per_s(r.seen) for r in (before, after))
    was, now = (rates(r.seen, counted) for r in (before, after))
    gain, unit = ratio(now, was), "samples/s" if counted else "steps/s"
    how = f"{gain} as fast as before" if differs(gain) else f"inconclusive, {gain} as fast as before"
    yield from wrapped(
        f"{after.script}: {how}. {statistics.median(was):,.4g} {unit} before, {statistics.median(now):,.4g} now."
    )
    for what, a, b in _changed(before, after):
        yield from wrapped(f"Beware: {what} was {a}, now {b}.", "  ")
    yield from ("", "WHAT BECAME OF EACH FINDING")
    for f in before.findings:
        estimated = f", estimated gain {f.gain}" if f.gain else ""
        yield from wrapped(f"{f.name} ({f.kind}{estimated}): {became(f, after)}", "  ", "    ")
    names = {f.name for f in before.findings}
    for f in after.findings:
        if f.name not in names and f.kind not in (UNPRICED, OPTION):
            yield from wrapped(f"new, {f.name} ({f.kind}): {f.what}", "  ", "    ")
    yield from ("", f"  {'WHERE A STEP WENT, AND GOES':<32}{'before':>10}{'now':>10}")
    slowest = [max(r.seen, key=lambda f: sum(f.step_s)) for r in (before, after)]
    steps = [statistics.fmean(f.step_s) for f in slowest]
    for name, (a, b) in {"a step": steps, **{PARTS[k]: [gains.part_s(f, k) for f in slowest] for k in KINDS}}.items():
        if max(a, b) >= SMALL * steps[0]:
            yield f"  {name:<32}{ms(a):>10}{ms(b):>10}"


def _changed(before: Report, after: Report) -> Iterator[tuple[str, object, object]]:
    """Yield (what, before, after) for each difference that makes the runs hard to compare."""
    pairs = [(name, before.provenance.get(name), after.provenance.get(name)) for name in ("cpu", "gpus", "torch")]
    a, b = before.seen[0], after.seen[0]
    pairs += [("the batch of a rank", a.samples, b.samples), ("the number of ranks", a.ranks, b.ranks)]
    pairs += [("the model's parameters", *(f.training.get("parameters") for f in (a, b)))]
    yield from (pair for pair in pairs if pair[1] != pair[2])
