"""Figures and sentences of notebook 03 on DDP beside one process: speed-up, bytes, gradients, losses."""

from __future__ import annotations

import pandas
from matplotlib.ticker import NullLocator

from labs import data_parallel, ddp_parity
from labs.common import models
from labs.common.timing.roofline import training_step_work
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import Estimate, differs, paired_ratio
from labs.kit.plot import SERIES, bars, curve, figure, points, prediction, show
from labs.kit.record import Records

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
    message = ways_message(n, values[1], values[0], share_of_ceiling(run))
    fig, ax = figure(
        message,
        xlabel="samples per second, relative to one rank (x)",
        ylabel="way to train",
        records=run,
        size=(7.0, 3.1),
        legend_below=True,
    )
    bars(ax, labels, values)
    prediction(ax, float(guess), 1)
    modelled = data_parallel.modelled_speedup(run)
    curve(ax, [modelled, modelled], [0.75, 1.25], label="DDP without overlap")
    for x, name in ((n, f"ideal: {n}"), (1, "1 = break-even")):
        ax.axvline(x, linestyle=":", color="black")
        ax.annotate(name, (x, -0.45), ha="right", fontsize=10)
    ax.set_xlim(left=0)
    show(fig, alt=f"{message}. DataParallel: {values[2]}. Model without overlap: {modelled:.2f}.")
    say(_ways_text(run, guess, values[1], values[0], modelled))


def ways_message(n: int, ddp: Estimate, ceiling: Estimate, share: Estimate) -> str:
    """Title: the speed-up of DDP on n ranks beside that of copies that never talk, as far as the `share` shows it."""
    fast = f"{n} ranks train {ddp.value:.2f} times as fast as one"
    if share.high < 1:
        return f"{fast}; the machine allows {ceiling.value:.2f}"
    return f"{fast}, {'faster' if share.low > 1 else 'not shown to be slower'} than copies that never talk"


def _ways_text(run: Records, guess: Prediction, ddp: Estimate, ceiling: Estimate, modelled: float) -> str:
    n, share = ranks_of(run), share_of_ceiling(run)
    single, alone = run.one("step_s", mode="single").value, run.one("all_reduce_s").value
    lines = [
        f"DDP: {ddp}. {guess.against(ddp)}",
        _ceiling_text(ceiling, n, run[0].layout["device"]),
        _price_text(share.scaled(100, "%")),
        f"The model expects {modelled:.2f} x: a step of {single * 1e3:.1f} ms and an all-reduce of {alone * 1e3:.1f}"
        " ms, one after the other, and no rank that slows another down. " + _against_model(ddp, modelled),
    ]
    return "\n".join(f"* {line}" for line in lines)


def _ceiling_text(ceiling: Estimate, n: int, device: str) -> str:
    if ceiling.high >= n:
        return f"The machine allows {ceiling}: that copies slow each other down, this run cannot show."
    shared = "the host's cores, power, cooling" if device == "cuda" else "caches, memory bandwidth, power"
    return (
        f"The machine's ceiling is {ceiling}, not {n}: copies that exchange nothing already take this much from each "
        f"other. What they share ({shared}), this run does not tell apart."
    )


def _price_text(share: Estimate) -> str:
    if not differs(share, 100.0):
        return f"DDP reaches {share} of it: this run cannot show that DDP costs anything."
    return f"DDP reaches {share} of it. " + (
        "What is missing there is the price of DDP."
        if share.high < 100
        else "That is more than the copies: this run does not say why."
    )


def _against_model(ddp: Estimate, modelled: float) -> str:
    if ddp.low > modelled:
        return "DDP is faster than that, as it would be with a part of the all-reduce hidden behind backward."
    if ddp.high < modelled:
        return "DDP is slower than that: what it hides, if anything, is less than what the model leaves out."
    return "This run cannot tell the two apart."


def sizes_table(batches: dict[str, int]) -> pandas.DataFrame:
    """What a step of each model computes and what DDP must add up after it: counted, not run. `batches`: rows."""
    rows = {}
    for name, batch in batches.items():
        workload = models.build(name)
        flop = training_step_work(workload, batch).flop
        size = models.gradient_bytes(workload.module)
        rows[f"{name}, batch {batch}"] = {
            "parameters": f"{sum(p.numel() for p in workload.module.parameters()):,}",
            "MFLOP per step": f"{flop / 1e6:,.0f}",
            "gradients (MB)": f"{size / 1e6:.2f}",
            "FLOP per byte of gradients": f"{flop / size:,.0f}",
        }
    return pandas.DataFrame(rows).T


