"""Figures, tables and sentences of notebook 10 on numbers that are not finite and replicas that drift apart."""

from __future__ import annotations

from collections.abc import Sequence

import pandas

from labs import nan_clinic
from labs.kit.check import Prediction
from labs.kit.display import say, show_table
from labs.kit.measure import estimate
from labs.kit.plot import SERIES, bars, curve, figure, log_axes, points, prediction, show
from labs.kit.record import Records
from labs.parts.faults import numbers
from labs.parts.faults.drift import FAULTS
from labs.parts.faults.numbers import CAUSES, HEALTHY

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


def matrix(run: Records) -> None:
    """Planted against named, number of patients; rows with a mistake are marked."""
    found = nan_clinic.matrix(run)
    given = {n for row in found.values() for n in row}
    named = [n for n in (*CAUSES, "healthy") if n in given]
    rows = {p: [found[p].get(n, 0) or "" for n in named] for p in CAUSES | HEALTHY if p in found}
    table = pandas.DataFrame.from_dict(rows, orient="index", columns=named)
    table.columns.name = "planted \\ named"
    show_table(table)
    wrong = [r for r in run.where("cause_right") if not r.value]
    say(
        f"* Named right: {nan_clinic.share(r.value for r in run.where('cause_right'))}, healthy look-alikes included."
        + "".join(f" {r.case['planted']!r} was called {r.case['named']!r}." for r in wrong)
    )


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


def finder_cost(run: Records, guess: Prediction | None = None) -> None:
    """A step with hooks and under detect_anomaly over a plain one; `guess`: that of the hooks, in x."""
    names = {"hooks": "first_bad: hooks on every module", "anomaly": "torch's detect_anomaly"}
    ratios = {name: nan_clinic.slower(run, name) for name in names}
    shown = {name: r for name, r in ratios.items() if nan_clinic.is_shown(r, 1.0)}
    message = "What finding costs cannot be told from this run"
    if shown:
        words = {"hooks": "with hooks", "anomaly": "under detect_anomaly"}
        message = "A step takes " + ", ".join(f"{r.value:.1f} times as long {words[n]}" for n, r in shown.items())
    fig, ax = figure(
        message,
        xlabel="time of a step over a plain one (x)",
        ylabel="finder",
        records=run.where("finder_step_s"),
        size=(7.2, 2.8),
    )
    bars(ax, list(names.values()), list(ratios.values()), label="step")
    if guess is not None:
        prediction(ax, float(guess), 0)
    ax.axvline(1, color="black", linestyle=":", linewidth=1)
    show(fig, alt=f"{message}. " + ", ".join(f"{names[n]}: {r}" for n, r in ratios.items()) + ".")
    if guess is not None:
        say(f"* {guess.against(ratios['hooks'])}")


def drifts(run: Records) -> None:
    """Each fault: in what the ranks differ, the first name, and after how many steps every k finds it."""
    rows = {}
    for r in run.where("planted_step"):
        if "fault" not in r.case:
            continue
        case = {"fault": r.case["fault"], "of_seed": r.case["of_seed"]}
        differ = run.where("differ_step", **case)
        kinds = [d.case["kind_of"] for d in differ]
        of = next((d for d in differ if d.case["kind_of"] == "parameters"), differ[0] if differ else None)
        found = run.where("found_step", kind_of=of.case["kind_of"], **case) if of else []
        late = {f"every {f.case['every']}": f"{f.value:.0f}" for f in found}
        rows[case["fault"]] = {
            "what": FAULTS[case["fault"]].what,
            "ranks differ in": ", ".join(kinds) or "nothing",
            "first": of.case["name"] if of else "-",
            "after steps": f"{of.value:.0f}" if of else "-",
            **late,
        }
    show_table(pandas.DataFrame.from_dict(rows, orient="index").fillna("-"))
    n, alike, differed = nan_clinic.compared(run)
    say(
        f"* Hashes and a comparison of all bytes name the same tensors in {alike} of {n} comparisons, of which "
        f"{differed} differed."
    )


