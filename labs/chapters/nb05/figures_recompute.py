"""Figures and tables of notebook 05 about activations that are computed again: memory, time, gradients, calls."""

from __future__ import annotations

from typing import Any

import pandas

from labs.activation_checkpointing import report
from labs.common.sources import on_gpus
from labs.kit.check import Prediction
from labs.kit.display import say, show_table
from labs.kit.measure import Estimate, estimate, paired_ratio
from labs.kit.plot import GREY, SERIES, curve, figure, log_axes, points, prediction, show
from labs.kit.record import Records

MB, GB = 1e6, 1e9
WAYS = {
    ("eager", "none"): "attention written out",
    ("sdpa", "none"): "fused attention",
    ("eager", "block"): "written out, recomputed",
    ("sdpa", "block"): "fused, recomputed",
}


def pareto(run: Records, guess: Prediction) -> None:
    """Figure: time against peak memory of a step, one mark per number of segments."""
    rows = [r for r in report.pareto(run) if r["policy"] != "none"]
    none = run.one("peak_bytes", part="pareto", policy="none").value / MB
    least = min(rows, key=lambda r: r["peak_bytes"])
    saved, longer = 1 - least["peak_bytes"] / MB / none, _percent(least["time_ratio"])
    price = f"for {longer} more time" if longer.low > 0 else "its price in time cannot be told in this run"
    message = f"{saved:.0%} less memory at the peak, {price}"
    fig, ax = figure(
        message, xlabel="peak memory of the step (MB)", ylabel="step time, none = 1 (x)", records=run, legend_below=True
    )
    points(ax, [none], [1.0], label="nothing recomputed", color=GREY)
    for k, (name, group) in enumerate(_groups(rows).items()):
        peaks = [r["peak_bytes"] / MB for r in group]
        points(ax, peaks, [r["time_ratio"] for r in group], label=name, color=SERIES[k])
    for r in rows:
        if r["policy"] in ("segments:1", "segments:2", "segments:4"):
            ax.annotate(
                f"{r['segments']:.0f}",
                (r["peak_bytes"] / MB, r["time_ratio"].value),
                xytext=(7, 4),
                textcoords="offset points",
                fontsize=10,
            )
    flops = max(r["flops_ratio"] for r in rows)
    ax.axhline(flops, linestyle="--", color=GREY)
    ax.annotate(
        "operations, counted", (0.9, flops), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=10
    )
    every = max((r for r in rows if r["policy"].count(":") == 1), key=lambda r: r["segments"])
    prediction(ax, every["peak_bytes"] / MB, 1 + float(guess) / 100)
    show(fig, alt=f"{message}. " + "; ".join(f"{r['policy']}: {r['time_ratio']}" for r in rows))
    _say_price(run, every, flops, guess)


