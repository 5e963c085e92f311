"""Figures and sentences of notebook 01 about timing itself; those about the batch are in figures_batch."""

from __future__ import annotations

import itertools
import math
import statistics

from labs import measure_validation, timing
from labs.common.sources import on_gpus
from labs.kit.check import Prediction
from labs.kit.claims import model_of, within
from labs.kit.display import say
from labs.kit.evidence import launches
from labs.kit.measure import Estimate, differs, estimate, paired_ratio, steady_from
from labs.kit.plot import SERIES, bars, curve, figure, log_axes, points, prediction, show
from labs.kit.record import Records

RUNGS = {
    "as printed": "as printed",
    "data outside": "+ data made outside",
    "synchronise": "+ wait for the device",
    "warm up": "+ warm up first",
    "median of steps": "+ median of the steps",
}
SMALLEST = 2.0**-6
"""Below, an answer over the truth is drawn at the edge of the figure."""


def ladder(runs: dict[str, Records], guess: Prediction) -> None:
    """Figure: the answer of the article's loop, fault by fault, over the answer of the repaired one."""
    found = {model: {r: run.one("answer_s", rung=r).samples for r in RUNGS} for model, run in runs.items()}
    kind = next(iter(runs.values())).one("answer_s", rung="as printed").kind
    last = list(RUNGS)[-1]
    ratios = {m: [paired_ratio(a[r], a[last]) for r in RUNGS] for m, a in found.items()}
    first, (printed, early, *_) = next(iter(ratios.items()))
    message = f"{first}: the loop as printed {_says(printed)}; with its data outside it {_says(early)}"
    queue = ", emulated queue" if kind == "modelled" else ""
    fig, ax = figure(
        message,
        xlabel=f"answer / repaired answer (x{queue})",
        ylabel="benchmark",
        records=[r for run in runs.values() for r in run],
        legend_below=True,
    )
    for k, (model, values) in enumerate(ratios.items()):
        inside = [e if e.value >= SMALLEST else None for e in values]
        bars(ax, list(RUNGS.values()), inside, label=model, kind=kind, color=SERIES[k])
        for row, e in enumerate(values):
            if kind == "modelled" and e.value >= SMALLEST:  # where its interval lies around, and the row of 1 by itself
                ax.plot([e.value], [row], "|", color=SERIES[k], markersize=14, markeredgewidth=3, gid=f"kind:{kind}")
            if e.value < SMALLEST:
                ax.annotate(
                    f"◄ {model}: {_times(e)}", (SMALLEST, row + 0.25 * (2 * k - 1)), color=SERIES[k], va="center"
                )
    prediction(ax, float(guess), 0, label=first)
    ax.axvline(1, linestyle=":", color="black")
    ends = [
        SMALLEST,
        float(guess),
        *(max(v, SMALLEST) for values in ratios.values() for e in values for v in (e.low, e.high)),
    ]
    log_axes(ax, [2.0**k for k in _octaves([v for v in ends if v > 0])])
    show(fig, alt=f"{message}. " + "; ".join(f"{m}: {', '.join(map(str, v))}" for m, v in ratios.items()))
    lines = [_repairs(model, answers) for model, answers in found.items()]
    said = f"{first}, as printed: {printed}. {guess.against(printed, kind)}"
    say("\n".join(f"* {line}" for line in [*lines, said]))


def _times(ratio: Estimate) -> str:
    return f"{float(f'{ratio.value:.2g}'):g} times the truth" if ratio.value >= SMALLEST else "next to nothing"


def _says(ratio: Estimate) -> str:
    """What a benchmark says of the time of a step, beside the repaired one."""
    return f"says {_times(ratio)}" if differs(ratio) else "is not shown to be wrong"


def hidden_waits(run: Records) -> None:
    """What share of a loop's time a clock sees that is read without a wait, by what each step of the loop does."""
    say(_waits_table(run))


