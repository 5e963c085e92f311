"""Figures and sentences of notebook 04 about formats, speed and accuracy; memory and order are in figures_memory.py."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pandas
import torch
from matplotlib.ticker import NullLocator

from labs import amp_training
from labs.amp_training import number_formats
from labs.chapters.nb04 import master_weights, published_speed
from labs.common import models
from labs.common.memory import saved_tensors
from labs.common.sources import on_gpus
from labs.kit.check import Prediction
from labs.kit.display import say, show_table
from labs.kit.measure import LEAST_ROUNDS, Estimate, estimate
from labs.kit.plot import GREY, SERIES, bars, curve, figure, log_axes, points, prediction, show
from labs.kit.record import Record, Records
from labs.mixed_precision import amp_report, matmul_ladder

FORMATS_BELOW = ("tf32", "bf16", "fp16")
NAMES = {
    "fp32": "FP32",
    "tf32": "TF32",
    "bf16": "BF16",
    "fp16": "FP16",
    "fp16, no scaling": "FP16, no scaling",
    "fp8 e4m3": "FP8 e4m3",
    "fp8 e5m2": "FP8 e5m2",
}


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
    small = {s: run.one("below_subnormal_share", scale=s, **case).value for s in scales}
    lost = {s: below + run.one("above_largest_share", scale=s, **case).value for s, below in small.items()}
    message = f"FP16 cannot hold {lost[1.0]:.1%} of these gradients; times {scale:,.0f}, {lost[scale]:.1%}"
    fig, ax = figure(
        message, xlabel="exponent: size of a gradient is 2 to this power", ylabel="gradients (%)", records=run
    )
    for k, s in enumerate(scales):
        r = run.one("gradient_exponent_count", scale=s, **case)
        low, high = r.case["exponents"]
        share = [100 * n / max(1.0, sum(r.samples)) for n in r.samples]
        label = "as they are" if s == 1 else f"times {s:,.0f}"
        curve(ax, list(range(low, high + 1)), share, kind="measured", label=label, color=SERIES[k])
    most = 1.25 * max(max(line.get_ydata()) for line in ax.lines)
    fp16 = number_formats.FORMATS["fp16"]
    last = round(math.log2(fp16.smallest_subnormal))
    normal, end = fp16.lowest_exponent, fp16.highest_exponent + 1
    areas = (
        (-60, last, "too small\nfor FP16", "#BDBDBD"),
        (last, normal, "subnormal:\nfewer digits", "#E3E3E3"),
        (end, 40, "too large", "#BDBDBD"),
    )
    for start, end, word, color in areas:
        ax.axvspan(start, end, color=color, zorder=0, linewidth=0)
        ax.text((start + end) / 2, 0.98 * most, word, ha="center", va="top", fontsize=10)
    ax.set_xlim(-60, 40)
    ax.set_ylim(0, most)
    narrow = run.one("below_normal_share", scale=1.0, **case).value - small[1.0]
    show(fig, alt=f"{message}. Model {model}, gradients of its {of}; a further {narrow:.1%} are subnormal in FP16.")
    zeros = {p: run.one("zero_share", scale=1.0, **(case | {"precision": p})).value for p in ("fp32", "fp16")}
    expected = run.one("expected_zero_share", scale=1.0, model=model, of=of, precision="fp16").value
    say(
        f"FP16 rounds what is below 2^{last} to 0 or up to 2^{last}. Calculated anew in FP16, {zeros['fp16']:.2%} of "
        f"the gradients are 0; the histogram predicts {expected:.2%}. In FP32 {zeros['fp32']:.2%} are 0."
    )


def accuracy(run: Records, guess: Prediction) -> None:
    """Figure: accuracy minus FP32's, seed by seed, of each format, for the loss as it is and times small factors.

    `guess`: the points of accuracy that FP16 without scaling loses with the smallest loss.
    """
    found = amp_training.against_fp32(run)
    exponents = sorted({e for _, e in found}, reverse=True)
    names = list(dict.fromkeys(name for name, _ in found))
    small = exponents[-1]
    rows = [(n, e) for e in exponents for n in names]
    fig, ax = figure(
        _accuracy_message(found),
        xlabel="accuracy minus FP32's (points)",
        ylabel="format",
        records=run,
        legend_below=True,
        size=(7.0, 4.4),
    )
    words = [NAMES[n] + (", scaled" if n == "fp16" else "") + ("" if e == 0 else "; small loss") for n, e in rows]
    for row, (name, exponent) in enumerate(rows):
        points_ = [100 * change for change in amp_training.changes(run, name, exponent)]
        (dots,) = ax.plot(
            points_, [row] * len(points_), "|", color=GREY, markersize=9, label="_" if row else "one seed (measured)"
        )
        dots.set_gid("kind:measured")
    for e in exponents:
        values = [found[row].scaled(100, "points") if row[1] == e else None for row in rows]
        bars(ax, words, values, label="loss as it is" if e == 0 else f"loss times 2^{e}")
    if ("fp16, no scaling", small) in rows:
        prediction(ax, -float(guess), rows.index(("fp16, no scaling", small)))
    ax.axvline(0, linestyle=":", color="black")
    ax.set_xscale("symlog", linthresh=1.0, linscale=1.2, base=10)
    ticks = [-50, -10, -3, -1, -0.5, 0, 0.5, 1]  # linear from -1 to 1, logarithmic beyond
    ax.set_xticks(ticks, [f"{t:g}" for t in ticks], fontsize=10)
    ax.xaxis.set_minor_locator(NullLocator())
    show(fig, alt=f"{_accuracy_message(found)}. " + "; ".join(amp_training.verdicts(run)))
    say(_accuracy_text(run, found, small, guess))


def _limit(changes: Iterable[Estimate]) -> float:
    """Points of accuracy that no interval reaches beyond, rounded up to a tenth."""
    return math.ceil(1000 * max(max(-e.low, e.high) for e in changes) - 1e-6) / 10


def _accuracy_message(found: dict[tuple[str, int], Estimate]) -> str:
    safe = [e for (name, _), e in found.items() if name != "fp16, no scaling"]
    if any(amp_training.told_apart(e) for e in safe):
        return "A format other than unscaled FP16 can be told from FP32 here"
    if safe[0].n < LEAST_ROUNDS:
        return "Too few seeds to tell any format from FP32"
    most = _limit(safe)
    return f"BF16 and scaled FP16: no difference from FP32 beyond {most:.1f} points"


def _accuracy_text(run: Records, found: dict[tuple[str, int], Estimate], small: int, guess: Prediction) -> str:
    seeds = len(run.where("test_accuracy")[0].samples)
    spread = 100 * amp_training.seed_spread(run, max(e for _, e in found))
    most = _limit(e for (name, _), e in found.items() if name != "fp16, no scaling")
    text = f"* {seeds} seeds. FP32 itself spreads over {spread:.1f} points between them"
    text += f", more than the {most:.1f} that pairs leave open: one run could not tell." if spread > most else "."
    if ("fp16, no scaling", small) in found:
        change = found["fp16, no scaling", small].scaled(100, "points")
        lost = Estimate(-change.value, -change.high, -change.low, change.n, change.unit)
        text += f"\n* FP16 without scaling, loss times 2^{small}, loses {lost}. {guess.against(lost)}"
    return text


def stored_weights() -> None:
    """Table: the same training with parameters in FP32, in FP32 under autocast, in BF16, and only rounded to it."""
    kinds = {
        "FP32": (torch.float32, False),
        "FP32, BF16 autocast": (torch.float32, True),
        "BF16": (torch.bfloat16, False),
        ROUNDED: (torch.float32, False, True),
    }
    found = {name: master_weights.train(*kind) for name, kind in kinds.items()}
    rows = {
        name: {"last loss (nats)": f"{loss:.2f}", "weights that a step leaves as they are": f"{unmoved:.1%}"}
        for name, (loss, unmoved) in found.items()
    }
    show_table(pandas.DataFrame(rows).T.rename_axis("parameters in"))
    say(stored_text(found))


ROUNDED = "FP32, rounded to BF16 after each step"


def stored_text(found: dict[str, tuple[float, float]]) -> str:
    """What the table says of BF16 parameters, from {name: (last loss, share of weights that a step leaves)}.

    With them Adam's averages and all products are in BF16, too. The row that only rounds tells what rounding does.
    """
    (exact, _), (lowered, unmoved), (rounded, _) = (found[name] for name in ("FP32", "BF16", ROUNDED))
    stays, behind = unmoved > 0.1, lowered > exact + 0.1
    told = f"With BF16 parameters {unmoved:.0%} of the first layer's weights do not move in a step"
    if stays and behind:
        share = (rounded - exact) / (lowered - exact)
        cause = (
            f"Rounding the parameters alone costs {rounded - exact:.2f}"
            if share > 0.1
            else "Rounding the parameters alone costs next to nothing: the rest of the training in BF16 does it"
        )
        return f"{told}, and after as many steps the loss is {lowered - exact:.2f} nats higher than with FP32. {cause}."
    if stays:
        return f"{told}, and yet the loss ends about where it ends with FP32."
    return f"{told}: at this learning rate rounding takes little away."


EAGER_GPT = "labs.common.models.text_models:char_gpt_eager"
MODELS = {"cnn": "CNN", "char_gpt": "GPT", EAGER_GPT: "GPT, eager attention", "mlp": "MLP"}
Speeds = dict[tuple[str, str], Estimate]


def speed(run: Records, guess: Prediction) -> None:
    """Figure: speed of each format's training step relative to FP32, by model."""
    found = amp_report.speed_ups(run)
    models = [m for m in MODELS if any(m == model for model, _ in found)]
    formats = list(dict.fromkeys(f for _, f in found))
    message = speed_message(found)
    fig, ax = figure(
        message,
        xlabel="speed of the step, FP32 = 1 (x)",
        ylabel="model, format",
        records=run,
        legend_below=True,
        size=(7.0, 4.2),
    )
    pairs = [(m, f) for m in models for f in formats if (m, f) in found]
    for name in formats:
        values = [found[pair] if pair[1] == name else None for pair in pairs]
        bars(ax, [f"{MODELS[m]}, {NAMES[f]}" for m, f in pairs], values, label=NAMES[name])
    if ("char_gpt", "bf16") in pairs:
        prediction(ax, float(guess), pairs.index(("char_gpt", "bf16")))
    ax.axvline(1, linestyle=":", color="black")
    log_axes(ax, [1 / 16, 1 / 4, 1, 4, 16])
    rows = "; ".join(f"{MODELS[m]}, {NAMES[f]}: {e}" for (m, f), e in found.items())
    show(fig, alt=f"{message}. {rows}.")
    if ("char_gpt", "bf16") in found:
        here = found["char_gpt", "bf16"]
        say(f"The GPT in BF16: {here}. {guess.against(here)} {attention_text(found)}{left_out_text(run)}")


