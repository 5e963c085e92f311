"""Figures of notebook 12 on one visit: where a step goes, on each rank; what cures give at most, and what they gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from labs.doctor import estimated_gain
from labs.doctor.bottlenecks import PARTS
from labs.doctor.findings import FROM_PARTS
from labs.doctor.profile import AS_IS, KINDS
from labs.doctor.report import Report
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import Estimate, estimate
from labs.kit.plot import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    bars,
    figure,
    log_axes,
    prediction,
    show,
    spans,
)
from labs.kit.record import Record, Records

COLORS = {
    "data": BLUE,
    "prepare": VERMILION,
    "forward": SKY,
    "backward": GREEN,
    "exchange": ORANGE,
    "optimizer": PURPLE,
    "rest": VERMILION,
    "evaluation": ORANGE,
    "save": ORANGE,
}
"""The same in each figure; other parts are grey."""
HATCHED = ("rest", "evaluation", "save")
SMALL = 0.02
"""Of the longest step: parts below it get no name."""
TICKS = (0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12)


def records_of(found: Report) -> Records:
    """Parts of each step as it was, and all ratios taken in turn, as records of the run that the report is of.

    Without world_size: the doctor pins nobody, and a rank may use all cores.
    """
    rows = [
        Record(
            "doctor",
            "part_s",
            "s",
            tuple(seconds),
            case={"rank": f.rank, "part": kind},
            layout={"rank": f.rank, "device": f.device},
        )
        for f in found.seen
        for kind, seconds in f.spans_s.items()
    ]
    for without, ratios in ratios_of(found).items():
        rows.append(
            Record(
                "doctor",
                "interleaved",
                "x",
                tuple(ratios),
                case={"counterfactual": without},
                layout={"rank": None, "device": found.seen[0].device},
            )
        )
    return Records(replace(r, provenance=found.provenance) for r in rows)


def ratios_of(found: Report) -> dict[str, list[float]]:
    """As it is / counterfactual, per sample, in each round, by counterfactual."""
    facts = found.seen
    modes = facts[0].interleaved_s if facts else {}
    ratios = {m: estimated_gain.ratios_of(facts, m) for m in modes}
    return {m: of for m, of in ratios.items() if of and m != AS_IS}


# Where a step goes


def step(found: Report, guess: Prediction | None = None, *, of: str = "data") -> None:
    """A row for each rank: its mean step, part after part. `guess`: share of part `of` on rank 0, in %."""
    facts = found.seen
    part_ms = {f.rank: {k: 1e3 * estimated_gain.part_s(f, k) for k in KINDS} for f in facts}
    longest = max(sum(p.values()) for p in part_ms.values())
    named = [k for k in KINDS if k in COLORS and max(p[k] for p in part_ms.values()) > SMALL * longest]
    message = _where(part_ms, named)
    fig, ax = figure(
        message,
        xlabel="mean step (ms)",
        ylabel="rank",
        records=records_of(found).where("part_s"),
        size=(7.8, 2.1 + 0.5 * len(facts)),
        legend_below=True,
    )
    _rows(ax, part_ms, named)
    share = 100 * part_ms[0][of] / sum(part_ms[0].values())
    if guess is not None:
        prediction(ax, float(guess) / 100 * sum(part_ms[0].values()), 0, label=f"end of {PARTS[of]}")
    told = "; ".join(
        f"rank {rank}, {sum(p.values()):.1f} ms: " + ", ".join(f"{PARTS[k]} {p[k]:.1f}" for k in named)
        for rank, p in part_ms.items()
    )
    show(fig, alt=f"{message}. Parts of the mean step. {told}.")
    if guess is not None:
        say(f"* {guess.against(share)}")
    if len(facts) == 1:
        own = sum(part_ms[0][k] for k in OWN)
        say(
            f"* Own code, with the log, `.item()`, the loss and `zero_grad`: {own:.1f} ms, "
            f"{100 * own / longest:.0f} % of a step."
        )


OWN = ("prepare", "rest", "synchronise", "print")
"""The script's own lines, and what they wait for."""