def recorded_waits() -> None:
    """The same table of each model that was tried on a recorded GPU."""
    found = on_gpus.of_claims("01", "timing")
    on_gpus.told(
        [run for of_machine in found for run in launches(of_machine)],
        lambda run: f"{model_of(run)}\n\n{_waits_table(run)}",
    )


def _waits_table(run: Records) -> str:
    rows, lines = run.where("seen_share"), []
    for r in rows:
        share = estimate(r.samples).scaled(100, "%")
        word = "nearly all" if share.low > 95 else "most" if share.low > 50 else "little" if share.high < 10 else "some"
        waits = "waits for the queue" if r.case["waits"] else "waits for nothing"
        lines.append(f"| `{r.case['way']}` | {waits} | {share} | {word} |")
    where = "on the emulated queue" if rows[0].kind == "modelled" else "on a GPU"
    steps = rows[0].case["steps"]
    return "\n".join(
        [
            "| in every step | by its documentation | the clock sees | of the work |",
            "| --- | --- | --- | --- |",
            *lines,
            "",
            f"Loops of {steps} steps with {rows[0].case['batch']} samples each, {where}. {_copy_text(run)}",
        ]
    )


def _copy_text(run: Records) -> str:
    """Whether a blocking copy hides all but the last step, as it would if it waited for the steps before it."""
    record = run.one("seen_share", way="x.to(device)")
    share, steps = estimate(record.samples).scaled(100, "%"), record.case["steps"]
    free = estimate(run.one("seen_share", way="data on the device").samples).scaled(100, "%")
    if free.high >= share.low:
        return "Here the work is done when the last launch is: launching takes as long, a missing wait changes little."
    wanted, near = 100 - (100 - free.value) / steps, 100 / steps / 3  # it sees the launches of the last step as well
    if share.low - near <= wanted <= share.high + near:
        launches = f" (its launches are seen: {wanted:.0f} %)" if free.low > 5 else ""
        return (
            f"With blocking copies the clock sees {share}: all but the last of {steps} steps{launches}; "
            "no copy waits for it."
        )
    return f"With blocking copies the clock sees {share}, and not {wanted:.0f} %, all but the last of {steps} steps."


def _octaves(values: list[float]) -> range:
    """Exponents of the powers of two that enclose positive `values`, every second one over a wide range."""
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    return range(low, high + 1, 2 if high - low > 6 else 1)


def _ticks(values: list[float]) -> list[float]:
    """Ticks of a logarithmic axis around positive `values`: round numbers over a short range, else powers of two."""
    low, high = min(values), max(values)
    if high / low > 16:
        return [2.0**k for k in _octaves(values)]
    round_ones = [
        f * 10.0**k
        for k in range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
        for f in (1, 1.5, 2, 3, 4, 5, 7)
    ]
    first = max(t for t in round_ones if t <= low)
    last = min((t for t in round_ones if t >= high), default=high)
    return [t for t in round_ones if first <= t <= last]


def _repairs(model: str, answers: dict[str, tuple[float, ...]]) -> str:
    """How the repairs moved the answer, run by run. The second is half of a repair: it takes a hidden wait away."""
    printed, early, *rest = (RUNGS[r] for r in RUNGS)
    first, second, *others = answers.values()
    said = [f"{early}: {paired_ratio(second, first)}"]
    for what, before, after in zip(rest, [first, *others], others, strict=False):
        ratio = paired_ratio(after, before)
        against = f" of what the loop {printed} says" if before is first else ""
        said.append(f"{what}: {f'{ratio}{against}' if differs(ratio) else 'no change that these runs can show'}")
    ends = (estimate(answers[r], "s") for r in (next(iter(RUNGS)), list(RUNGS)[-1]))
    return "**{}**: printed {}, repaired {}. {}.".format(model, *ends, "; ".join(said))