def left_out_text(run: Records) -> str:
    """Which steps were not timed, since they would take too long; "" if there are none."""
    left = [
        f"{MODELS[r.case['model']]}, {NAMES[r.case['precision']]}"
        for r in run.where("skipped_step_s")
        if r.case.get("model") in MODELS
    ]
    return f" Left out, since they would take too long: {'; '.join(left)}." if left else ""


def speed_message(found: Speeds) -> str:
    """How many steps are shown to be faster than in FP32, and how many slower."""
    faster, slower = sum(e.low > 1 for e in found.values()), sum(e.high < 1 for e in found.values())
    rest = len(found) - faster - slower
    told = f"Of {len(found)} steps in other formats {faster} are faster than FP32, {slower} slower"
    return told + (f", {rest} cannot be told" if rest else "")


def attention_text(found: Speeds, name: str = "bf16") -> str:
    """Whether it is attention that makes the GPT fast or slow in a format: the other way to compute it tells."""
    if (EAGER_GPT, name) not in found:
        return ""
    fused, eager = found["char_gpt", name], found[EAGER_GPT, name]
    told = f"With eager attention, written out, it is {eager}"
    if eager.low > fused.high:
        return f"{told}: of the two kinds, fused attention gains less from {NAMES[name]} on this device, or loses more."
    if eager.high < fused.low:
        return f"{told}: of the two kinds, fused attention gains more from {NAMES[name]} on this device, or loses less."
    return (
        f"{told}: which kind of attention gains more from {NAMES[name]}, or loses less, cannot be told from this run."
    )


