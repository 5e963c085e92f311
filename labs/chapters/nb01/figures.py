"""Figures and sentences of notebook 01 about timing itself; those about the batch are in nb01_batch."""

from __future__ import annotations

import itertools
import math
import statistics

import pandas

from labs import measure_validation, timing
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import Estimate, differs, estimate, paired_ratio, steady_from
from labs.kit.plot import SERIES, bars, curve, figure, log_axes, points, prediction, show
from labs.kit.record import Records

RUNGS = {
    "as printed": "as printed",
    "synchronise": "+ wait for the device",
    "warm up": "+ warm up first",
    "data outside": "+ data made outside",
    "median of steps": "+ median of the steps",
}


def ladder(runs: dict[str, Records], guess: Prediction) -> None:
    """Figure: the answer of the article's loop, fault by fault, over the answer of the repaired one."""
    found = {model: {r: run.one("answer_s", rung=r).samples for r in RUNGS} for model, run in runs.items()}
    last = list(RUNGS)[-1]
    ratios = {m: [paired_ratio(a[r], a[last]) for r in RUNGS] for m, a in found.items()}
    first, printed = next((m, r[0]) for m, r in ratios.items())
    message = f"The loop as printed reports {printed.value:.0%} of what a step of the {first} takes"
    fig, ax = figure(message, xlabel="answer over that of the repaired benchmark (x)", ylabel="benchmark",
                     records=[r for run in runs.values() for r in run], legend_below=True)  # fmt: skip
    for model, values in ratios.items():
        bars(ax, list(RUNGS.values()), values, label=model)
    prediction(ax, float(guess), 0, label=first)
    ax.axvline(1, linestyle=":", color="black")
    ends = [float(guess), *(v for values in ratios.values() for e in values for v in (e.low, e.high))]
    log_axes(ax, [2.0**k for k in _octaves([v for v in ends if v > 0])])
    show(fig, alt=f"{message}. " + "; ".join(f"{m}: {', '.join(map(str, v))}" for m, v in ratios.items()))
    lines = [_repairs(model, answers) for model, answers in found.items()]
    say("\n".join(f"* {line}" for line in [*lines, f"{first}, as printed: {printed}. {guess.against(printed)}"]))


def _octaves(values: list[float]) -> range:
    """Exponents of the powers of two that enclose positive `values`, every second one over a wide range."""
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    return range(low, high + 1, 2 if high - low > 6 else 1)


def _ticks(values: list[float]) -> list[float]:
    """Ticks of a logarithmic axis around positive `values`: round numbers over a short range, else powers of two."""
    low, high = min(values), max(values)
    if high / low > 16:
        return [2.0**k for k in _octaves(values)]
    round_ones = [f * 10.0**k for k in range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
                  for f in (1, 1.5, 2, 3, 4, 5, 7)]  # fmt: skip
    first = max(t for t in round_ones if t <= low)
    last = min((t for t in round_ones if t >= high), default=high)
    return [t for t in round_ones if first <= t <= last]


def _repairs(model: str, answers: dict[str, tuple[float, ...]]) -> str:
    """How each repair moved the answer, run by run."""
    said = []
    for before, after in itertools.pairwise(RUNGS):
        ratio = paired_ratio(answers[after], answers[before])
        said.append(f"{RUNGS[after]}: {ratio if differs(ratio) else 'no change that these runs can show'}")
    first, last = (estimate(answers[r], "s") for r in (next(iter(RUNGS)), list(RUNGS)[-1]))
    return f"**{model}**: printed {first}, repaired {last}. {'; '.join(said)}."


def trace(run: Records) -> None:
    """Figure: every step of the warm-up and every timed step, in order, with what is reported of them."""
    warm = [s * 1e3 for s in run.one("warm_up_s").samples]
    timed = run.one("step_s", mode="train")
    steps, middle = [s * 1e3 for s in timed.samples], estimate(timed.samples, "s")
    message = f"The first step took {warm[0] / middle.value / 1e3:.1f} times the median; none of the warm-up counts"
    fig, ax = figure(message, xlabel="step, in order", ylabel="step time (ms)", records=run)
    points(ax, range(1, len(warm) + 1), warm, label="warm-up", color=SERIES[1])
    after = range(len(warm) + 1, len(warm) + len(steps) + 1)
    points(ax, after, steps, label="timed", color=SERIES[0])
    ax.axvline(len(warm) + 0.5, linestyle=":", color="black")
    curve(ax, [after[0], after[-1]], [middle.value * 1e3] * 2, kind="measured", label="median", color="black")
    ax.set_yscale("log")
    log_axes(ax, None, _ticks([*warm, *steps]))
    show(fig, alt=f"{message}. Warm-up: {len(warm)} steps; timed: {len(steps)}, median {middle}.")
    say(_trace_text(run, middle))


def _trace_text(run: Records, middle: Estimate) -> str:
    length = run.one("warm_up_steps")
    warm, samples = run.one("warm_up_s").samples, run.one("step_s", mode="train").samples
    settled = f"says steady after {length.value:.0f} steps" if length.case["settled"] else "never called it steady"
    since = steady_from(warm)
    looked = f" (looking back, from step {since + 1} on)" if since is not None else ""
    mean = Estimate(statistics.fmean(samples), middle.low, middle.high, middle.n, "s")
    return (
        f"* The detector {settled}{looked}.\n"
        f"* Median {middle}; mean {mean.value / middle.value - 1:+.1%} away from it, slowest step "
        f"{max(samples) / middle.value:.1f} times it: interruptions only ever add time, so the mean follows them.\n"
        f"* {_ranks_text(run)}"
    )


