"""Figures, tables and sentences of notebook 10 on numbers that are not finite and replicas that drift apart."""

from __future__ import annotations

from collections.abc import Sequence

import pandas

from labs import nan_clinic
from labs.kit.check import Prediction
from labs.kit.display import say, show_table
from labs.kit.plot import SERIES, curve, figure, prediction, show
from labs.kit.record import Records
from labs.nan_clinic import numbers
from labs.nan_clinic.numbers import CAUSES, HEALTHY

SUDDEN, SLOW = "bad sample", "learning rate"


def timeline(run: Records, guess: Prediction | None = None, causes: Sequence[str] = (SUDDEN, SLOW)) -> None:
    """Loss and gradient norm of patients until the first number that is not finite.

    `guess`: steps in a row in which the loss of the last patient is more than three times its lowest, before it
    overflows.
    """
    rising = {cause: numbers.rising(list(_first(run, "loss", cause).samples)) for cause in causes}
    message = _rise_text(rising)
    fig, ax = figure(message, xlabel="x", ylabel="y", records=run.where("loss"), size=(7.6, 4.0))
    ax.remove()
    axes, told = fig.subplots(1, len(causes), sharey=True, squeeze=False)[0], []
    for ax, cause in zip(axes, causes, strict=True):
        bad = _first(run, "bad_step", cause)
        for metric, label, color in (
            ("loss", "loss (nats)", SERIES[0]),
            ("gradient_norm", "norm of the gradient", SERIES[1]),
        ):
            found = _first(run, metric, cause)
            curve(ax, found.case["steps"], list(found.samples), kind="measured", label=label, color=color)
        ax.axvline(bad.value, color="black", linestyle=":", linewidth=1.5)
        where = bad.case["module"].removeprefix("model.") or "the input"
        ax.set_title(f"{cause}: {where}, step {bad.value:.0f}", fontsize=10)
        ax.set_xlabel("step")
        ax.set_xlim(-0.5, numbers.STEPS)
        ax.set_yscale("log")
        told.append(
            f"{cause}: not finite from step {bad.value:.0f} on, first in {where}, after {rising[cause]} steps "
            "with a loss of more than three times its lowest"
        )
    axes[0].set_ylabel("value, the last finite ones (log)")
    if guess is not None:
        bad = _first(run, "bad_step", causes[-1])
        prediction(axes[-1], bad.value - float(guess), _first(run, "loss", causes[-1]).samples[0])
    for ax in axes[1:]:  # one legend for the curves; the star has its own
        for line in ax.lines:
            if line.get_gid() == "kind:measured":
                line.set_label("_")
    show(fig, alt=f"{message}. {'; '.join(told)}.")
    if guess is not None:
        say(f"* {guess.against(float(rising[causes[-1]]))}")


def _first(run: Records, metric: str, cause: str):  # type: ignore[no-untyped-def]
    """The record of the first seed of a cause."""
    found = run.where(metric, planted=cause)
    if not found:
        raise LookupError(f"no {metric} of {cause!r}: launch it with causes=({cause!r},)")
    return found[0]


def _rise_text(rising: dict[str, int]) -> str:
    sudden = [cause for cause, steps in rising.items() if steps == 0]
    slow = {cause: steps for cause, steps in rising.items() if steps}
    said = [f"{cause}: {steps} step{'s' if steps > 1 else ''} of warning" for cause, steps in slow.items()]
    said += [f"{cause}: none" for cause in sudden]
    return ", ".join(said).capitalize()


