"""Figures and tables of notebook 05 about what fills the memory, and what else empties it."""

from __future__ import annotations

import math
from typing import Any

import pandas

from labs.common.oracle.trace import CATEGORIES
from labs.common.sources import on_gpus
from labs.common.sources.published import stated
from labs.kit.check import Prediction
from labs.kit.display import say, show_table
from labs.kit.measure import estimate
from labs.kit.plot import SERIES, bars, curve, figure, prediction, show, stack
from labs.kit.record import Record, Records
from labs.memory_oracle import text as oracle_report
from labs.memory_oracle.chunked_loss import CONTEXT, WORDS

COLORS = {
    "parameters": SERIES[0],
    "gradients": SERIES[2],
    "optimizer": SERIES[5],
    "activations": SERIES[1],
    "temporaries": SERIES[4],
    "inputs/buffers": SERIES[3],
}
POLICIES = {"none": "nothing", "stage": "each stage", "block": "each block"}
RECOMPUTED = {"none": "nothing recomputed", "stage": "each stage recomputed", "block": "each block recomputed"}
GB = 1e9


def timeline(run: Records) -> None:
    """Figure: memory of one step of BERT-large by category, and its sum with every layer computed again."""
    line, again = (oracle_report.timeline(run, part="bert_large", policy=p) for p in ("none", "block"))
    case = run.where("timeline_op", part="bert_large", policy="none")[0].case
    sums = {
        p: [sum(b) / GB for b in zip(*t.bytes.values(), strict=True)] for p, t in (("none", line), ("block", again))
    }
    peaks = {policy: max(total) for policy, total in sums.items()}
    kept = line.bytes["activations"][sums["none"].index(peaks["none"])] / GB / peaks["none"]
    message = (
        f"BERT-large: {peaks['none']:.1f} GB, {kept:.0%} activations; {peaks['block']:.1f} GB with blocks recomputed"
    )
    drawn = [r for r in run if r.kind == "modelled"]  # nothing of it was allocated on this machine
    fig, ax = figure(
        message,
        xlabel="calls of operators since the step began",
        ylabel="memory (GB)",
        records=drawn,
        legend_below=True,
    )
    parts = {c: [b / GB for b in line.bytes[c]] for c in CATEGORIES if max(line.bytes[c]) > 0.005 * GB}
    ops = [*line.operations, 1.03 * line.operations[-1]]  # the optimizer's step: one operation, the width of a line
    stack(ax, ops, {c: [*b, b[-1]] for c, b in parts.items()}, kind="modelled", colors=[COLORS[c] for c in parts])
    more = [*again.operations, 1.03 * again.operations[-1]]
    curve(ax, more, [*sums["block"], sums["block"][-1]], label="sum, each block recomputed", color="black")
    ax.lines[-1].set_drawstyle("steps-post")  # as the areas: between two moments nothing is known to grow
    start = line.operations[line.phases.index("backward")]
    ax.axvline(start, color="black", linestyle=":", linewidth=1)
    for x, text in ((0, " forward"), (start, " backward")):
        ax.annotate(text, (x, 1.05 * peaks["none"]), fontsize=10)
    ax.set_ylim(0, 1.15 * peaks["none"])
    show(fig, alt=f"{message}. BERT-large, {case['batch']} sequences of {case['seq']} tokens, Adam, FP32.")


def resnet(run: Records, guess: Prediction) -> None:
    """Figure: peak memory of ResNet-152 against the batch, for three policies, with the articles' 11 and 7 GB."""
    rows = run.where("peak_op", part="resnet152")
    batches = sorted({r.case["batch"] for r in rows})
    found = {
        p: [oracle_report.peak(run, part="resnet152", policy=p, batch=b) / GB for b in batches]
        for p in POLICIES
        if run.where("peak_op", part="resnet152", policy=p)
    }
    at = {p: dict(zip(batches, values, strict=True)) for p, values in found.items()}
    few, many = batches[0], batches[-1]
    message = f"ResNet-152: {at['none'][few]:.0f} GB with {few} images, {at['none'][many]:.0f} with {many}"
    fig, ax = figure(
        message,
        xlabel="images per step (224 x 224, FP32, SGD with momentum)",
        ylabel="peak memory (GB)",
        records=[*run, *stated("B", "peak", "GB", 11, 7)],
        legend_below=True,
    )
    for k, (policy, values) in enumerate(found.items()):
        curve(ax, batches, values, label="" if k == 0 else "_", color=SERIES[k])
        ax.annotate(f"{RECOMPUTED[policy]} ", (many, values[-1]), ha="right", va="bottom", fontsize=10, color=SERIES[k])
    article = "article: from 11 to 7, batch not given"
    curve(ax, [few, many, many, few, many], [11, 11, math.nan, 7, 7], kind="published", label=article, color="black")
    prediction(ax, 64, guess)
    ax.set_ylim(bottom=0)
    show(fig, alt=f"{message}. " + "; ".join(f"{RECOMPUTED[p]}: {v[-1]:.1f} GB" for p, v in found.items()))
    most = at["none"][64]
    near = min(batches, key=lambda b: abs(at["none"][b] - 11))
    say(
        f"{guess.against(most, 'modelled')} The article's 11 GB are a batch of about {near}; with "
        f"each stage recomputed that batch takes {at['stage'][near]:.1f} GB, with each block "
        f"{at['block'][near]:.1f}."
    )