def published_speeds() -> None:
    """Table: published training speeds on GPUs, by format, with their sources."""
    show_table(pandas.DataFrame(published_speed.table()).set_index("GPU"))
    say(
        f"Published: GPT by S. Raschka ([LLMs-from-scratch]({published_speed.RASCHKA})), ResNet-50 by NVIDIA "
        f"([DeepLearningExamples]({published_speed.NVIDIA}))."
    )


def recorded_speeds() -> None:
    """Tables from recorded runs on GPUs: each format's speed over FP32, of models and of products."""
    for run in (runs := on_gpus.runs("mixed_precision")):
        show_table(pandas.DataFrame(_speed_rows(run)).set_index("what"))
    on_gpus.told(runs, _speeds_text)


def _speed_rows(run: Records) -> list[dict[str, Any]]:
    steps, products = amp_report.speed_ups(run), {p: matmul_ladder.ladder(run, p) for p in FORMATS_BELOW}
    rows = []
    for model in dict.fromkeys(model for model, _ in steps):
        base = run.one("step_s", model=model, precision="fp32")
        what = f"step of {model.rpartition(':')[2]}, {base.case['batch']} rows"
        rows.append({"what": what, "FP32": _seconds(base), **{NAMES[p]: str(steps[model, p]) for p in FORMATS_BELOW}})
    for side in sorted(products["bf16"]):
        base = run.one("step_s", part="matmul", side=side, precision="fp32", casts=False)
        found = {NAMES[p]: str(products[p][side]) for p in FORMATS_BELOW}
        rows.append({"what": f"product, {side} x {side}", "FP32": _seconds(base), **found})
    return rows


