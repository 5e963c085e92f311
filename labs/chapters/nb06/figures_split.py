"""Figures and tables of notebook 06 about splitting inside of layers, states, and what is sent."""

from __future__ import annotations

import pandas

from labs import fully_sharded, tensor_parallel
from labs.common.cost_model.memory import sent_per_parameter
from labs.kit.check import Prediction
from labs.kit.display import say, show_table
from labs.kit.measure import Estimate, estimate, paired_ratio
from labs.kit.plot import GREY, SERIES, TINTS, figure, log_axes, points, show
from labs.kit.record import Records

WAYS = {
    "ddp": "DDP",
    "fsdp": "FSDP2",
    "fsdp, kept": "FSDP2, parameters kept",
    "fsdp, bf16": "FSDP2, BF16 parameters",
    "fsdp, offload": "FSDP2, CPU offload",
}
MODES = {"ddp": "DDP", "tensor": "tensor parallel", "pipeline": "1F1B pipeline"}


def traffic(run: Records) -> pandas.DataFrame:
    """All-reduces and bytes of tensor parallel training, counted as they pass, against the closed form."""
    rows = []
    for model, way in dict.fromkeys((r.case["model"], r.case["way"]) for r in run.where("all_reduces", split="even")):
        case = {"model": model, "way": way, "split": "even"}
        cells = {"model": model, "way": way.replace("dtensor", "DTensor")}
        for phase in ("forward", "backward"):
            count, closed = (
                next(r.value for r in run.where("all_reduces", phase=phase, **case) if r.kind == k)
                for k in ("measured", "modelled")
            )
            cells[f"all-reduces, {phase}"] = f"{count:.0f}" + f", closed form {closed:.0f}" * (count != closed)
        sent = {
            k: sum(r.value for r in run.where("sent_bytes", **case) if r.kind == k) for k in ("measured", "modelled")
        }
        cells["sent per rank"] = f"{sent['measured']:,.0f} B"
        cells["closed form"] = "equal" if sent["measured"] == sent["modelled"] else f"{sent['modelled']:,.0f} B"
        rows.append(cells)
    return pandas.DataFrame(rows).set_index("model")


def where_it_wins(run: Records) -> None:
    """Figure: speed of three ways over one device against the rows of the batch, for the widest layers measured."""
    width = max(r.case["width"] for r in run.where("step_s"))
    rows = sorted({r.case["rows"] for r in run.where("step_s", width=width)})
    found = {m: {n: _speed(run, m, width, n) for n in rows} for m in MODES}
    few, many = (_fastest(run, width, n) for n in (rows[0], rows[-1]))
    few, many = (
        name if max(found[m][n].low for m in MODES) > 1 else "none shown to beat one device"
        for name, n in ((few, rows[0]), (many, rows[-1]))
    )
    message = f"Fastest with {rows[0]} rows: {few}; with {rows[-1]}: {many}"
    fig, ax = figure(
        message,
        xlabel="rows in the batch of both ranks",
        ylabel="speed, one device = 1 (x)",
        records=run,
        legend_below=True,
    )
    for k, (mode, speeds) in enumerate(found.items()):
        points(ax, rows, list(speeds.values()), label=MODES[mode], line=True, color=SERIES[k])
    ax.axhline(1, linestyle=":", color=GREY)
    equal = tensor_parallel.bytes_cross_at(run, width)
    ax.axvline(equal, linestyle="--", color=GREY)
    ax.annotate(" equal bytes\n (modelled)", (equal, ax.get_ylim()[0]), va="bottom", fontsize=10)
    crossing = tensor_parallel.times_cross_between(run, width)
    if crossing:
        ax.axvspan(*crossing, color=TINTS[1], zorder=0, label="DDP overtakes tensor parallel")
    log_axes(ax, rows)
    show(
        fig,
        alt=f"{message}. Width {width}; bytes are equal at {equal:,.0f} rows. "
        + "; ".join(f"{MODES[m]}, {n} rows: {e}" for m, v in found.items() for n, e in v.items()),
    )
    sent = {m: run.one("sent_bytes_per_step", mode=m, width=width, rows=rows[0]).value for m in MODES}
    more = {m: run.one("sent_bytes_per_step", mode=m, width=width, rows=rows[-1]).value for m in MODES}
    said = "; ".join(f"{MODES[m]} {sent[m] / 1e6:.2f} MB and {more[m] / 1e6:.2f} MB" for m in MODES)
    say(
        f"Layers of width {width}. Sent per rank and step with {rows[0]} and with {rows[-1]:,} rows: {said}. "
        f"Tensor parallel and DDP send equally much at {equal:,.0f} rows, by the closed forms. {_crossing(run, width)}"
    )


