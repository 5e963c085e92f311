"""Figures and sentences of notebook 04 about formats, speed and accuracy; memory and order are in nb04_memory."""

from __future__ import annotations

import pandas

from labs import amp_report, amp_training, matmul_ladder, number_formats
from labs.kit.check import Prediction
from labs.kit.measure import differs, estimate
from labs.kit.plot import GREY, SERIES, bars, curve, figure, log_axes, points, prediction, show
from labs.kit.record import Records
from labs.kit.say import say

NAMES = {"fp32": "FP32", "tf32": "TF32", "bf16": "BF16", "fp16": "FP16", "fp16, no scaling": "FP16 without scaling",
         "fp8 e4m3": "FP8 e4m3", "fp8 e5m2": "FP8 e5m2"}  # fmt: skip


def format_table() -> pandas.DataFrame:
    """Bits, range and spacing of each format, from its bit layout. Modelled."""
    rows = [{**row, "format": NAMES[row["format"]]} for row in number_formats.table()]
    table = pandas.DataFrame(rows).set_index("format")
    return table.map(lambda v: f"{v:.3g}" if isinstance(v, float) else v)


def spacing() -> None:
    """Figure: distance of neighbouring numbers, relative to the number, over the range of each format."""
    message = "FP16 has finer steps than BF16, and a much narrower range"
    xlabel, ylabel = "exponent: numbers near 2 to this power", "relative distance of\nneighbours"
    fig, ax = figure(message, xlabel=xlabel, ylabel=ylabel, size=(6.8, 3.8), legend_below=True)
    for k, name in enumerate(("fp32", "tf32", "bf16", "fp16", "fp8 e4m3", "fp8 e5m2")):
        found = number_formats.spacings(name)
        curve(ax, [e for e, _ in found], [s / 2.0**e for e, s in found], label=NAMES[name], color=SERIES[k])
    ax.set_yscale("log", base=2)
    ax.set_yticks([2.0**e for e in (-23, -10, -7, -3, 0)], ["2^-23", "2^-10", "2^-7", "2^-3", "1"])
    ends = {n: number_formats.spacings(n) for n in ("fp16", "bf16")}
    text = "; ".join(f"{NAMES[n]}: 2^{s[0][0]} to 2^{s[-1][0]}" for n, s in ends.items())
    show(fig, alt=f"{message}. {text}.")


def gradients(run: Records, model: str, scale: float = 65536.0, of: str = "activations") -> None:
    """Figure: sizes of real gradients with FP16's limits, as they are and times the loss scale."""
    case = {"model": model, "of": of, "precision": "fp32"}
    scales = [1.0, scale]
    lost = {s: run.one("below_subnormal_share", scale=s, **case).value for s in scales}
    message = f"FP16 cannot hold {lost[1.0]:.1%} of these gradients; times {scale:,.0f}, {lost[scale]:.1%}"
    fig, ax = figure(message, xlabel="exponent: size of a gradient is 2 to this power",
                     ylabel="gradients (%)", records=run)  # fmt: skip
    for k, s in enumerate(scales):
        r = run.one("gradient_exponent_count", scale=s, **case)
        low, high = r.case["exponents"]
        share = [100 * n / max(1.0, sum(r.samples)) for n in r.samples]
        label = "as they are" if s == 1 else f"times {s:,.0f}"
        curve(ax, list(range(low, high + 1)), share, kind="measured", label=label, color=SERIES[k])
    for edge in (-24, 16):
        ax.axvline(edge, linestyle=":", color="black")
    ax.annotate("becomes 0", (-25, 1), ha="right", fontsize=10)
    ax.annotate("overflows", (17, 1), ha="left", fontsize=10)
    ax.set_xlim(-60, 32)
    ax.set_ylim(bottom=0)
    show(fig, alt=f"{message}. Model {model}, gradients of its {of}; FP16 ends at 2^-24 and 2^16.")
    zeros = {p: run.one("zero_share", scale=1.0, **(case | {"precision": p})).value for p in ("fp32", "fp16")}
    expected = run.one("expected_zero_share", scale=1.0, model=model, of=of, precision="fp16").value
    say(f"Calculated anew in FP16, {zeros['fp16']:.2%} are 0 ({zeros['fp32']:.2%} in FP32; expected from the "
        f"histogram: {expected:.2%}).")  # fmt: skip


