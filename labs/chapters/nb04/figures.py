"""Figures and sentences of notebook 04 about formats, speed and accuracy; memory and order are in nb04_memory."""

from __future__ import annotations

import pandas

from labs import amp_training
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import Estimate, differs, estimate
from labs.kit.plot import GREY, SERIES, bars, curve, figure, log_axes, points, prediction, show
from labs.kit.record import Records
from labs.parts.precision import amp_report, matmul_ladder, number_formats

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
    fig, ax = figure(message, xlabel=xlabel, ylabel=ylabel, size=(6.8, 3.8))
    for k, name in enumerate(("fp32", "tf32", "bf16", "fp16", "fp8 e4m3", "fp8 e5m2")):
        found = number_formats.spacings(name)
        curve(ax, [e for e, _ in found], [s / 2.0**e for e, s in found], label="_", color=SERIES[k])
        end, last = found[-1]
        place = {"fp16": "bottom", "fp8 e5m2": "bottom", "fp8 e4m3": "top"}.get(name, "center")
        ax.annotate(f" {NAMES[name]}", (end, last / 2.0**end), va=place, fontsize=10)
    ax.set_xlim(right=165)
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
    most = 1.05 * max(max(line.get_ydata()) for line in ax.lines)
    for start, end, word in ((-60, -24, "too small for FP16"), (16, 40, "too large")):
        ax.axvspan(start, end, color="#E3E3E3", zorder=0)
        ax.text((start + end) / 2, 0.93 * most, word, ha="center", fontsize=10)
    ax.set_xlim(-60, 40)
    ax.set_ylim(0, most)
    show(fig, alt=f"{message}. Model {model}, gradients of its {of}; FP16 ends at 2^-24 and 2^16.")
    zeros = {p: run.one("zero_share", scale=1.0, **(case | {"precision": p})).value for p in ("fp32", "fp16")}
    expected = run.one("expected_zero_share", scale=1.0, model=model, of=of, precision="fp16").value
    say(f"Below 2^-24, FP16 rounds up to 2^-24 or down to 0. Calculated anew in FP16, {zeros['fp16']:.2%} of the "
        f"gradients are 0; the histogram lets expect {expected:.2%}. In FP32 {zeros['fp32']:.2%} are.")  # fmt: skip


def accuracy(run: Records, guess: Prediction) -> None:
    """Figure: accuracy against FP32's, seed by seed, of each format, for the loss as it is and times small factors.

    `guess`: the points of accuracy that FP16 without scaling loses with the smallest loss.
    """
    found = amp_training.against_fp32(run)
    exponents = sorted({e for _, e in found}, reverse=True)
    names = list(dict.fromkeys(name for name, _ in found))
    same = all(not differs(e, 0.0) for (name, _), e in found.items() if name != "fp16, no scaling")
    message = "BF16 and FP16 with scaling cannot be told from FP32" if same else "A format can be told from FP32 here"
    fig, ax = figure(message, xlabel="accuracy minus FP32's, same seed (points)", ylabel="format",
                     records=run, legend_below=True)  # fmt: skip
    small = exponents[-1]
    rows = [(n, e) for e in exponents for n in names]
    words = [NAMES[n] + ("" if e == 0 else ", small loss") for n, e in rows]
    for e in exponents:
        values = [found[row].scaled(100, "points") if row[1] == e else None for row in rows]
        bars(ax, words, values, label="loss as it is" if e == 0 else f"loss times 2^{e}")
    prediction(ax, -float(guess), rows.index(("fp16, no scaling", small)))
    ax.axvline(0, linestyle=":", color="black")
    show(fig, alt=f"{message}. " + "; ".join(amp_training.verdicts(run)))
    seeds = len(run.where("test_accuracy")[0].samples)
    spread = 100 * amp_training.seed_spread(run)
    change = found["fp16, no scaling", small].scaled(100, "points")
    lost = Estimate(-change.value, -change.high, -change.low, change.n, change.unit)
    say(
        f"* {seeds} seeds; FP32 itself spreads over {spread:.1f} points between them.\n* FP16 without scaling, loss "
        f"times 2^{small}, loses {lost}. {guess.against(lost)}"
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
    fig, ax = figure(message, xlabel="speed of the training step, FP32 = 1 (x, logarithmic)", ylabel="model, format",
                     records=run, legend_below=True)  # fmt: skip
    pairs = [(m, f) for m in models for f in formats if (m, f) in found]
    for name in formats:
        values = [found[pair] if pair[1] == name else None for pair in pairs]
        bars(ax, [f"{m}, {NAMES[f]}" for m, f in pairs], values, label=NAMES[name])
    prediction(ax, float(guess), pairs.index(("char_gpt", "bf16")))
    ax.axvline(1, linestyle=":", color="black")
    log_axes(ax, [1 / 16, 1 / 4, 1, 4, 16])
    rows = "; ".join(f"{m}, {NAMES[f]}: {e}" for (m, f), e in found.items())
    show(fig, alt=f"{message}. {rows}.")
    here = found["char_gpt", "bf16"]
    say(f"The GPT in BF16: {here}. {guess.against(here)}")


def ladder(run: Records) -> None:
    """Figure: products in 16 bit against FP32, by size, with and without the casts that autocast makes."""
    found = {(f, c): matmul_ladder.ladder(run, f, c) for f in ("bf16", "fp16") for c in (False, True)}
    crossing = {k: matmul_ladder.crossing(v) for k, v in found.items()}
    plain, cast = crossing["bf16", False], crossing["bf16", True]
    message = f"BF16 products win from side {plain}, with autocast's casts from {cast}"
    if plain == cast:
        message = f"BF16 products win from side {plain}, with or without autocast's casts"
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