def trace(run: Records) -> None:
    """Figure: every step of the warm-up and every timed step, in order, with what is reported of them."""
    warm = [s * 1e3 for s in run.one("warm_up_s").samples]
    timed = run.one("step_s", mode="train")
    steps, middle = [s * 1e3 for s in timed.samples], estimate(timed.samples, "s")
    message = (
        f"The first step took {warm[0] / middle.value / 1e3:.1f} times the median; {_drift_text(timed.samples)[0]}"
    )
    what = "DDP step" if timed.layout["world_size"] > 1 else "step"
    fig, ax = figure(message, xlabel="step, in order", ylabel=f"time of a {what} (ms)", records=run)
    points(ax, range(1, len(warm) + 1), warm, label="warm-up", color=SERIES[1])
    after = range(len(warm) + 1, len(warm) + len(steps) + 1)
    points(ax, after, steps, label="timed", color=SERIES[0])
    ax.axvline(len(warm) + 0.5, linestyle=":", color="black")
    curve(ax, [after[0], after[-1]], [middle.value * 1e3] * 2, kind="measured", label="median", color="black")
    ax.set_yscale("log")
    log_axes(ax, None, _ticks([*warm, *steps]))
    show(fig, alt=f"{message}. Warm-up: {len(warm)} steps; timed: {len(steps)}, median {middle}.")
    say(_trace_text(run, middle))


def _drift_text(samples: tuple[float, ...]) -> tuple[str, str]:
    """Whether the timed part was steady, in few words and in a sentence."""
    found = timing.drift(samples)
    if found is None:
        return "too few steps to see a drift", f"{len(samples)} steps are too few to see whether the timed part drifts."
    later = f"The later half of the timed steps took {found} as long as the earlier half"
    if not differs(found):
        return "no drift to be seen", f"{later}: no drift that this run can show."
    if within(found):
        return "the rest drifts by less than 5 %", f"{later}: a drift, but a small one."
    return "the timed part drifts", (
        f"{later}: **the timed part was not steady**, whatever the detector said. The median mixes speeds, and its "
        "interval, which takes steps for independent, is too narrow. Time longer, or compare in pairs only."
    )


def _trace_text(run: Records, middle: Estimate) -> str:
    length, timed = run.one("warm_up_steps"), run.one("step_s", mode="train")
    warm, samples = run.one("warm_up_s").samples, timed.samples
    settled = f"says steady after {length.value:.0f} steps" if length.case["settled"] else "never called it steady"
    since = steady_from(warm)
    looked = f" (looking back, from step {since + 1} on)" if since is not None else ""
    mean = statistics.fmean(samples) / middle.value - 1
    apart = "no more than 1 % away from it" if abs(mean) <= 0.01 else f"{mean:+.1%} away from it"
    return (
        f"* The detector {settled}{looked}. {_drift_text(samples)[1]}\n"
        f"* Median {middle}; mean {apart}; slowest step {max(samples) / middle.value:.1f} times the median.\n"
        f"* {_ranks_text(run)}\n"
        f"* {_step_text(run)}"
    )


def _step_text(run: Records) -> str:
    """What "a step" is in this lab, and how it compares with the step of the benchmark loop."""
    timed = run.one("step_s", mode="train")
    if timed.layout["world_size"] == 1:
        return "A step is forward, backward and optimizer on one device."
    alone = run.one("step_s", mode="no_sync")
    more = paired_ratio(timed.samples, alone.samples)
    cost = f"takes {more} as long as without" if differs(more) else f"is not shown to take longer than without ({more})"
    loop = run.where("answer_s", rung="median of steps")
    other = (
        f" The loop above timed one device alone, without DDP: {estimate(loop[0].samples, 's')}." if len(loop) else ""
    )
    return f"A step here is one of DDP: with the exchange of gradients it {cost}.{other}"


def _ranks_text(run: Records) -> str:
    ranks = run.where("rank_step_s")
    if len(ranks) < 2:
        return "One rank: it is the job."
    own = ", ".join(f"rank {r.layout['rank']} {estimate(r.samples, 's')}" for r in ranks)
    job = estimate(run.one("step_s", mode="train").samples, "s")
    return f"{own}; the job, whose every step ends with its slowest rank: {job}. Only the last one is the result."