def _seconds(r: Record) -> str:
    """Its time, without the interval."""
    return str(estimate(r.samples, r.unit)).split(" [")[0]


def _speeds_text(run: Records) -> str:
    """What 16 bits give the models and the largest product."""
    found = [speed for (_, name), speed in amp_report.speed_ups(run).items() if name == "bf16"]
    faster, slower = (sum(hit) for hit in ([e.low > 1 for e in found], [e.high < 1 for e in found]))
    large, cast = (matmul_ladder.ladder(run, "bf16", casts=casts) for casts in (False, True))
    side, least = max(large), min(large)
    return (
        f"in BF16 {faster} of these {len(found)} models are faster than in FP32 and {slower} slower, while the "
        f"product of side {side} runs at {large[side]} the speed. Where autocast casts first, it is {cast[side]}, "
        f"and at side {least} {cast[least]} in place of {large[least]}.{_rows_text(run)}"
    )


def _rows_text(run: Records) -> str:
    """Whether the MLP's step waits for arithmetic, by the probe's pass of one row on the same card; "" without one."""
    for probe in on_gpus.runs("hardware_probe"):
        if probe.provenance["gpus"] == run.provenance["gpus"] and run.where("step_s", model="mlp"):
            one = {"model": "mlp", "batch_size": 1}
            seconds = probe.one("model_flop", **one).value / probe.one("model_flop_s", **one).value
            many = run.one("step_s", model="mlp", precision="fp32")
            return (
                f" The MLP's step takes {_seconds(many)} with {many.case['batch']:,} rows, and notebook 00's pass "
                f"with one row {seconds * 1e3:.2f} ms."
            )
    return ""