def damage(run: Records, guess: Prediction | None = None, of_rank: int = 0) -> None:
    """Points of test accuracy that each unnoticed fault costs; `guess`: those of the first."""
    points_lost = {fault: nan_clinic.lost(run, fault, of_rank) for fault in nan_clinic.damaged(run)}
    shown = {fault: p for fault, p in points_lost.items() if nan_clinic.is_shown(p)}
    message = "What unnoticed drift costs cannot be told from this run"
    if shown:
        worst = max(shown, key=lambda fault: shown[fault].value)
        message = f"Unnoticed, {worst!r} costs {shown[worst].value:.1f} points of accuracy"
    fig, ax = figure(
        message,
        xlabel=f"accuracy lost on rank {of_rank}, healthy less faulty (points)",
        ylabel="fault on the last rank",
        records=run.where("accuracy"),
        legend_below=True,
        size=(7.2, 2.2 + 0.4 * len(points_lost)),
    )
    bars(ax, list(points_lost), list(points_lost.values()), label="seed by seed")
    if guess is not None:
        prediction(ax, float(guess), 0)
    ax.axvline(0, color="black", linestyle=":", linewidth=1)
    show(fig, alt=f"{message}. " + ", ".join(f"{fault}: {p}" for fault, p in points_lost.items()) + ".")
    told = [f"{fault} {p}" for fault, p in points_lost.items() if fault not in shown]
    if told:
        say(f"* Cannot be told from healthy by these seeds: {'; '.join(told)}.")
    if guess is not None and points_lost:
        say(f"* {guess.against(next(iter(points_lost.values())))}")


def price(run: Records, guess: Prediction | None = None) -> None:
    """What a check adds to a step, in percent, against k; `guess`: that of k = 10, or of the middle k."""
    ks = [r.case["every"] for r in run.where("step_s") if r.case["every"]]
    found = {k: nan_clinic.added_percent(run, k) for k in ks}
    step_s = run.one("step_s", every=0).value
    formula = {k: 100 * run.one("predicted_added_s", every=k).value / step_s for k in ks}
    shown = [k for k in ks if nan_clinic.is_shown(found[k])]
    message = "What the checks cost cannot be told from this run"
    if shown:
        k = shown[0]
        message = (
            f"Checked {'in every step' if k == 1 else f'every {k} steps'}, a step takes {found[k].value:.0f} % longer"
        )
        if len(shown) < len(ks):
            rest = next(k for k in ks if k not in shown)
            message += f"; from k = {rest} on it cannot be told" if all(x not in shown for x in ks if x >= rest) else ""
    fig, ax = figure(
        message,
        xlabel="k: steps between two checks",
        ylabel="added to a step (%)",
        size=(7.2, 4.6),
        legend_below=True,
        records=[*run.where("step_s"), *run.where("predicted_added_s")],
    )
    curve(ax, ks, list(formula.values()), label="(bytes / bandwidth + latency) / k")
    points(ax, ks, list(found.values()), label="steps with and without, in turn")
    if guess is not None:
        prediction(ax, 10 if 10 in ks else ks[len(ks) // 2], guess)
    log_axes(ax, x=ks)
    ax.axhline(0, color="black", linestyle=":", linewidth=1)
    told = "; ".join(f"k = {k}: {found[k]}, formula {formula[k]:.2g} %" for k in ks)
    show(fig, alt=f"{message}. {told}.")
    say("\n".join(f"* {line}" for line in price_text(run)))
    if guess is not None:
        say(f"* {guess.against(found[10 if 10 in ks else ks[len(ks) // 2]])}")


def price_text(run: Records) -> list[str]:
    """For each size: the check, how much more it is than the model says, and what its pieces take alone."""
    lines = []
    for check in run.where("check_s"):
        took = estimate(check.samples, "s")
        model_s, hash_s, read_s, gather_s = (
            run.one(metric, of=check.case["of"]).value
            for metric in ("predicted_check_s", "hash_s", "read_s", "gather_s")
        )
        lines.append(
            f"{check.case['bytes'] / 1e6:.3g} MB: a check takes {took}, {took.value / model_s:.1f} times the "
            f"model's {1e3 * model_s:.2g} ms. Timed alone, the hashes take {100 * hash_s / took.value:.0f} % "
            f"of it, {hash_s / read_s:.1f} times as long as a sum that reads the bytes once; the gather "
            f"{100 * gather_s / took.value:.0f} %."
        )
    lines.append(
        "The model reads each byte once, at the speed of that sum, and gathers the hashes, in the shortest "
        "time measured for any size. What the hash computes is not in it. Pieces timed alone need not add up "
        "to the check."
    )
    return lines