ORDERS = {"one after the other": "blocked (AAAABBBB)", "in turn": "interleaved (ABBA)"}


def neighbour(run: Records, guess: Prediction) -> None:
    """Figure: the ratio B / A of one and the same function, when a neighbour moves in halfway."""
    sides = {o: [run.one("step_s", part="neighbour", order=o, side=s).samples for s in "BA"] for o in ORDERS}
    ratios = {o: paired_ratio(*s) for o, s in sides.items()}
    blocked, fair = ratios.values()
    message = f"The same code, {blocked.value:.2g} times as slow: all of A first, then all of B"
    if not differs(blocked):
        message = "All of A first, then all of B: the neighbour is not seen this time"
    fig, ax = figure(
        message,
        xlabel="time of B / time of A (x); A and B are the same function",
        ylabel="order",
        records=run,
        size=(7.0, 3.0),
    )
    bars(ax, list(ORDERS.values()), list(ratios.values()))
    prediction(ax, float(guess), 0)
    ax.axvline(1, linestyle=":", color="black")
    ax.set_xlim(left=0)
    show(fig, alt=f"{message}: {blocked}; in turn: {fair}. The truth is 1.")
    end = "finds a difference that is not there: one interval in twenty does"
    if not differs(fair):
        end = (
            "finds no difference, as there is none: the two runs of a pair follow each other, nearly always with "
            "the same neighbour"
        )
    say(
        f"Blocked: {blocked}, though A and B are one function. {guess.against(blocked)} Interleaved: {fair}, which "
        f"{end}."
    )


PAIRS = (6, 10, 20, 40)  # 5 support no interval of 95 %


def power(run: Records, guess: Prediction, wanted: float = 0.05) -> None:
    """Figure: how often n pairs find a planted slowdown, and how often they find one that is not there."""
    table = measure_validation.power(run, PAIRS)
    arms = list(dict.fromkeys(row["arm"] for row in table))
    need = enough(table, wanted)
    of = f"a slowdown of {100 * wanted:.0f} % here"
    message = f"{need} pairs find {of}" if need else f"Even 40 pairs do not always find {of}"
    fig, ax = figure(
        message, xlabel="pairs compared", ylabel="share of comparisons\nthat report a slowdown", records=run
    )
    for arm in arms:
        rows = [r for r in table if r["arm"] == arm]
        label = "the same code, any difference" if arm == "A again" else f"{arm} work"
        points(ax, [r["pairs"] for r in rows], [r["share"] for r in rows], label=label, line=True)
    prediction(ax, min(max(float(guess), 4), 50), 0.9)
    log_axes(ax, PAIRS)
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
        f"* By the shares found, whose intervals the figure draws, a difference of 5 % needs "
        f"{need or 'more than 40'} pairs to be found nine times in ten on this machine, at "
        f"this hour.{said} {_growth_text(table)}"
    )


def _growth_text(table: list[dict]) -> str:
    """How many pairs each planted slowdown needed, beside the square law."""
    sizes = sorted({row["slower"] for row in table if row["slower"] > 0}, reverse=True)
    most = max(row["pairs"] for row in table)
    needs = {slower: enough(table, slower) for slower in sizes}
    told = ", ".join(f"{100 * s:.0f} %: {n or f'more than {most}'}" for s, n in needs.items())
    law = "For normal noise, half the difference needs four times the pairs"
    (large, few), (small, many) = next(iter(needs.items())), list(needs.items())[-1]
    if not few or not many or few == min(row["pairs"] for row in table):
        return f"Pairs needed, of the numbers tried: {told}. {law}; these few numbers of pairs cannot test that."
    factors = f"that is {(large / small) ** 2:.0f} times, and here {many / few:.0f}"
    return (
        f"Pairs needed, of the numbers tried: {told}. {law}: from {100 * large:.0f} to {100 * small:.0f} % {factors}."
    )
