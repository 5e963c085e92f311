"""Figures and sentences of notebook 09 on torch.compile: when it has paid, what it fuses, what makes it start again."""

from __future__ import annotations

import math
from collections import Counter

import pandas

from labs import compiled_step
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import estimate, verdict
from labs.kit.plot import BLUE, GREEN, VERMILION, curve, figure, points, prediction, show
from labs.kit.record import Records

CACHES = {"empty": "cache empty", "full": "cache full, same process"}


def break_even(run: Records, guess: Prediction) -> None:
    """Seconds of a training against its steps, eager and compiled; the crossings are where compiling has paid."""
    if refused := run.where("not_possible"):
        say(f"Not measured here: {refused[0].case['why']}. Graph breaks and recompiles below need no compiler.")
        return
    found = {cache: compiled_step.break_even(run, cache) for cache in CACHES}
    start = {cache: compiled_step.startup_s(run, cache) for cache in CACHES}
    eager = estimate(run.one("step_s", way="eager").samples).value
    compiled = eager * compiled_step.gain(run).value  # as break_even does: steps that took turns
    pays = {cache: e for cache, e in found.items() if math.isfinite(e.high)}
    last = 1.6 * (found["empty"].value if "empty" in pays else start["empty"] / eager)
    message = f"With an empty cache, compiling has paid after {compiled_step.in_steps(found['empty'])}"
    if "empty" not in pays:
        message = "No number of steps is shown after which compiling has paid"
    fig, ax = figure(message, xlabel="steps", ylabel="time since the start (s)", records=run, legend_below=True)
    curve(ax, [0, last], [0, last * eager], label="eager", color=BLUE)
    for cache, color in zip(CACHES, (VERMILION, GREEN), strict=True):
        y = [start[cache], start[cache] + last * compiled]
        curve(ax, [0, last], y, label=f"compiled, {CACHES[cache]}", color=color)
        points(ax, [0], [start[cache]], label="start-up" if cache == "empty" else "_", color=color)
        if cache in pays:
            steps = found[cache].value
            ax.plot([steps], [steps * eager], marker="o", markersize=11, markerfacecolor="none", color="black")
            low = cache == "full"  # near the origin, where there is room to the right only
            ax.annotate(
                f"paid, {CACHES[cache].split(',')[0]}",
                (steps, steps * eager),
                fontsize=9,
                va="center",
                xytext=(10, -3) if low else (-8, 16),
                textcoords="offset points",
                ha="left" if low else "right",
            )
    ax.set_xlim(-0.02 * last, last)
    ax.xaxis.set_major_formatter(lambda steps, _: f"{steps:,.0f}")
    ax.set_ylim(bottom=0)
    if guess == guess and 0 <= float(guess) <= last:
        prediction(ax, float(guess), float(guess) * eager)
    told = "; ".join(f"{CACHES[c]}: {compiled_step.in_steps(e)}" for c, e in found.items())
    show(
        fig,
        alt=f"{message}. Lines of equal slope follow from measured start-up and step times. Break-even with {told}.",
    )
    say("\n".join(f"* {line}" for line in _break_even_text(run, guess)))


def _break_even_text(run: Records, guess: Prediction) -> list[str]:
    start = {cache: compiled_step.startup_s(run, cache) for cache in CACHES}
    empty = compiled_step.break_even(run)
    backend = run.one("step_s", way="compiled").case["backend"]
    full = compiled_step.in_steps(compiled_step.break_even(run, "full"))
    eager = 1e3 * estimate(run.one("step_s", way="eager").samples).value
    compiled = eager * compiled_step.gain(run).value
    lines = [
        f"On this CPU, for this block: t_eager {eager:.2f} ms, t_compiled {compiled:.2f} ms (by the ratio below), "
        f"T_start {start['empty']:.1f} s with an empty cache.",
        verdict(compiled_step.gain(run), f"A compiled step ({backend}) against an eager one, in turn") + ".",
        f"Start-up takes {start['empty']:.1f} s with an empty cache and {start['full']:.1f} s with a full one in "
        f"the same process, each taken once; {run.one('import_s').value:.1f} s of both are the import of the "
        "compiler. What a new process takes with a full cache was not measured.",
        f"Break-even with a full cache: {full}. Intervals are of the steps, not of the start-up.",
    ]
    if guess == guess and math.isfinite(empty.high):
        inside = empty.low <= float(guess) <= empty.high
        lines.append(
            f"You predicted {float(guess):,.0f} steps with an empty cache, "
            f"{'inside' if inside else 'outside'} of the interval."
        )
    error = run.one("gradient_error").value
    lines.append(f"Largest difference of a gradient: {error:.0e} of the largest gradient.")
    return lines


def fused(run: Records) -> None:
    """What became of the operations of a step, in sentences."""
    kernels = {r.case["way"]: r for r in run.where("kernels")}
    if "compiled" not in kernels:
        say("Nothing was compiled to machine code in this run, so there are no kernels to count.")
        return
    names = Counter(
        "fused loops" if n.startswith(("cpp_fused", "triton_")) else "calls of a library (matrix products)"
        for n in kernels["compiled"].case["names"]
    )
    longest = max(kernels["compiled"].case["names"], key=len)
    what = " and ".join(f"{n} {name}" for name, n in names.items())
    say(
        f"In forward and backward of the model, {kernels['eager'].value:.0f} operations of torch became "
        f"{kernels['compiled'].value:.0f} kernels: {what}. The loss is not compiled. "
        f"The name of a loop lists what is in it, for example `{longest}`."
    )


def habits(run: Records) -> pandas.DataFrame:
    """Graph breaks of four small functions, and dynamo's reason."""
    rows = {
        r.case["habit"]: {
            "graphs": str(int(r.case["graphs"])),
            "breaks": f"{r.value:.0f}",
            "reason that dynamo gives": "; ".join(r.case["why"]) or "none",
        }
        for r in run.where("graph_breaks")
    }
    table = pandas.DataFrame(rows).T
    table.columns.name = "counted"
    return table


ASKED = {"auto": "as it comes", "static": "dynamic=False", "dynamic": "dynamic=True"}


def recompiles(run: Records, guess: Prediction) -> None:
    """Compilations so far, after a step of each new batch size; `guess`: their number with dynamic=False."""
    made = {r.case["dynamic"]: r.samples for r in run.where("graphs")}
    shapes = len(made["static"])
    counts = ", ".join(f"{made[k][-1]:.0f} {ASKED[k]}" for k in made)
    message = f"Compilations for {shapes} batch sizes: {counts}"
    fig, ax = figure(
        message,
        xlabel="different batch sizes so far",
        ylabel="compilations so far",
        records=run,
        size=(7.0, 3.2),
        legend_below=True,
    )
    for k, samples in made.items():
        points(ax, range(1, shapes + 1), samples, label=ASKED[k], line=True)
    prediction(ax, shapes, guess)
    ax.set_ylim(bottom=0)
    show(fig, alt=f"{message}. Compilations are counted after a step of each batch size.")
    lines = [guess.against(made["static"][-1])] if guess == guess else []
    if made["static"][-1] < shapes:
        limit = made["static"][-1]
        lines.append(
            f"With `dynamic=False` torch gave up after {limit:.0f} compilations: later sizes ran eagerly, "
            "with a warning in the log (`recompile_limit` in dynamo's config)."
        )
    if lines:
        say("\n".join(f"* {line}" for line in lines))
