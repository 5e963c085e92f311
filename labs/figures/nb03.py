"""Figures and sentences of notebook 03, computed from the records of its labs."""

from __future__ import annotations

import math

import pandas

from labs import crossover, data_parallel, scaling
from labs.kit.check import Prediction
from labs.kit.measure import Estimate, differs, estimate, paired_ratio
from labs.kit.plot import SERIES, bars, curve, figure, heat_map, ideal, points, prediction, show
from labs.kit.record import Records
from labs.kit.say import say
from labs.published import rtx_4090_epochs

NAMES = {"copies": "copies that never talk", "ddp": "DDP", "dp": "DataParallel"}


def ranks_of(run: Records) -> int:
    """World size of the run."""
    return run[0].layout["world_size"]


def share_of_ceiling(run: Records) -> Estimate:
    """DDP's throughput over that of copies that never talk, paired round by round."""
    n = ranks_of(run)
    return paired_ratio(run.one("step_s", mode="copies").samples, run.one("step_s", mode="ddp", ranks=n).samples)


def ways(run: Records, guess: Prediction) -> None:
    """Figure and text: the speed-up of every way to use the ranks, the guess, the ideal and the model."""
    n, found = ranks_of(run), data_parallel.speedups(run)
    threads = "" if run[0].layout["device"] == "cuda" else ",\nits algorithm on CPU threads"
    labels = [NAMES["copies"], "DDP", f"DataParallel{threads}"]
    values = [found["copies", n], found["ddp", n], found["dp", n]]
    message = f"{n} ranks train {values[1].value:.2f} times as fast as one; the machine allows {values[0].value:.2f}"
    fig, ax = figure(message, xlabel="samples per second, relative to one rank (x)", ylabel="way to train", records=run)
    bars(ax, labels, values)
    prediction(ax, float(guess), 1)
    modelled = data_parallel.modelled_speedup(run)
    curve(ax, [modelled, modelled], [0.75, 1.25], label="DDP without overlap")
    ax.axvline(n, linestyle=":", color="black")
    ax.annotate(f"ideal: {n}", (n, -0.45), ha="right", fontsize=10)
    ax.set_xlim(left=0)
    show(fig, alt=f"{message}. DataParallel: {values[2]}. Model without overlap: {modelled:.2f}.")
    say(_ways_text(run, guess, values[1], values[0], modelled))


def _ways_text(run: Records, guess: Prediction, ddp: Estimate, ceiling: Estimate, modelled: float) -> str:
    n, share = ranks_of(run), share_of_ceiling(run)
    single, alone = run.one("step_s", mode="single").value, run.one("all_reduce_s").value
    lines = [
        f"DDP: {ddp}. {guess.against(ddp)}",
        _ceiling_text(ceiling, n),
        f"DDP reaches {share.scaled(100, '%')} of it. What is missing there is the price of DDP"
        + ("." if differs(share) else ", and this run cannot show that anything is missing."),
        f"The model expects {modelled:.2f} x: a step of {single * 1e3:.1f} ms and an all-reduce of {alone * 1e3:.1f}"
        " ms, one after the other. Overlap would put the measurement above it, contention puts it below.",
    ]
    return "\n".join(f"* {line}" for line in lines)


def _ceiling_text(ceiling: Estimate, n: int) -> str:
    if ceiling.high >= n:
        return f"The machine allows {ceiling}: copies that exchange nothing do not slow each other down here."
    return (
        f"The machine's ceiling is {ceiling}, not {n}: copies that exchange nothing already share caches, memory"
        " bandwidth and power."
    )


def bytes_figure(run: Records) -> None:
    """Figure: bytes per step by number of ranks, closed forms and what was counted."""
    config, counted = data_parallel.Config(**_config(run)), _counted(run)
    counts = list(range(2, 9))
    forms = {n: data_parallel.predict(config, n) for n in counts}
    size = scaling.ring_all_reduce_bytes(1, 2) * forms[2]["ddp"]
    dp = [_through_device_0(forms[n]) / size for n in counts]
    ddp = [forms[n]["ddp"] / size for n in counts]
    message = "DataParallel's device 0 moves more with every device; a DDP rank never more than twice its gradients"
    fig, ax = figure(message, xlabel="devices", ylabel="bytes per step /\nbytes of the gradients", records=run)
    curve(ax, counts, dp, label="DataParallel, through device 0", color=SERIES[1])
    curve(ax, counts, ddp, label="DDP, sent by each rank", color=SERIES[2])
    if counted:
        n = [ranks_of(run)] * 2
        points(ax, n, [_through_device_0(counted) / size, counted["ddp"] / size], label="counted in this run")
    ax.set_ylim(bottom=0)
    show(fig, alt=f"{message}. At 8 devices: {dp[-1]:.1f} against {ddp[-1]:.2f} times the gradients.")