def accuracy(run: Records, guess: Prediction) -> None:
    """Figure: accuracy against FP32's, seed by seed, of each format, for the loss as it is and times small factors."""
    found = amp_training.against_fp32(run)
    exponents = sorted({e for _, e in found}, reverse=True)
    names = list(dict.fromkeys(name for name, _ in found))
    same = all(not differs(e, 0.0) for (name, _), e in found.items() if name != "fp16, no scaling")
    message = "BF16 and FP16 with scaling cannot be told from FP32" if same else "A format can be told from FP32 here"
    fig, ax = figure(message, xlabel="test accuracy minus that of FP32, same seed (points)", ylabel="format",
                     records=run, legend_below=True)  # fmt: skip
    for e in exponents:
        values = [found[n, e].scaled(100, "points") for n in names]
        bars(ax, [NAMES[n] for n in names], values, label="loss as it is" if e == 0 else f"loss times 2^{e}")
    prediction(ax, float(guess), names.index("fp16, no scaling"))
    ax.axvline(0, linestyle=":", color="black")
    show(fig, alt=f"{message}. " + "; ".join(amp_training.verdicts(run)))
    seeds = len(run.where("test_accuracy")[0].samples)
    spread = 100 * amp_training.seed_spread(run)
    least = found["fp16, no scaling", exponents[-1]].scaled(100, "points")
    say(
        f"* {seeds} seeds; FP32 itself spreads over {spread:.1f} points between them.\n* FP16 without scaling, loss "
        f"times 2^{exponents[-1]}: {least}. {guess.against(least)}"
    )


def speed(run: Records, guess: Prediction) -> None:
    """Figure: speed of each format's training step relative to FP32, by model."""
    found = amp_report.speed_ups(run)
    models = list(dict.fromkeys(m for m, _ in found))
    formats = list(dict.fromkeys(f for _, f in found))
    fastest = max(found, key=lambda k: found[k].value)
    message = (
        f"{NAMES[fastest[1]]} makes the {fastest[0]} {found[fastest].value:.1f} times as fast, and not every model"
    )
    fig, ax = figure(message, xlabel="speed of the training step, FP32 = 1 (x, logarithmic)", ylabel="model",
                     records=run, legend_below=True)  # fmt: skip
    for name in formats:
        bars(ax, models, [found.get((m, name)) for m in models], label=NAMES[name])
    prediction(ax, float(guess), models.index("char_gpt"), label="char_gpt, BF16")
    ax.axvline(1, linestyle=":", color="black")
    log_axes(ax, [1 / 16, 1 / 4, 1, 4, 16])
    rows = "; ".join(f"{m}, {NAMES[f]}: {e}" for (m, f), e in found.items())
    show(fig, alt=f"{message}. {rows}.")
    here = found["char_gpt", "bf16"]
    say(f"{rows}. For the GPT with BF16: {guess.against(here)}")


def ladder(run: Records) -> None:
    """Figure: products in 16 bit against FP32, by size, with and without the casts that autocast makes."""
    found = {(f, c): matmul_ladder.ladder(run, f, c) for f in ("bf16", "fp16") for c in (False, True)}
    crossing = {k: matmul_ladder.crossing(v) for k, v in found.items()}
    plain, cast = crossing["bf16", False], crossing["bf16", True]
    message = f"BF16 products win from side {plain}; with autocast's casts from {cast}"
    if plain is None:
        message = "BF16 products never overtake FP32 here"
    fig, ax = figure(message, xlabel="side of the square matrices", ylabel="speed, FP32 = 1 (x)", records=run,
                     size=(6.8, 3.8), legend_below=True)  # fmt: skip
    for (name, casts), ratios in found.items():
        label = NAMES[name] + (" with casts" if casts else "")
        color = SERIES[0 if name == "bf16" else 1] if casts else (SERIES[5] if name == "bf16" else SERIES[4])
        points(ax, list(ratios), list(ratios.values()), label=label, line=True, color=color)
    ax.axhline(1, linestyle=":", color=GREY)
    sides = sorted({s for v in found.values() for s in v})
    log_axes(ax, sides, [2.0**k for k in range(-6, 5, 2)])
    show(fig, alt=f"{message}. " + "; ".join(f"{n}{', casts' if c else ''}: {v}" for (n, c), v in crossing.items()))
    left = [f"{NAMES[r.case['precision']]} at side {r.case['side']}" for r in run.where("skipped_step_s", part="matmul")
            if not r.case["casts"]]  # fmt: skip
    end = f" Left out, since they would take too long: {', '.join(left)}." if left else ""
    step = estimate(run.where("step_s", part="matmul", precision="fp32")[0].samples, "s")
    say(f"The smallest product takes {step} in FP32: there a cast costs more than any format can gain.{end}")