def recorded_bytes() -> None:
    """Table: what recorded GPUs kept for backward, beside what the trace with CUDA's rules says, in bytes."""
    for run in (runs := on_gpus.runs("mixed_precision")):
        show_table(pandas.DataFrame(_byte_rows(run)).set_index("model"))
    on_gpus.told(runs, lambda run: "bytes kept by a forward pass in FP32 and with autocast, weights' copies with them.")


def _byte_rows(run: Records) -> list[dict[str, Any]]:
    rows = []
    for r in run.where("saved_bytes"):
        case = r.case
        if case["precision"] != "tf32":  # rounds inside of kernels, keeps what FP32 keeps
            traced = saved_tensors.trace(models.make(case["model"]), case["batch"], case["precision"], "cuda")
            size = traced.activations + traced.weight_copies
            rows.append(
                {
                    "model": case["model"].rpartition(":")[2],
                    "rows": case["batch"],
                    "format": NAMES[case["precision"]],
                    "traced": f"{size:,}",
                    "kept": f"{r.value:,.0f}",
                    "error": f"{size / r.value - 1:+.4%}",
                }
            )
    return rows


def ladder(run: Records) -> None:
    """Figure: products in 16 bit against FP32, by size, with and without the casts that autocast makes."""
    found = {(f, c): matmul_ladder.ladder(run, f, c) for f in ("bf16", "fp16") for c in (False, True)}
    found = {key: ratios for key, ratios in found.items() if ratios}
    message = ladder_message(found)
    fig, ax = figure(
        message,
        xlabel="side of the square matrices",
        ylabel="speed, FP32 = 1 (x)",
        records=run,
        size=(6.8, 3.8),
        legend_below=True,
    )
    for (name, casts), ratios in found.items():
        label = NAMES[name] + (" with casts" if casts else "")
        color = SERIES[0 if name == "bf16" else 1] if casts else (SERIES[5] if name == "bf16" else SERIES[4])
        points(ax, list(ratios), list(ratios.values()), label=label, line=True, color=color)
    ax.axhline(1, linestyle=":", color=GREY)
    sides = sorted({s for v in found.values() for s in v})
    log_axes(ax, sides, [2.0**k for k in range(-6, 5, 2)])
    told = {k: ", ".join(f"{side}: {ratio.value:.3g}" for side, ratio in v.items()) for k, v in found.items()}
    show(fig, alt=f"{message}. " + "; ".join(f"{n}{', casts' if c else ''}, side {v}" for (n, c), v in told.items()))
    left = [
        f"{NAMES[r.case['precision']]} at side {r.case['side']}"
        for r in run.where("skipped_step_s", part="matmul")
        if not r.case["casts"]
    ]
    end = f" Left out, since they would take too long: {', '.join(left)}." if left else ""
    say(_casts_text(found) + end)


def ladder_message(found: dict[tuple[str, bool], dict[int, Estimate]]) -> str:
    """From which side on BF16 is shown to win, without and with autocast's casts."""
    if ("bf16", False) not in found:
        return "BF16 products were not measured here"
    plain, cast = (matmul_ladder.crossing(found.get(("bf16", casts), {})) for casts in (False, True))
    if plain is None and cast is None:
        tried = [ratio for casts in (False, True) for ratio in found.get(("bf16", casts), {}).values()]
        slower = all(ratio.high < 1 for ratio in tried)
        return f"BF16 products are {'slower than' if slower else 'not shown to overtake'} FP32 at every side tried"
    if plain == cast:
        return f"BF16 products win from side {plain} on, with or without autocast's casts"
    without, with_casts = (f"from side {side} on" if side else "at no side" for side in (plain, cast))
    return f"BF16 products win {without}, with autocast's casts {with_casts}"


def _casts_text(found: dict[tuple[str, bool], dict[int, Estimate]]) -> str:
    both = {c: found.get(("bf16", c), {}) for c in (False, True)}
    sides = sorted(set(both[False]) & set(both[True]))
    return (
        " ".join(
            f"At side {side} BF16 runs at {both[False][side]} the speed of FP32, "
            f"at {both[True][side]} if it casts first."
            for side in dict.fromkeys((sides[0], sides[-1]))
        )
        if sides
        else ""
    )