def _config(run: Records) -> dict:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in run[0].config.items()}


def _counted(run: Records) -> dict[str, float]:
    return {r.case["way"]: r.value for r in run.where("bytes_per_step")}


def _through_device_0(moved: dict[str, float]) -> float:
    return sum(v for way, v in moved.items() if way.startswith("dp "))


def bytes_table(config: data_parallel.Config, ranks: tuple[int, ...] = (2, 4, 8)) -> pandas.DataFrame:
    """Closed forms, in bytes per step: one row per phase, one column per number of ranks. Modelled."""
    table = pandas.DataFrame({f"{n} ranks": data_parallel.predict(config, n) for n in ranks})
    table.index.name = "modelled bytes per step"
    return table.astype(int)


def counted_as_predicted(run: Records) -> str:
    """Whether every byte count of the run equals its closed form; a deterministic sentence."""
    n, counted = ranks_of(run), _counted(run)
    forms = data_parallel.predict(data_parallel.Config(**_config(run)), n)
    wrong = [way for way, value in counted.items() if not math.isclose(value, forms[way])]
    if n == 1:
        return "one rank: nothing was moved"
    return "every count equals its closed form" if not wrong else f"counts differ from the closed form: {wrong}"


def parity_table(run: Records) -> pandas.DataFrame:
    """One row per model: what kind of difference DDP's gradient has from the whole batch's. Deterministic."""
    rows = []
    for r in run.where("gradient_relative_error", dtype="float64"):
        case = {k: v for k, v in r.case.items() if k != "dtype"}
        fp32 = run.one("gradient_relative_error", dtype="float32", **case).value
        rows.append({
            "model": case["model"] + (" + SyncBatchNorm" if case["sync_batchnorm"] else ""),
            "FP32 error below 1e-5": fp32 < 1e-5, "FP64 error below 1e-12": r.value < 1e-12,
            "so": "the same gradient, rounded" if r.value < 1e-12 else "another gradient",
        })  # fmt: skip
    return pandas.DataFrame(rows).set_index("model")


def parity_text(run: Records) -> None:
    """The measured relative errors, in words."""
    lines = []
    for r in run.where("gradient_relative_error", dtype="float32"):
        case = {k: v for k, v in r.case.items() if k != "dtype"}
        fp64 = run.one("gradient_relative_error", dtype="float64", **case).value
        name = case["model"] + (" with SyncBatchNorm" if case["sync_batchnorm"] else "")
        lines.append(f"* {name}: relative error {r.value:.1e} in FP32, {fp64:.1e} in FP64")
    say("\n".join(lines))


def loss_figure(fp32: Records, fp64: Records) -> None:
    """Figure: how far the loss of DDP is from that of one process, step by step, in both formats."""
    floor = 1e-17
    message = "DDP follows one process bit by bit as far as rounding allows"
    fig, ax = figure(message, xlabel="optimizer step", ylabel="|loss(DDP) - loss(one process)|\n(nats)",
                     records=fp32 + fp64)  # fmt: skip
    worst = {}
    for name, run in (("FP32", fp32), ("FP64", fp64)):
        gap = loss_gap(run)
        worst[name] = max(gap)
        points(ax, range(1, len(gap) + 1), [max(g, floor) for g in gap], label=name)
    ax.set_yscale("log")
    ax.set_ylim(floor / 2, 10)
    show(fig, alt=f"{message}: at most {worst['FP32']:.0e} in FP32 and {worst['FP64']:.0e} in FP64.")
    steps = len(loss_gap(fp32))
    say(f"Over {steps} steps the losses differ by at most {worst['FP32']:.0e} in FP32 and {worst['FP64']:.0e} in FP64"
        f" (zeros are drawn at {floor:.0e}). What vanishes with more bits was rounding, amplified.")  # fmt: skip


def loss_gap(run: Records) -> list[float]:
    """|loss(DDP) - loss(one process)| of every step."""
    single, ddp = (run.one("loss", case=case).samples for case in ("single", "ddp"))
    return [abs(a - b) for a, b in zip(single, ddp, strict=True)]