def silent(run: Records, causes: Sequence[str] = ("clip before unscale_", "skipped for ever")) -> None:
    """The loss of patients that never show a NaN in it, and of the same after the cure; without the last batch, of one
    sample."""
    losses = [_first(run, "loss", cause) for cause in causes]
    missing = [numbers.STEPS + 1 - len(loss.case["steps"]) for loss in losses]  # not finite, or never reached
    unseen = not any(missing) and not any(nan_clinic.falls(list(loss.samples)) for loss in losses)
    message = "No loss is NaN, and nothing is learned" if unseen else "The losses before and after the cure"
    fig, ax = figure(message, xlabel="x", ylabel="y", records=run.where("loss"), size=(7.6, 3.6))
    ax.remove()
    axes, told = fig.subplots(1, len(causes), sharey=True, squeeze=False)[0], []
    for ax, cause, loss, without in zip(axes, causes, losses, missing, strict=True):
        well = _first(run, "cured_loss", cause).samples[: numbers.STEPS]
        steps = [k for k in loss.case["steps"] if k < numbers.STEPS]
        ill = loss.samples[: len(steps)]
        curve(ax, steps, list(ill), kind="measured", label="as it is", color=SERIES[1])
        curve(ax, range(len(well)), list(well), kind="measured", label="cured", color=SERIES[0])
        ax.set_title(cause, fontsize=10)
        ax.set_xlabel("step")
        told.append(
            f"{cause}: {ill[0]:.2f} to {ill[-1]:.2f} nats, cured to {well[-1]:.2f}"
            + f"; {without} of {numbers.STEPS + 1} steps without a finite loss" * (without > 0)
        )
    axes[0].set_ylabel("loss (nats)")
    for ax in axes[1:]:
        for line in ax.lines:
            line.set_label("_")
    show(fig, alt=f"{message}. {'; '.join(told)}.")
    for ratio in (r for cause in causes for r in run.where("clip_ratio", planted=cause)[:1]):
        say(f"* {ratio.case['planted']}: the norm that was clipped is {ratio.value:,.0f} times that of the gradient.")


def where_it_began(run: Records) -> None:
    """For each patient: planted and found module, step and sample, trials of the bisection, and what torch names."""
    rows = {}
    for r in run.where("bad_step"):
        if r.case["planted"] in HEALTHY:  # steps that a scaler skipped as it should
            continue
        case = {"planted": r.case["planted"], "of_seed": r.case["of_seed"]}
        trials = next((t.value for t in run.where("trials", **case)), None)
        torchs = f"{r.case['anomaly']} in {r.case['anomaly_in']}" if r.case["anomaly_in"] else r.case["anomaly"]
        rows[case["planted"] + (f", seed {case['of_seed']}" if run[0].config["seeds"] > 1 else "")] = {
            "first bad module": r.case["module"] or "the input",
            "step": f"{r.value:.0f}",
            "trials for the sample": "-" if trials is None else f"{trials:.0f}",
            "detect_anomaly names": torchs or "nothing",
        }
    show_table(pandas.DataFrame.from_dict(rows, orient="index"))
    right = {m: nan_clinic.share(r.value for r in run.where(f"{m}_right")) for m in ("cause", "module", "sample")}
    steps = nan_clinic.share(nan_clinic.steps_right(run))
    say(
        f"* Right, of those that have one: module {right['module']}, step {steps}, sample {right['sample']}; the cause "
        f"by the signs alone {right['cause']}, healthy ones included."
    )


def trials(run: Records, guess: Prediction | None = None) -> None:
    """How many trials the bisections took, beside the closed form."""
    took = sorted({int(r.value) for r in run.where("trials")})
    least = sorted({int(r.value) for r in run.where("predicted_trials")})
    say(
        f"* Bisection took {' or '.join(map(str, took))} trials; the formula, log2 of the samples rounded up, says "
        f"{' or '.join(map(str, least))}."
    )
    if guess is not None and took:
        say(f"* {guess.against(float(took[-1]))}")


def cures(run: Records) -> None:
    """Each cause with its cure in words, and whether patients learn after it."""
    rows = {}
    for name, cause in CAUSES.items():
        if works := run.where("cure_works", planted=name):
            rows[name] = {"cure": cause.advice, "learns after it": nan_clinic.share(r.value for r in works)}
    show_table(pandas.DataFrame.from_dict(rows, orient="index"))