def _ranks_text(run: Records) -> str:
    ranks = run.where("rank_step_s")
    if len(ranks) < 2:
        return "One rank: it is the job."
    own = ", ".join(f"rank {r.layout['rank']} {estimate(r.samples, 's')}" for r in ranks)
    job = estimate(run.one("step_s", mode="train").samples, "s")
    return f"{own}; the job, whose every step ends with its slowest rank: {job}. Only the last one is the result."


MEANINGS = {
    "step_s": "one step of the job: its slowest rank", "samples_per_s": "throughput of all ranks",
    "mfu": "model FLOP utilisation, as a share", "sync_s": "what synchronising gradients adds to a step",
    "sync_share": "the same, as a share of the step", "iqr_share": "spread: middle half of the steps over the median",
    "p95_ratio": "5 % of the steps take longer than this times the median",
    "warm_up": "when the detector called it steady",
}  # fmt: skip


def report(run: Records) -> pandas.DataFrame:
    """What `python -m labs.timing` says about a model: one row per quantity, with its meaning."""
    rows = {k: {run[0].config["model"]: str(v), "what it is": MEANINGS.get(k, "")}
            for k, v in timing.report(run).items()}  # fmt: skip
    return pandas.DataFrame(rows).T


ORDERS = ("one after the other", "in turn")


def neighbour(run: Records, guess: Prediction) -> None:
    """Figure: the ratio B / A of one and the same function, when a neighbour moves in halfway."""
    sides = {o: [run.one("step_s", part="neighbour", order=o, side=s).samples for s in "BA"] for o in ORDERS}
    ratios = {o: paired_ratio(*s) for o, s in sides.items()}
    blocked = ratios[ORDERS[0]]
    message = f"The same code, {blocked.value:.2g} times as slow: all of A first, then all of B"
    fig, ax = figure(message, xlabel="time of B / time of A (x); A and B are the same function", ylabel="order",
                     records=run, size=(7.0, 3.0))  # fmt: skip
    bars(ax, list(ORDERS), list(ratios.values()))
    prediction(ax, float(guess), 0)
    ax.axvline(1, linestyle=":", color="black")
    ax.set_xlim(left=0)
    show(fig, alt=f"{message}: {blocked}; in turn: {ratios[ORDERS[1]]}. The truth is 1.")
    fair = ratios[ORDERS[1]]
    end = "finds a difference, by bad luck" if differs(fair) else "finds no difference, as there is none"
    say(
        f"One after the other: {blocked}, though only the hour differs. {guess.against(blocked)} In turn: {fair}, "
        f"which {end}: the neighbour slows down both halves of every pair."
    )


def power(run: Records, guess: Prediction, wanted: float = 0.05) -> None:
    """Figure: how often n pairs find a planted slowdown, and how often they find one that is not there."""
    table = measure_validation.power(run, (5, 10, 20, 40))
    arms = list(dict.fromkeys(row["arm"] for row in table))
    need = enough(table, wanted)
    of = f"a slowdown of {100 * wanted:.0f} % here"
    message = f"{need} pairs find {of}" if need else f"Even 40 pairs do not always find {of}"
    fig, ax = figure(
        message, xlabel="pairs compared", ylabel="share of comparisons\nthat report a difference", records=run
    )
    for arm in arms:
        rows = [r for r in table if r["arm"] == arm]
        label = "the same code again" if arm == "A again" else f"{arm} work"
        points(ax, [r["pairs"] for r in rows], [r["share"] for r in rows], label=label, line=True)
    prediction(ax, min(max(float(guess), 4), 50), 0.9)
    log_axes(ax, (5, 10, 20, 40))
    ax.set_ylim(-0.03, 1.05)
    show(fig, alt=f"{message}. " + "; ".join(f"{r['arm']}, {r['pairs']} pairs: {r['share'].value:.0%}" for r in table))
    return say(_power_text(run, table, guess, need))


def enough(table: list[dict], slower: float, share: float = 0.9) -> int | None:
    """The fewest pairs from which on at least `share` of the comparisons found this slowdown; None if none did."""
    rows = sorted((r for r in table if abs(r["slower"] - slower) < 1e-9), key=lambda r: r["pairs"])
    good = list(itertools.takewhile(lambda r: r["share"].value >= share, reversed(rows)))
    return good[-1]["pairs"] if good else None


def _power_text(run: Records, table: list, guess: Prediction, need: int | None) -> str:
    same = run.one("intervals_with_1", arm="A again")
    found = run.one("slowdowns_found", arm="+10 %")
    n, pairs = same.case["repetitions"], same.case["pairs"]
    said = f" {guess.against(float(need))}" if need else ""
    return (
        f"* {n} comparisons of {pairs} pairs each. The same code against itself: in {same.value:.0f} the interval holds"
        f" 1, as {n * 0.95:.0f} should. With a tenth more work: {found.value:.0f} find it.\n"
        f"* A difference of 5 % needs {need or 'more than 40'} pairs to be found nine times in ten on this machine, at "
        f"this hour.{said} Half the difference needs about four times the pairs."
    )


def trust(run: Records) -> None:
    """What a measurement by the kit costs, and whether torch's own timer agrees with it."""
    cost = run.one("overhead")
    lines = [f"* Reading the clock around every step of {cost.case['step_ms']:g} ms adds "
             f"{estimate([100 * s for s in cost.samples], '%')}."]  # fmt: skip
    rows = run.where("step_s", part="timer", by="kit.measure")
    for r in rows:
        other = run.one("step_s", part="timer", by="torch Timer", function=r.case["function"])
        lines.append(f"* {r.case['function']}: kit.measure / torch Timer = {paired_ratio(r.samples, other.samples)}.")
    say("\n".join(lines))