def table_fit() -> pandas.DataFrame:
    """The article's 1-4 GPU table with what follows from it: speed-up, efficiency, cost, Amdahl's fit."""
    published = rtx_4090_epochs()
    seconds = {r.case["ranks"]: r.value for r in published}
    fit = scaling.fit_amdahl(list(seconds), list(seconds.values()))
    rows = [
        {"GPUs": n, "published s/epoch": t, "speed-up": round(seconds[1] / t, 3),
         "efficiency %": round(100 * seconds[1] / t / n, 1), "GPU-seconds/epoch": round(n * t, 1),
         "Amdahl's fit s": round(fit.time(n), 2)}
        for n, t in seconds.items()
    ]  # fmt: skip
    return pandas.DataFrame(rows).set_index("GPUs")


def scaling_figure(strong: Records, weak: Records, guess: Prediction) -> None:
    """Figure: speed-up against devices, here and in the article, with Amdahl's fit of the latter."""
    published, n = rtx_4090_epochs(), ranks_of(strong)
    counts = [r.case["ranks"] for r in published]
    times = [r.value for r in published]
    fit = scaling.fit_amdahl(counts, times)
    top = max(4, n)
    one_batch, batch_each = (data_parallel.speedups(run)["ddp", n] for run in (strong, weak))
    message = (
        f"{n} ranks: {one_batch.value:.2f} x when they share one batch, {batch_each.value:.2f} x with a batch each"
    )
    fig, ax = figure(message, xlabel="devices", ylabel="speed-up (x)", records=strong + weak + published)
    ideal(ax, range(1, top + 1))
    for run, label in ((weak, "weak scaling"), (strong, "strong scaling")):
        found = data_parallel.speedups(run)
        ddp = [found["single", 1]] + [v for (mode, k), v in found.items() if mode == "ddp" and k > 1]
        points(ax, range(1, len(ddp) + 1), ddp, label=f"DDP here, {label}")
    points(ax, counts, [times[0] / t for t in times], kind="published", label="article, RTX 4090")
    many = [1 + i / 10 for i in range(10 * (top - 1) + 1)]
    curve(
        ax, many, [fit.speedup(k) for k in many], label=f"Amdahl's fit of it, limit {fit.limit:.1f} x", color=SERIES[2]
    )
    prediction(ax, n, guess)
    ax.set_xticks(range(1, top + 1))
    show(fig, alt=f"{message}. The article's four cards: {times[0] / times[-1]:.2f} x. Ideal: {top} x on {top}.")
    say(
        f"Strong scaling on {n} ranks: {one_batch}; weak scaling: {batch_each}. {guess.against(one_batch)} Amdahl's fit"
        f" of the article: {fit.serial:.2f} s that do not shrink and {fit.parallel:.2f} s that do."
    )


def crossover_figures(run: Records) -> None:
    """Two maps of the speed-up over width and batch: what the model says, what was measured."""
    rows = crossover.crossover_map(run)
    widths, batches = sorted({r["width"] for r in rows}), sorted({r["batch"] for r in rows})
    n = ranks_of(run)
    span = max(abs(v - 1) for r in rows for v in (r["modelled"], r["measured"].value))
    for kind, take in (("modelled", lambda r: r["modelled"]), ("measured", lambda r: r["measured"].value)):
        cells = {(r["width"], r["batch"]): take(r) for r in rows}
        grid = [[cells[w, b] for b in batches] for w in widths]
        wins = sum(v > 1 for v in cells.values())
        verb = "should win" if kind == "modelled" else "won"
        message = f"DDP on {n} ranks {verb} in {wins} of {len(cells)} cells"
        fig, ax = figure(message, xlabel="samples per rank", ylabel="layer width", records=run, size=(6.4, 3.1))
        heat_map(ax, grid, columns=batches, rows=widths, kind=kind, center=1.0, span=span, label="speed-up (x)")
        show(fig, alt=f"{message}: from {min(cells.values()):.2f} to {max(cells.values()):.2f} times as fast.")
    say(_crossover_text(rows))


def _crossover_text(rows: list[dict]) -> str:
    right = sum((r["modelled"] > 1) == (r["measured"].value > 1) for r in rows)
    worst, best = (f(rows, key=lambda r: r["measured"].value) for f in (min, max))
    ratio = estimate([r["measured"].value / r["modelled"] for r in rows], "x")
    return (
        f"The model names the winner in {right} of {len(rows)} cells. Measured over modelled: {ratio}. It knows one"
        f" rank's step and the link, not what DDP itself costs per step, nor what ranks take from each other. Worst:"
        f" width {worst['width']}, batch {worst['batch']}, {worst['measured']}; best: width {best['width']}, batch"
        f" {best['batch']}, {best['measured']}."
    )