def chunked_loss(run: Records) -> None:
    """In words: the peak of GPT-2 with the logits of all tokens at once, and in chunks."""
    sizes = {
        r.case["chunks"]: oracle_report.peak(run, part="gpt2", chunks=r.case["chunks"])
        for r in run.where("peak_bytes", part="gpt2", category=CATEGORIES[0])
    }
    case = run.where("peak_bytes", part="gpt2")[0].case
    logits = case["batch"] * CONTEXT * WORDS * 4
    whole, parts = min(sizes), max(sizes)
    say(
        f"GPT-2 small, {case['batch']} sequences of {CONTEXT:,} tokens, FP32, each block recomputed: the logits are "
        f"{logits / GB:.2f} GB. The step takes **{sizes[whole] / GB:.1f} GB** with all of them at once, and "
        f"**{sizes[parts] / GB:.1f} GB** with {parts} chunks (modelled)."
    )


def checked(run: Records) -> pandas.DataFrame:
    """The oracle against this machine's own allocator: what tensors took, and all that was handed out, for kernels too.

    On a GPU the allocator does not tell the two apart: there the workspace column is 0.
    """
    rows = []
    for r in run.where("measured_bytes", part="small"):
        case = {k: r.case[k] for k in ("model", "policy", "optimizer")}
        error = oracle_report.relative_error(run, part="small", **case)
        beside = oracle_report.workspace(run, part="small", **case)
        rows.append(
            {
                **case,
                "traced MB": round(oracle_report.peak(run, part="small", **case) / 1e6, 2),
                "real tensors MB": round(r.value / 1e6, 2),
                "error": f"{error:+.2%}",
                "real peak with workspace MB": round(r.value * (1 + beside) / 1e6, 2),
                "workspace on top": f"{beside:+.0%}",
            }
        )
    return pandas.DataFrame(rows).set_index("model")


def recorded_checked() -> None:
    """Table: the oracle's traces against the allocators of recorded GPUs, in GB."""
    for run in (runs := on_gpus.runs("memory_oracle")):
        show_table(pandas.DataFrame(map(_of_gpu, *_with_trace(run))).set_index("step"))
    on_gpus.told(runs, _gpu_text)


def _with_trace(run: Records) -> tuple[list[Record], list[float]]:
    """The steps that were really run, and what the trace says of each, in bytes."""
    real = list(run.where("measured_bytes"))
    return real, [sum(p.value for p in run.where("peak_bytes", **r.case)) for r in real]


def _of_gpu(r: Record, traced: float) -> dict[str, Any]:
    c = r.case
    kept = "" if c["set_to_none"] else ", gradients kept"
    what = f"{c['batch']} sequences of {c['seq']}" if c["seq"] else f"{c['batch']} rows"
    return {
        "step": f"{c['model']}, {what}, {c['optimizer']}{kept}",
        "traced GB": f"{traced / 1e9:.3f}",
        "asked for GB": f"{r.value / 1e9:.3f}",
        "error": f"{traced / r.value - 1:+.2%}",
    }


def _gpu_text(run: Records) -> str:
    real, traced = _with_trace(run)
    worst = max((t / r.value - 1 for r, t in zip(real, traced, strict=True)), key=abs)
    over = max(run.one("allocated_bytes", **r.case).value / r.value - 1 for r in real)
    largest = max(real, key=lambda r: r.value)
    reserved = run.one("reserved_bytes", **largest.case).value
    return (
        f"the trace is off by {abs(worst):.1%} at most. Blocks handed out are up to {over:.1%} larger than what "
        f"was asked for; for the largest step {reserved / 1e9:.1f} GB were taken from the driver."
    )


