"""Figures and sentences of notebook 03 on DDP beside one process: speed-up, bytes, gradients, losses."""

from __future__ import annotations

import math

import pandas

from labs import data_parallel
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import Estimate, differs, paired_ratio
from labs.kit.plot import SERIES, bars, curve, figure, points, prediction, show
from labs.kit.record import Records
from labs.parts import models
from labs.parts.data_parallel import scaling
from labs.parts.timing.roofline import training_step_work

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
    fig, ax = figure(message, xlabel="samples per second, relative to one rank (x)", ylabel="way to train", records=run,
                     size=(7.0, 3.1), legend_below=True)  # fmt: skip
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


def sizes_table(batches: dict[str, int]) -> pandas.DataFrame:
    """What a step of each model computes and what DDP must add up after it: counted, not run. `batches`: rows."""
    rows = {}
    for name, batch in batches.items():
        workload = models.build(name)
        flop = training_step_work(workload, batch).flop
        size = models.gradient_bytes(workload.module)
        rows[f"{name}, batch {batch}"] = {
            "parameters": f"{sum(p.numel() for p in workload.module.parameters()):,}",
            "MFLOP per step": f"{flop / 1e6:,.0f}", "gradients (MB)": f"{size / 1e6:.2f}",
            "FLOP per byte of gradients": f"{flop / size:,.0f}",
        }  # fmt: skip
    return pandas.DataFrame(rows).T


def bytes_figure(run: Records, guess_ddp: Prediction, guess_dp: Prediction) -> None:
    """Figure: bytes per step by number of ranks, closed forms and what was counted; the guesses are for 8 ranks."""
    config, counted = data_parallel.Config(**_config(run)), _counted(run)
    counts = list(range(2, 9))
    forms = {n: data_parallel.predict(config, n) for n in counts}
    size = scaling.ring_all_reduce_bytes(1, 2) * forms[2]["ddp"]
    dp = [_through_device_0(forms[n]) / size for n in counts]
    ddp = [forms[n]["ddp"] / size for n in counts]
    message = "DataParallel's device 0 moves more with every device; a DDP rank never more than twice its gradients"
    fig, ax = figure(message, xlabel="devices", ylabel="bytes per step /\nbytes of the gradients", records=run,
                     size=(7.0, 3.3))  # fmt: skip
    curve(ax, counts, dp, label="DataParallel, through device 0", color=SERIES[1])
    curve(ax, counts, ddp, label="DDP, sent by each rank", color=SERIES[2])
    if counted:
        n = [ranks_of(run)] * 2
        points(ax, n, [_through_device_0(counted) / size, counted["ddp"] / size], label="counted in this run")
    for guess, label, color in ((guess_dp, "DataParallel", SERIES[1]), (guess_ddp, "DDP", SERIES[2])):
        points(ax, [counts[-1]], [float(guess)], kind="prediction", label=label, color=color)
    ax.set_ylim(bottom=0)
    show(fig, alt=f"{message}. At 8 devices: {dp[-1]:.1f} against {ddp[-1]:.2f} times the gradients.")
    say(
        f"On {counts[-1]} ranks a DDP rank sends {ddp[-1]:.2f} times its gradients. "
        f"{guess_ddp.against(ddp[-1], 'modelled')} Through DataParallel's device 0 pass {dp[-1]:.1f} times the "
        f"gradients: parameters, gradients, and the batch of all devices. {guess_dp.against(dp[-1], 'modelled')}"
    )


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
    return table.map(lambda v: f"{v:,.0f}")


def counted_as_predicted(run: Records) -> str:
    """Whether every byte count of the run equals its closed form; a deterministic sentence."""
    n, counted = ranks_of(run), _counted(run)
    forms = data_parallel.predict(data_parallel.Config(**_config(run)), n)
    wrong = [way for way, value in counted.items() if not math.isclose(value, forms[way])]
    if n == 1:
        return "one rank: nothing was moved"
    return "every count equals its closed form" if not wrong else f"counts differ from the closed form: {wrong}"


def parity_table(run: Records) -> pandas.DataFrame:
    """One row per model: what kind of difference DDP's gradient has from the whole batch's. Deterministic.

    The step between two numbers is 2^29 times larger in FP32 than in FP64, and a difference by rounding is larger in
    that proportion, whatever the kernels; another computation differs equally in both formats. Halfway, by orders of
    magnitude, lies 2^14.5: 23,000 times. No difference in FP32 counts as one of its unit roundoff, 2^-24.
    """
    rows = []
    for r in run.where("gradient_relative_error", dtype="float64"):
        case = {k: v for k, v in r.case.items() if k != "dtype"}
        fp32 = run.one("gradient_relative_error", dtype="float32", **case).value
        rounded = r.value * 2**14.5 <= max(fp32, 2**-24)
        rows.append({
            "model": case["model"] + (" + SyncBatchNorm" if case["sync_batchnorm"] else ""),
            "in FP64 the error": "shrinks as rounding does" if rounded else "stays",
            "so": "the same gradient, rounded" if rounded else "another gradient",
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
    message = "DDP follows one process as closely as rounding allows"
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