def break_even_text(run: Records, images: int = 60_000) -> None:
    """After how many epochs of `images` images DDP has earned back its start-up, from this run."""
    n = ranks_of(run)
    phases = {r.case["phase"]: r.value for r in run.where("startup_s")}
    single, ddp = run.one("step_s", mode="single"), run.one("step_s", mode="ddp", ranks=n)
    epoch_1 = images / single.case["batch_per_rank"] * single.value
    epoch_n = images / (n * ddp.case["batch_per_rank"]) * ddp.value
    epochs = scaling.break_even_epochs(sum(phases.values()), epoch_1, epoch_n)
    listed = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in phases.items())
    end = f"DDP has earned it back after {epochs:.2f} epochs" if math.isfinite(epochs) else "it is never earned back"
    say(f"Start-up: {listed}. An epoch of {images:,} images takes {epoch_1:.1f} s on one rank and {epoch_n:.1f} s on"
        f" {n}: {end}. A torchrun from cold pays a few seconds more, for `import torch` in every rank.")  # fmt: skip


def bug_table(run: Records) -> pandas.DataFrame:
    """What each bug looks like from outside. Deterministic: counts of steps and images, not times."""

    def at(metric: str, case: str) -> float:
        return run.one(metric, case=case).value

    rows = [
        {"case": case, "steps per epoch": int(at("steps_per_epoch", case)),
         "images seen": f"{at('distinct_share', case):.0%}", "repeated": f"{at('repeated_share', case):.0%}",
         "next epoch": "same order" if at("same_order_next_epoch", case) else "new order",
         "replicas": "differ" if at("parameter_spread", case) > 0 else "equal"}
        for case in dict.fromkeys(r.case["case"] for r in run.where("loss"))
    ]  # fmt: skip
    return pandas.DataFrame(rows).set_index("case")


def errors_raised(run: Records) -> None:
    """The bugs that do raise, in torch's own words."""
    for r in run.where("raised"):
        case = {k: v for k, v in r.case.items() if k != "error"}
        print(", ".join(f"{v}" if k == "case" else f"{k}={v}" for k, v in case.items()), "->", r.case["error"])


def saving_text(run: Records) -> None:
    """How often a checkpoint was unreadable right after it was saved, by who writes."""
    for r in run.where("damaged_share"):
        writers = run.one("writers", case="every_rank_saves", guarded=r.case["guarded"]).value
        say(f"* {writers:.0f} writer(s) to one path: {r.value:.0%} of the files were unreadable right after saving")


SAID = {
    "whole_batch": "one forward with everything", "no_sync": "right: the last backward alone synchronises",
    "sync_every": "no no_sync at all", "forward_outside": "no_sync around backward only",
    "loss_not_divided": "loss not divided by m", "mean_of_means": "unequal micro-batches weighed equally",
    "last_in_no_sync": "the last one inside no_sync, too", "zero_grad_inside": "zero_grad in every micro-step",
    "step_inside": "optimizer.step in every micro-step", "clip_inside": "clipping in every micro-step",
    "batchnorm": "right, but a model with BatchNorm",
}  # fmt: skip


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
            "replicas": "equal" if at("parameter_spread", way) < 1e-3 else "drift apart",
        }
        for way in (r.case["way"] for r in run.where("gradient_relative_error"))
    ]
    return pandas.DataFrame(rows).set_index("way")


def _gradient_verdict(error: float, scale: float) -> str:
    if error < 1e-5:
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
    labels = {"whole_batch": "one whole batch", "no_sync": f"{m} micro-batches,\nno_sync but for the last",
              "sync_every": f"{m} micro-batches,\nno no_sync"}  # fmt: skip
    fig, ax = figure(message, xlabel="optimizer step (ms)", ylabel="way", records=run)
    bars(ax, [labels[w] for w in steps], [estimate(r.samples, "s").scaled(1e3, "ms") for r in steps.values()])
    ax.set_xlim(left=0)
    show(fig, alt=f"{message}: {', '.join(f'{w} {estimate(r.samples, r.unit)}' for w, r in steps.items())}.")
    kept = {way: run.one("activation_bytes", way=way).value for way in ("whole_batch", "no_sync")}
    say(
        f"The gain of no_sync: {gain}. {guess.against(gain)} Accumulation is no speed-up over the whole batch, it is"
        f" room: activations take {kept['no_sync'] / 1e3:.0f} kB in place of {kept['whole_batch'] / 1e3:.0f} kB."
    )