def _where(part_ms: Mapping[int, Mapping[str, float]], named: list[str]) -> str:
    """The message: the largest part of the only rank, or the part in which the ranks differ most."""
    if len(part_ms) == 1:
        (parts,) = part_ms.values()
        most = max(named, key=lambda k: parts[k])
        return f"The largest part of a step is {PARTS[most]}: {parts[most]:.1f} of {sum(parts.values()):.1f} ms"
    apart = {k: max(p[k] for p in part_ms.values()) - min(p[k] for p in part_ms.values()) for k in named}
    own = {k: apart[k] for k in named if k not in WAITS} or apart
    most = max(own, key=lambda k: own[k])
    late = max(part_ms, key=lambda rank: part_ms[rank][most])
    steps = [sum(p.values()) for p in part_ms.values()]
    equal = "Steps are equally long, and " if max(steps) < 1.1 * min(steps) else ""
    return f"{equal}rank {late} has {own[most]:.1f} ms more of {PARTS[most]}"


WAITS = ("backward", "exchange", "synchronise")
"""Parts in which a rank may wait for another one."""


def _rows(ax, part_ms: Mapping[int, Mapping[str, float]], named: list[str]) -> None:
    names = {k: PARTS[k] for k in named}
    grey = [k for k in KINDS if k not in named and any(p[k] for p in part_ms.values())]
    names |= {k: f"grey: {', '.join(PARTS[g] for g in grey)}" for k in grey[:1]}
    for row, parts in enumerate(part_ms.values()):
        at = 0.0
        for k in (k for k in KINDS if parts[k]):
            label = names.get(k, "") if row == _longest_row(part_ms, k) else ""
            spans(
                ax,
                row,
                [(at, at + parts[k])],
                color=COLORS[k] if k in named else "#BBBBBB",
                label=label,
                hatch="//" if k in HATCHED else "",
            )
            at += parts[k]
    ax.set_yticks(range(len(part_ms)), [str(rank) for rank in part_ms])
    ax.set_ylim(len(part_ms) - 0.5, -0.5)
    ax.set_xlim(0, None)


def _longest_row(part_ms: Mapping[int, Mapping[str, float]], kind: str) -> int:
    of = [p[kind] for p in part_ms.values()]
    return of.index(max(of))


# What a cure gives

DATA = "same batch again"


def promised(found: Report, guess: Prediction | None = None, cured: Records | None = None, *, of: str = DATA) -> None:
    """A row for each counterfactual, and for each cure that was tried; `guess`: x, of row `of`."""
    at_most = {
        name: estimated_gain.of_ratios(ratios, estimated_gain.looks(found.seen))
        for name, ratios in ratios_of(found).items()
    }
    by_parts = {
        f"{DATA}, from the parts": f.gain
        for f in found.findings
        if f.name == "slow_loader" and f.gain and f.by == FROM_PARTS
    }
    at_most = by_parts | dict(sorted(at_most.items(), key=lambda item: -item[1].value))
    bound = next(iter(by_parts.values()), at_most.get(DATA))
    given = {f"cure: {r.case['cure']}": estimate(r.samples, "x") for r in cured or ()}
    message = _kept(bound, given) if given else _most(at_most)
    rows = [*at_most, *given]
    if not rows:
        say("No counterfactual was taken in the time there was, and no cure: nothing to draw.")
        return
    records = [*records_of(found), *(cured or ())]
    fig, ax = figure(
        message,
        xlabel="samples per second, as it is = 1 (x)",
        ylabel="what is otherwise",
        records=Records(records),
        size=(7.8, 2.0 + 0.42 * len(rows)),
        legend_below=True,
    )
    bars(ax, rows, [*at_most.values(), *(None for _ in given)], label="without it, or with it otherwise", color=BLUE)
    if given:
        bars(ax, rows, [*(None for _ in at_most), *given.values()], label="a cure", color=VERMILION)
    ax.axvline(1, color=GREY, linewidth=1)
    if guess is not None and of in rows:
        prediction(ax, float(guess), rows.index(of))
    _axis(ax, [*at_most.values(), *given.values()], guess)
    told = "; ".join(f"{name} {e}" for name, e in {**at_most, **given}.items())
    show(fig, alt=f"{message}. Ratios with their intervals: {told}.")
    if guess is not None and of in rows:
        say(f"* {guess.against((at_most | given)[of])}")
    for line in _said(bound, given):
        say(f"* {line}")


