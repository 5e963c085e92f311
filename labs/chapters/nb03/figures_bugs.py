"""Figures and sentences of notebook 03 on silent bugs, and on gradient accumulation done right and wrong."""

from __future__ import annotations

import pandas

from labs.chapters.nb03.figures import ranks_of
from labs.gradient_accumulation import SAME, SPREAD
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import differs, estimate, paired_ratio
from labs.kit.plot import bars, figure, show
from labs.kit.record import Records


def bug_table(run: Records) -> pandas.DataFrame:
    """What each bug looks like from outside. Deterministic: counts of steps and images, not times."""

    def at(metric: str, case: str) -> float:
        return run.one(metric, case=case).value

    rows = [
        {
            "case": case,
            "steps per epoch": int(at("steps_per_epoch", case)),
            "images seen": f"{at('distinct_share', case):.0%}",
            "repeated": f"{at('repeated_share', case):.0%}",
            "next epoch": "same order" if at("same_order_next_epoch", case) else "new order",
            "replicas": "differ" if at("parameter_spread", case) > 0 else "equal",
        }
        for case in dict.fromkeys(r.case["case"] for r in run.where("loss"))
    ]
    return pandas.DataFrame(rows).set_index("case")


def errors_raised(run: Records) -> None:
    """The bugs that do raise, in torch's own words."""
    for r in run.where("raised"):
        case = {k: v for k, v in r.case.items() if k != "error"}
        error = "no error" if r.case["error"] == "none" else r.case["error"]
        print(", ".join(f"{v}" if k == "case" else f"{k}={v}" for k, v in case.items()), "->", error)


def seen_text(run: Records, guess: Prediction) -> None:
    """The share of the images that an epoch shows when ranks shuffle on their own. Deterministic."""
    n, seen = ranks_of(run), 100 * run.one("distinct_share", case="sampler_seed_per_rank").value
    print(
        f"A sampler seed per rank, {n} ranks: {seen:.0f} % of the images are seen, 1 - (1 - 1/n)^n = "
        f"{100 * (1 - (1 - 1 / n) ** n):.0f} % are expected. {guess.against(seen)}"
    )


def saving_text(run: Records) -> None:
    """How often a checkpoint was unreadable right after it was saved, by who writes."""
    lines, worst = [], 0.0
    for r in run.where("damaged_share"):
        writers = run.one("writers", case="every_rank_saves", guarded=r.case["guarded"]).value
        who = "rank 0 alone saves" if r.case["guarded"] else f"all {writers:.0f} ranks save"
        lines.append(f"* {who}: after {r.value:.0%} of the saves a rank that had just written found a broken file")
        worst = max(worst, 0.0 if r.case["guarded"] else r.value)
    end = (
        "None was broken this time, which does not show that none ever is. One rank saves all the same."
        if worst == 0
        else "So one rank saves."
    )
    say("\n".join(lines) + f"\n\n{end} The others wait only if they read the file next.")


SAID = {
    "whole_batch": "one forward with everything",
    "no_sync": "right: the last backward alone synchronises",
    "sync_every": "without no_sync",
    "forward_outside": "no_sync around backward only",
    "loss_not_divided": "loss not divided by the number of micro-batches",
    "mean_of_means": "unequal micro-batches weighed equally",
    "last_in_no_sync": "the last one inside no_sync, too",
    "zero_grad_inside": "zero_grad for every micro-batch",
    "step_inside": "optimizer.step for every micro-batch",
    "clip_inside": "clipping for every micro-batch",
    "batchnorm": "right, but a model with BatchNorm",
}


def accumulation_table(run: Records) -> pandas.DataFrame:
    """What each way of accumulating does to the gradient and to the replicas. Deterministic."""

    def at(metric: str, way: str) -> float:
        return run.one(metric, way=way).value

    rows = [
        {
            "way": way,
            "what it does": SAID[way],
            "all-reduces per step": int(at("all_reduces_per_step", way)),
            "gradient": _gradient_verdict(at("gradient_relative_error", way), at("gradient_scale", way)),
            "replicas": "equal" if at("parameter_spread", way) < SPREAD else "drift apart",
        }
        for way in (r.case["way"] for r in run.where("gradient_relative_error"))
    ]
    return pandas.DataFrame(rows).set_index("way")


def _gradient_verdict(error: float, scale: float) -> str:
    if error < SAME:
        return "that of the whole batch"
    if abs(error - abs(scale - 1)) < 1e-4:
        return f"{scale:.1f} times as long"
    return f"another one, {error:.0%} off"


def accumulation_figure(run: Records, guess: Prediction) -> None:
    """Figure: time of one optimizer step, for the right way, without no_sync, and with the whole batch at once."""
    steps = {r.case["way"]: r for r in run.where("step_s")}
    gain = paired_ratio(steps["sync_every"].samples, steps["no_sync"].samples)
    m = run[0].config["accumulate"]
    if differs(gain):
        message = f"With no_sync a step of {m} micro-batches is {gain.value:.2f} times as fast"
    else:
        message = f"This run shows no gain from no_sync in a step of {m} micro-batches"
    labels = {
        "whole_batch": "one whole batch",
        "no_sync": f"{m} micro-batches,\nno_sync but for the last",
        "sync_every": f"{m} micro-batches,\nwithout no_sync",
    }
    fig, ax = figure(message, xlabel="optimizer step (ms)", ylabel="way", records=run)
    bars(ax, [labels[w] for w in steps], [estimate(r.samples, "s").scaled(1e3, "ms") for r in steps.values()])
    ax.set_xlim(left=0)
    show(fig, alt=f"{message}: {', '.join(f'{w} {estimate(r.samples, r.unit)}' for w, r in steps.items())}.")
    kept = {way: run.one("activation_bytes", way=way).value for way in ("whole_batch", "no_sync")}
    whole = paired_ratio(steps["whole_batch"].samples, steps["no_sync"].samples)
    beside = (
        "this run cannot tell"
        if not differs(whole)
        else "accumulation is slower"
        if whole.high < 1
        else "accumulation is faster here"
    )
    say(
        f"The gain of no_sync: {gain}. {guess.against(gain)} Beside the whole batch at once, {beside}: {whole}. What "
        f"it buys is room: activations take {kept['no_sync'] / 1e3:.0f} kB in place of "
        f"{kept['whole_batch'] / 1e3:.0f} kB."
    )