def bytes_figure(run: Records, guess_ddp: Prediction, guess_dp: Prediction) -> None:
    """Figure: bytes between devices per step by number of ranks, closed forms and counts; the guesses are for 8 ranks.

    Without the batch: it may come from the host, and every way has to bring it to its devices.
    """
    config, counted = data_parallel.Config(**_config(run)), _counted(run)
    counts = list(range(2, 9))
    forms = {n: data_parallel.predict(config, n) for n in counts}
    size = forms[2]["ddp handed over"]
    dp = [_through_device_0(forms[n]) / size for n in counts]
    ddp = [forms[n]["ddp sent"] / size for n in counts]
    message = "DataParallel's device 0 moves more with every device; a rank of a ring at most twice its gradients"
    fig, ax = figure(
        message, xlabel="devices", ylabel="bytes per step /\nbytes of the gradients", records=run, size=(7.0, 3.3)
    )
    curve(ax, counts, dp, label="DataParallel, through device 0", color=SERIES[1])
    curve(ax, counts, ddp, label="DDP, sent by each rank of a ring", color=SERIES[2])
    n, sent = ranks_of(run), run.where("wire_bytes_per_step")
    if any(way.startswith("dp ") for way in counted):  # on GPUs DataParallel's copies are not counted
        points(ax, [n], [_through_device_0(counted) / size], label="DataParallel, counted", color=SERIES[1])
    if sent:
        points(ax, [n], [sent[0].value / size], label="DDP, counted by the kernel", color=SERIES[2])
    aside = 0.15 if float(guess_dp) == float(guess_ddp) else 0.0  # two stars in one place would look like one
    for guess, label, color, x in ((guess_dp, "DataParallel", SERIES[1], -aside), (guess_ddp, "DDP", SERIES[2], aside)):
        points(ax, [counts[-1] + x], [float(guess)], kind="prediction", label=label, color=color)
    ax.set_ylim(bottom=0)
    show(fig, alt=f"{message}. At 8 devices: {dp[-1]:.1f} against {ddp[-1]:.2f} times the gradients.")
    say(
        f"On {counts[-1]} ranks of a ring each sends {ddp[-1]:.2f} times its gradients. "
        f"{guess_ddp.against(ddp[-1], 'modelled')} Through DataParallel's device 0 pass {dp[-1]:.1f} times the "
        f"gradients: parameters out, gradients back, and the outputs. {guess_dp.against(dp[-1], 'modelled')}"
    )


def wire_text(run: Records) -> str:
    """What the kernel counted on the ranks' sockets in a DDP step, beside the ring's formula."""
    n, sent = ranks_of(run), run.where("wire_bytes_per_step")
    if n == 1:
        return "One rank has nobody to send to."
    if not sent:
        return (
            "Nothing was counted: these ranks do not talk over TCP sockets whose bytes this system tells. The "
            "closed form stays untested here."
        )
    ring = data_parallel.predict(data_parallel.Config(**_config(run)), n)["ddp sent"]
    ranks = "; ".join(f"{b:,.0f}" for b in sent[0].samples)
    worst = max(abs(b / ring - 1) for b in sent[0].samples)
    verdict = (
        "what the formula says, and small headers"
        if worst < 0.02
        else "not what the ring's formula says: another algorithm, or other traffic on these sockets"
    )
    two = (
        (
            " With two ranks, sending everything to the other would take as many bytes; the course's tests count three"
            " ranks as well."
        )
        if n == 2 and worst < 0.02
        else ""
    )
    return (
        f"The kernel counted {ranks} bytes sent in a step, rank by rank; a ring sends {ring:,.0f}. "
        f"They differ by up to {worst:.2%}: {verdict}.{two}"
    )


def _config(run: Records) -> dict:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in run[0].config.items()}


def _counted(run: Records) -> dict[str, float]:
    return {r.case["way"]: r.value for r in run.where("bytes_per_step")}


def _through_device_0(moved: dict[str, float]) -> float:
    """All but the batch itself, which need not come from device 0."""
    return sum(v for way, v in moved.items() if way.startswith("dp ") and way != "dp scatter")


def parity_text(run: Records) -> None:
    """The measured relative errors, in words."""
    whose = "torch's" if run[0].layout["device"] == "cuda" else "the course's own, since torch's refuses CPU tensors"
    lines = [
        f"* {model}{f' with SyncBatchNorm ({whose})' if synced else ''}: relative error {fp32:.1e} in FP32, "
        f"{fp64:.1e} in FP64"
        for model, synced, fp32, fp64 in ddp_parity.errors(run)
    ]
    say("\n".join(lines))


def loss_figure(fp32: Records, fp64: Records) -> None:
    """Figure: how far the loss of DDP is from that of one process, step by step, in both formats."""
    floor = 1e-17
    same = max(loss_gap(fp64)) < 1e-9  # nats: a loss of about 1 has a spacing of 2e-16 in FP64
    message = "DDP follows one process as closely as rounding allows" if same else "DDP does not follow one process"
    fig, ax = figure(
        message, xlabel="optimizer step", ylabel="|loss(DDP) - loss(one process)|\n(nats)", records=fp32 + fp64
    )
    worst = {}
    for name, run in (("FP32", fp32), ("FP64", fp64)):
        gap = loss_gap(run)
        worst[name] = max(gap)
        points(ax, range(1, len(gap) + 1), [max(g, floor) for g in gap], label=name)
    ax.set_yscale("log")
    exponents = range(-14, 2, 3)
    ax.set_yticks([floor, *(10.0**n for n in exponents)], ["0", *(f"$10^{{{n}}}$" for n in exponents)])
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_ylim(floor / 3, 10)
    show(fig, alt=f"{message}: at most {worst['FP32']:.0e} in FP32 and {worst['FP64']:.0e} in FP64.")
    steps = len(loss_gap(fp32))
    say(
        f"Over {steps} steps the losses differ by at most {worst['FP32']:.0e} in FP32 and {worst['FP64']:.0e} in FP64."
        + (" What vanishes with more bits was rounding, amplified." if same else " That is no rounding.")
    )


def loss_gap(run: Records) -> list[float]:
    """|loss(DDP) - loss(one process)| of every step."""
    single, ddp = (run.one("loss", case=case).samples for case in ("single", "ddp"))
    return [abs(a - b) for a, b in zip(single, ddp, strict=True)]