def _groups(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {
        "segments: 1 to 24": [r for r in rows if r["policy"].count(":") == 1],
        "last segment kept": [r for r in rows if r["policy"].endswith("keep_last")],
        "selective": [r for r in rows if r["policy"] == "selective"],
    }


def _percent(ratio: Estimate) -> Estimate:
    """By how much longer, in %."""
    return Estimate(*(100 * (v - 1) for v in (ratio.value, ratio.low, ratio.high)), ratio.n, "%")


def _share(part: Estimate) -> Estimate:
    """In %."""
    return Estimate(*(100 * v for v in (part.value, part.low, part.high)), part.n, "%")


def _say_price(run: Records, every: dict[str, Any], flops: float, guess: Prediction) -> None:
    percent = _percent(every["time_ratio"])
    others = [f"{r.case['by']}: {' to '.join(f'{s:g}' for s in r.samples)} %" for r in report.published_prices()]
    kept, fell = report.fell(run, every["policy"])
    selective = next(r for r in report.pareto(run) if r["policy"] == "selective")
    said = [
        f"With every block recomputed: {percent} more time, {100 * (flops - 1):.0f} % more operations. "
        f"{guess.against(percent)}",
        f"Forward alone takes {_share(report.forward_share(run))} of a step: a third, if backward took twice as long.",
        f"Selective: {100 * (selective['flops_ratio'] - 1):.0f} % more operations, {selective['time_ratio']} the time.",
        f"Published: {'; '.join(others)}.",
        f"What forward keeps fell by a factor of {kept:.1f}, the peak by {fell:.2f}: parameters, optimizer state, "
        "gradients and the segment in work stay.",
    ]
    say("\n".join(f"* {line}" for line in said))


def segments(run: Records) -> None:
    """Figure: the peak against the number of segments, measured and predicted, on a chain that keeps little else."""
    rows = [r for r in report.pareto(run, "chain") if r["segments"]]
    none = run.one("peak_bytes", part="chain", policy="none").value / MB
    square = run.one("best_segments", part="chain")
    message = f"{square.case['blocks']} blocks: the peak is least near {square.value:.0f} segments, the square root"
    fig, ax = figure(message, xlabel="segments", ylabel="peak memory (MB)", records=run, size=(7.0, 3.5))
    counts = [r["segments"] for r in rows]
    points(ax, counts, [r["peak_bytes"] / MB for r in rows])
    curve(ax, counts, [r["predicted_peak_bytes"] / MB for r in rows], label="inputs of segments + one segment")
    ax.axhline(none, linestyle=":", color=GREY)
    ax.annotate("nothing recomputed", (counts[len(counts) // 2], none), ha="center", va="bottom", fontsize=10)
    log_axes(ax, [n for n in (1, 2, 3, 4, 6, 9, 12, 18, 36) if n in counts])
    ax.set_ylim(0, 1.1 * none)
    off = max(abs(r["predicted_peak_bytes"] / r["peak_bytes"] - 1) for r in rows)
    best = min(rows, key=lambda r: r["peak_bytes"])
    show(fig, alt=f"{message}. Measured least at {best['segments']:.0f}; the formula is off by at most {off:.0%}.")
    say(
        f"Measured least: {best['segments']:.0f} segments, {best['peak_bytes'] / MB:.1f} of {none:.1f} MB. The formula "
        f"is off by at most {off:.1%}."
    )


def recorded_peaks() -> None:
    """How near the formula comes to the peaks of recorded GPUs, and where the optimizer's own step is the peak."""
    on_gpus.told(on_gpus.runs("activation_checkpointing"), _peaks_text)


def _peaks_text(run: Records) -> str:
    """Each policy's peak against today's formula: parts of the record, of which `passing` belongs to backward alone."""
    real = {r.case["policy"]: r for r in run.where("peak_bytes", part="pareto")}
    parts: dict[str, dict[str, float]] = {}
    for r in run.where("peak_part_bytes", part="pareto"):
        parts.setdefault(r.case["policy"], {})[r.case["of"]] = r.value
    for of in parts.values():
        of["passing"] *= not of["optimizer's step"]
    worst = max((abs(sum(of.values()) / real[policy].value - 1) for policy, of in parts.items()))
    stepping = [real[policy] for policy, of in parts.items() if of["optimizer's step"]]
    first = min(r.case["segments"] for r in stepping)
    floor = sorted({f"{r.value / 1e6:.1f}" for r in stepping}, key=float)
    return (
        f"peaks of {len(parts)} policies are within {worst:.1%} of the formula. From {first} segments on they stay "
        f"at {' to '.join(dict.fromkeys((floor[0], floor[-1])))} MB, however fine the cut: by the formula that is "
        "the optimizer's step, where the activations are gone."
    )


def sizes(run: Records) -> None:
    """In a table and words: what two policies add to a step of few and of many rows, and which part of it is fixed."""
    rows = {}
    for r in run.where("step_s", part="sizes", policy="none"):
        n = r.case["rows"]
        rows[f"{n:,}"] = {"nothing recomputed": str(estimate(r.samples, "s"))}
        for (policy, size), more in report.added(run).items():
            if size == n:
                ratio = paired_ratio(run.one("step_s", part="sizes", policy=policy, rows=n).samples, r.samples)
                rows[f"{n:,}"] |= {
                    f"{report.NAMES.get(policy, policy)}: adds": str(more),
                    f"{policy}: step, nothing recomputed = 1": str(ratio),
                }
    show_table(pandas.DataFrame(rows).T.rename_axis("rows"))
    say("\n".join(f"* {line}" for line in report.fixed_price(run)))


def same_gradients(run: Records) -> None:
    """In words: are all policies' gradients those without, and what do operations and kept bytes come to?"""
    rows = run.where("gradients_equal", part="pareto")
    flops = [run.one("flops", policy=r.case["policy"]).value for r in rows]
    say(
        f"Gradients of all {len(rows)} policies, with dropout: **{report.same_gradients(run)}**. Operations: 1 to "
        f"{max(flops) / min(flops):.2f} times those without."
    )


def calls(run: Records) -> pandas.DataFrame:
    """What each way to call checkpoint() does to the gradients, situation by situation."""
    rows: dict[str, dict[str, str]] = {}
    for r in run.where("raised", part="variants"):
        case = {k: r.case[k] for k in ("scenario", "variant")}
        warned = "warns" if run.one("warnings", part="variants", **case).value else ""
        lost = int(run.one("parameters_without_gradient", part="variants", **case).value)
        found = r.case["error"].split(":")[0] or (f"{lost} parameters without gradient" if lost else "trains")
        rows.setdefault(case["scenario"], {})[case["variant"]] = ", ".join(filter(None, (found, warned)))
    return pandas.DataFrame(rows).T


def sequences(run: Records) -> pandas.DataFrame:
    """Activations of BERT-large for one sequence at the peak, by length, and the share that grows with its square."""
    columns = {}
    for (attention, policy), name in WAYS.items():
        rows = run.where("peak_bytes", part="sequences", attention=attention, policy=policy)
        columns[f"{name} GB"] = {r.case["seq"]: round(r.value / GB, 2) for r in rows}
    shares = run.where("square_share", attention="eager")
    columns["share that grows with the square"] = {r.case["seq"]: f"{r.value:.0%}" for r in shares}
    return pandas.DataFrame(columns).rename_axis("tokens")