def _axis(ax, shown: list[Estimate], guess: Prediction | None) -> None:
    low, high = min(e.low for e in shown), max(e.high for e in shown)
    if guess is not None and float(guess) > 0:
        low, high = min(low, float(guess)), max(high, float(guess))
    low, high = max(0.12, 0.9 * min(1.0, low)), min(40.0, 1.15 * max(1.5, high))
    log_axes(ax, [t for t in TICKS if low <= t <= high])
    ax.set_xlim(low, high)


TRIED = {
    "larger batch",
    "half precision",
    "single precision",
    "fused optimizer",
    "fewer threads",
    "compiled",
}
"""Counterfactuals that are trials of one setting, not bounds of all that could be gained there."""


def _most(at_most: Mapping[str, Estimate]) -> str:
    sure = [name for name, e in at_most.items() if e.low > 1 and name not in TRIED]
    if tried := [name for name, e in at_most.items() if e.low > 1 and name in TRIED] if not sure else []:
        return f"{tried[0].capitalize()}: as tried {at_most[tried[0]].value:.2f} x; of nothing else a gain is shown"
    if not sure:
        return "All intervals hold 1: this run was too noisy to tell what would help"
    first, others = at_most[sure[0]], [e for name, e in at_most.items() if name not in {sure[0], *TRIED}]
    alone = all(first.low > e.high for e in others)
    told = "" if alone else "; which bound is largest, this run cannot tell"
    return f"{sure[0].capitalize()}: estimated gain {first.value:.2f} x{told}"


def _kept(bound: Estimate | None, given: Mapping[str, Estimate]) -> str:
    best = max(given, key=lambda name: given[name].value)
    text = f"{best.removeprefix('cure: ').capitalize()}: {given[best].value:.2f} x"
    return f"{text}, estimated {bound.value:.2f} x" if bound else text


def _said(bound: Estimate | None, given: Mapping[str, Estimate]) -> list[str]:
    """How each cure stands to what was promised, as far as the intervals can tell."""
    lines = []
    for name, gain in given.items() if bound else ():
        if bound.low <= 1:
            how = "but this estimate is too wide to be tested"
        elif gain.low > bound.high:
            how = "more than estimated: perhaps it fixes something else as well"
        elif gain.high < bound.low:
            how = "less than estimated: perhaps this fix leaves some of it, or costs something itself"
        else:
            how = "which this run can't tell from the estimate"
        lines.append(f"{name.removeprefix('cure: ').capitalize()}: {gain}, {how}.")
    return lines


# Two ranks


def late(found: Report, guess: Prediction | None = None) -> None:
    """`step`, and how long rank 0 would need without waiting; `guess`: that share of its step, %."""
    step(found)
    facts = found.seen
    if len(facts) < 2:
        say("* One rank has nobody to wait for.")
        return
    own_ms = {f.rank: 1e3 * estimated_gain.part_s(f, *(k for k in KINDS if k not in WAITS)) for f in facts}
    mean_ms = {f.rank: 1e3 * sum(f.step_s) / len(f.step_s) for f in facts}
    first = min(own_ms, key=lambda rank: own_ms[rank])
    last = max(own_ms, key=lambda rank: own_ms[rank])
    waits = 100 * min(1.0, (own_ms[last] - own_ms[first]) / mean_ms[first])
    say(
        f"* Outside of backward and exchange, rank {first} needs {own_ms[first]:.1f} ms and rank {last} "
        f"{own_ms[last]:.1f} ms. So about {waits:.0f} % of rank {first}'s step is a wait for rank {last}."
    )
    if guess is not None:
        say(f"* {guess.against(waits)}")
    for finding in found.findings:
        if finding.name in ("straggler", "exchange"):
            say(f"* What the doctor says: {finding.what[:1].upper()}{finding.what[1:]}.")