def _crossing(run: Records, width: int) -> str:
    """A sentence on time: between which rows DDP overtakes tensor parallel, or that this run cannot tell."""
    found, crossing = tensor_parallel.faster(run, width), tensor_parallel.times_cross_between(run, width)
    if crossing:
        return (
            f"In time DDP overtakes between {crossing[0]:,} and {crossing[1]:,} rows: equal bytes are not equal times."
        )
    said = "; ".join(f"{n:,} rows {e}" for n, e in found.items())
    if all(e.low > 1 for e in found.values()):
        return f"In time tensor parallel is shown to be faster with all of these rows: DDP's time over its is {said}."
    if all(e.high < 1 for e in found.values()):
        return f"In time DDP is shown to be faster with all of these rows: its time over tensor parallel's is {said}."
    return (
        f"Where the order turns round in time, this run cannot tell: DDP's time over that of tensor parallel is {said}."
    )


def _fastest(run: Records, width: int, rows: int) -> str:
    """The fastest way by name, and each whose time over its own has an interval that holds 1."""
    found = sorted(MODES, key=lambda m: -_speed(run, m, width, rows).value)
    samples = {
        m: next(r for r in run.where("step_s", mode=m, width=width, rows=rows) if r.kind == "measured").samples
        for m in found
    }
    near = [m for m in found[1:] if paired_ratio(samples[m], samples[found[0]]).low <= 1]
    return " or ".join(MODES[m] for m in (found[0], *near))


def _speed(run: Records, mode: str, width: int, rows: int) -> Estimate:
    single, other = (
        next(r for r in run.where("step_s", mode=m, width=width, rows=rows) if r.kind == "measured")
        for m in ("single", mode)
    )
    return paired_ratio(single.samples, other.samples)


def sharded(run: Records, model: str, guess: Prediction) -> None:
    """In a table and words: FSDP2 against DDP, bytes held and bytes sent by each rank."""
    rows = {}
    for way in WAYS:
        case = {"way": way, "model": model}
        held = [_both(run, "bytes_per_rank", what=w, **case) for w in ("parameters", "gradients", "optimizer")]
        ops = dict.fromkeys(r.case["op"] for r in run.where("sent_bytes", **case))
        sent = [_both(run, "sent_bytes", op=op, **case) for op in ops]
        whole = _both(run, "gathered_bytes", **case)
        rows[WAYS[way]] = {
            "states held": f"{sum(a for a, _ in held) / 1e6:.1f} MB",
            "parameters whole at once": f"{whole[0] / 1e6:.1f} MB",
            "peak of the step": f"{run.one('peak_bytes', **case).value / 1e6:.1f} MB",
            "sent per step": f"{sum(a for a, _ in sent) / 1e6:.1f} MB",
            "closed forms": "exact" if all(a == b for a, b in [*held, *sent, whole]) else "NOT exact",
        }
    show_table(pandas.DataFrame(rows).T)
    held = {w: fully_sharded.held_bytes(run, w, model) for w in ("ddp", "fsdp")}
    peak = {w: run.one("peak_bytes", way=w, model=model).value for w in ("ddp", "fsdp", "fsdp, kept")}
    ratio = estimate([100 * held["fsdp"] / held["ddp"]], "%")
    times = {w: run.one("step_s", way=w, model=model).samples for w in ("ddp", "fsdp")}
    took = paired_ratio(times["fsdp"], times["ddp"])
    word = (
        "no difference that this run can show"
        if took.low <= 1 <= took.high
        else "in FP32, between ranks of this machine"
    )
    less = ""
    if peak["fsdp, kept"] < peak["fsdp"]:
        less = (
            " That the peak is lower still where all parameters stay whole is in no closed form: they count what is "
            "held, not what the gathers themselves need, and this run does not tell the two apart."
        )
    off = run.one("bf16_parameter_relative_error", way="fsdp, bf16", model=model).value
    say(
        f"FSDP2 holds {ratio.value:.0f} % of DDP's states. {guess.against(ratio)} At the peak of a step it has "
        f"{100 * peak['fsdp'] / peak['ddp']:.0f} % of DDP's bytes.{less} A step takes {took} as long: {word}. With "
        f"BF16 the parameters differ from one process's in FP32 by {100 * off:.2g} % after these steps."
    )


def accounting(run: Records, model: str) -> pandas.DataFrame:
    """Bytes that FSDP2 sends over those of DDP, by the format in which each travels: closed form, and counted."""
    formats = {"FP32": 4, "16 bits": 2}
    rows = []
    for weight, gradient, way in (
        ("FP32", "FP32", "fsdp"),
        ("16 bits", "FP32", "fsdp, bf16"),
        ("16 bits", "16 bits", None),
    ):
        w, g = formats[weight], formats[gradient]
        ratio = sent_per_parameter(2, True, w, g) / sent_per_parameter(2, False, w, g)
        ddp = fully_sharded.sent_per_step(run, "ddp", model)
        counted = f"{fully_sharded.sent_per_step(run, way, model) / ddp:.2f}" if way and ddp else ""
        rows.append(
            {
                "FSDP2 gathers parameters in": weight,
                "both sum gradients in": gradient,
                "bytes of FSDP2 over DDP's": f"{ratio:.2f}",
                "counted above": counted,
            }
        )
    return pandas.DataFrame(rows).set_index("FSDP2 gathers parameters in")


def _both(run: Records, metric: str, **case: object) -> tuple[float, float]:
    found = {r.kind: r.value for r in run.where(metric, **case)}
    return found["measured"], found["modelled"]