def conditions(run: Records) -> pandas.DataFrame:
    """The memory figures of the articles, each with the step for which it is true."""
    rows = []
    for r in run.where("peak_op", part="bert_large"):
        case = {k: r.case[k] for k in ("batch", "seq", "policy", "set_to_none", "optimizer")}
        size = oracle_report.peak(run, part="bert_large", **case) / GB
        kept = "" if case["set_to_none"] else ", gradients kept in forward"
        step = f"{case['batch']} sequences of {case['seq']} tokens{kept}"
        fused = " (fused=True)" * (r.case["optimizer"] == "fused_adam")
        rows.append(
            {
                "model": f"BERT-large, Adam{fused}, FP32",
                "step": step,
                "recomputed": POLICIES[case["policy"]],
                "peak GB": f"{size:.1f}",
            }
        )
    return pandas.DataFrame(rows).set_index("model")


def largest(run: Records) -> pandas.DataFrame:
    """The largest batch of ResNet-152 in a given memory, by policy, with its peak and that of one image more."""
    rows = []
    for r in run.where("largest_batch", part="resnet152"):
        case = {k: r.case[k] for k in ("policy", "memory_gb")}
        here, over = (
            run.one(m, part="resnet152", **case).value / GB for m in ("largest_batch_bytes", "next_batch_bytes")
        )
        rows.append(
            {
                "recomputed": POLICIES[case["policy"]],
                f"largest batch in {case['memory_gb']:g} x 10^9 B": int(r.value),
                "its peak GB": round(here, 2),
                "with one image more": round(over, 2),
            }
        )
    return pandas.DataFrame(rows).set_index("recomputed")


def remedies(run: Records, guess: Prediction) -> None:
    """Figure: peak memory of two models under each remedy, relative to none."""
    models = {r.case["model"]: r.case["full_of"] for r in run.where("predicted_bytes", part="remedies")}
    names = list(dict.fromkeys(r.case["remedy"] for r in run.where("predicted_bytes", part="remedies")))
    message = "What helps depends on what fills the memory"
    fig, ax = figure(
        message, xlabel="peak memory of the step, none = 100 (%)", ylabel="remedy", records=run, legend_below=True
    )
    alt = []
    for k, (model, full_of) in enumerate(models.items()):
        case = {"part": "remedies", "model": model}
        none = run.one("peak_bytes", remedy="none", **case).value
        shares = {
            m: [next((100 * r.value / none for r in run.where(m, remedy=n, **case)), None) for n in names]
            for m in ("peak_bytes", "predicted_bytes")
        }
        label = f"{model}, full of {full_of}"
        color = (SERIES[0], SERIES[4])[k]  # dark and light: they are told apart in grey, too
        formula = [
            p if m is None else None for m, p in zip(shares["peak_bytes"], shares["predicted_bytes"], strict=True)
        ]
        bars(ax, names, shares["peak_bytes"], label=label, color=color)
        bars(
            ax,
            [n if m else f"{n} (modelled)" for n, m in zip(names, shares["peak_bytes"], strict=True)],
            formula,
            kind="modelled",
            label="_",
            color=color,
        )
        said = zip(names, shares["predicted_bytes"], strict=True)
        alt.append(f"{model}: " + ", ".join(f"{name} {share:.0f} %" for name, share in said))
    full = next(m for m, what in models.items() if what == "states")
    half, whole = (
        run.one("peak_bytes", part="remedies", model=full, remedy=r).value for r in ("half the batch", "none")
    )
    prediction(ax, 100 - float(guess), names.index("half the batch"))
    ax.set_xlim(left=0)
    show(fig, alt=f"{message}. {'; '.join(alt)}.")
    say(f"Half the batch of the {full}: {guess.against(estimate([100 * (1 - half / whole)], '%'))}")


def leaks(run: Records) -> pandas.DataFrame:
    """Loops with and without a leak: what the peak says, what growth says, and the line that was found."""
    rows = []
    for r in run.where("growth_bytes", part="leaks"):
        loop = r.case["loop"]
        sites = run.where("site_share", part="leaks", loop=loop)
        peak = run.one("peak_so_far_bytes", loop=loop).samples[-1]
        rows.append(
            {
                "loop": loop,
                "leak": "yes" if r.case["leaks"] else "no",
                "last peak MB": round(peak / 1e6, 1),
                "growth per step": f"{r.value:,.0f} B",
                "made at": sites[0].case["code"] if sites else "",
            }
        )
    return pandas.DataFrame(rows).set_index("loop")
