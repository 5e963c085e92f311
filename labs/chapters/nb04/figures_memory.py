"""Figures and tables of notebook 04 about memory, the gradient scaler, lowered operations and communication."""

from __future__ import annotations

import inspect

import pandas
import torch

from labs import amp_memory, autocast_ops, loss_scaling
from labs.common.memory import bert_memory
from labs.common.models.large_models import BertShape
from labs.common.sources.published import stated
from labs.kit.check import Prediction
from labs.kit.display import say, show_table
from labs.kit.plot import SERIES, curve, figure, log_axes, points, prediction, show
from labs.kit.record import Records
from labs.loss_scaling.loss_scaling_trial import ORDERS

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHAPES = {"eager": BertShape(), "sdpa": BertShape(attention="sdpa")}
ATTENTION = {"eager": "attention written out", "sdpa": "fused attention"}


def saved(run: Records, guess: Prediction, seq: int = 512, batch: int = 10) -> None:
    """Figure: share of a step's memory that AMP saves, for BERT-large and ResNet-152, against the batch.

    The prediction is that of BERT-large with attention written out.
    """
    shares = {a: bert_memory.saved_share(batch, seq, shape) for a, shape in SHAPES.items()}
    message = (
        f"BERT-large, {batch} sequences of {seq}: AMP saves {shares['eager']:.0%} of the memory, "
        f"{shares['sdpa']:.0%} with fused attention"
    )
    fig, ax = figure(
        message,
        xlabel="batch size",
        ylabel="memory saved by AMP (%)",
        records=[*run, *stated("A", "saved_share", "%", 20), *stated("B", "saved_share", "%", 50)],
        legend_below=True,
    )
    for k, (attention, shape) in enumerate(SHAPES.items()):
        values = [100 * bert_memory.saved_share(b, seq, shape) for b in BATCHES]
        curve(ax, BATCHES, values, label=f"BERT-large, {ATTENTION[attention]}: formula", color=SERIES[k])
        traced = amp_memory.saved_shares(run, "bert_large", seq, attention=attention)
        ax.plot(
            list(traced),
            [100 * v for v in traced.values()],
            "x",
            color=SERIES[k],
            markeredgewidth=2,
            label="traced (modelled)",
        )
    resnet = amp_memory.saved_shares(run, "resnet152")
    curve(ax, list(resnet), [100 * v for v in resnet.values()], label="ResNet-152, traced", color=SERIES[2])
    prediction(ax, batch, guess)
    for line, text in ((50, "article: up to 50 % (published)"), (20, "comment: 20 % (published)")):
        ax.axhline(line, linestyle=":", color="black").set_gid("kind:published")
        ax.annotate(text, (BATCHES[0], line), va="bottom", fontsize=10)
    log_axes(ax, BATCHES)
    show(fig, alt=f"{message}. ResNet-152: {', '.join(f'{b}: {v:.0%}' for b, v in resnet.items())}.")
    say(_saved_text(guess, seq, batch))


def _saved_text(guess: Prediction, seq: int, batch: int) -> str:
    told = []
    for attention, shape in SHAPES.items():
        fp32, amp = (bert_memory.predict(batch, seq, p, shape).total / 1e9 for p in ("fp32", "fp16"))
        limit = bert_memory.largest_saved_share(seq, shape)
        told.append(
            f"With {ATTENTION[attention]}, {fp32:.1f} GB become {amp:.1f} GB; however large the batch, at most "
            f"{limit:.0%} are saved."
        )
    against = guess.against(100 * bert_memory.saved_share(batch, seq), "modelled")
    return f"{' '.join(told)} {against}"


def categories(seq: int = 512, batch: int = 10) -> pandas.DataFrame:
    """Memory of a training step of BERT-large in GB, by category and kind of attention. Modelled."""
    rows = {
        f"{p.upper().replace('FP16', 'AMP')}, {ATTENTION[a]} (GB)": bert_memory.predict(batch, seq, p, s).by_category()
        for a, s in SHAPES.items()
        for p in ("fp32", "fp16")
    }
    table = pandas.DataFrame(rows) / 1e9
    table = table.rename(index={"optimizer": "optimizer state", "weight copies": "16-bit copies"})
    table.loc["together"] = table.sum()
    return table.round(2)


def scaler_trace(run: Records, guess: Prediction, trace: str = "planted overflow") -> None:
    """Figure: the loss scale step by step through a planted overflow, with the prediction from the rule."""
    scale, skipped = (run.one(m, trace=trace) for m in ("scale", "skipped"))
    steps = list(range(1, len(scale.samples) + 1))
    missed = [s for s, lost in zip(steps, skipped.samples, strict=True) if lost]
    interval = scale.case["growth_interval"]
    message = f"One overflow: {len(missed)} step skipped, the scale halved; it grows again after {interval} good steps"
    fig, ax = figure(message, xlabel="step", ylabel="loss scale", records=run, size=(6.8, 3.5), legend_below=True)
    points(ax, steps, scale.samples, label="scale in the step")
    curve(ax, steps, run.one("predicted_scale", trace=trace).samples, label="the scaler's rule")
    if missed:
        points(ax, missed, [scale.samples[s - 1] for s in missed], label="step skipped", color=SERIES[1])
    prediction(ax, missed[0] + 1 if missed else steps[-1], max(float(guess), 1.0), label="scale after the overflow")
    low, high = min(scale.samples), max(scale.samples)
    ticks = [low / 2, low, high, 2 * high] if high > 2 * low else [low / 2, low, 2 * low]
    log_axes(ax, None, ticks)
    ax.set_yticks(ticks, [f"{t:,.0f}" for t in ticks])
    ax.set_xticks(range(0, len(steps) + 1, 5))
    show(fig, alt=f"{message}. Scale from {low:,.0f} to {high:,.0f} over {len(steps)} steps.")
    after = scale.samples[missed[0]] if missed else scale.samples[-1]  # that of the next step
    say(guess.against(after))


OUTCOME = {
    "wrong": "silently wrong",
    "not finite": "NaN or infinite",
    "loses steps": "loses steps",
    "as FP32": "as in FP32",
    "stops with an error": "stops with an error",
}


def orders_table(run: Records) -> None:
    """The orders of calls that train on and go wrong in 20 steps, against FP32. Deterministic up to rounding."""
    found = loss_scaling.outcomes(run)
    most = max(r["optimizer_steps"] for r in found)
    wrong = [
        (OUTCOME[o], _order(r, most))
        for o in ("wrong", "not finite", "loses steps")
        for r in found
        if r["outcome"] == o
    ]
    show_table(pandas.DataFrame(wrong, columns=["outcome", "the step"]).set_index("outcome"))


def optimizers_text(run: Records, order: str = "clip before unscale_") -> None:
    """Which orders end otherwise with AdamW, and how far parameters move if the gradient is clipped while scaled."""
    sgd, adamw = ({r["order"]: r["outcome"] for r in loss_scaling.outcomes(run, o)} for o in ("sgd", "adamw"))
    other = [f"{ORDERS[o].means} ({OUTCOME[adamw[o]]})" for o in sgd if sgd[o] != adamw[o]]
    ends = f"With AdamW these end otherwise: {'; '.join(other)}." if other else "With AdamW all end alike."
    moved = {o: run.one("update_ratio", order=order, optimizer=o).value for o in ("sgd", "adamw")}
    told = [f"with {name} {far(moved[o])}" for o, name in (("sgd", "SGD"), ("adamw", "AdamW"))]
    say(
        f"The table is that of SGD. {ends} If {ORDERS[order].means}, parameters move {', '.join(told)}; "
        f"with AdamW the outcome is *{OUTCOME[adamw[order]]}*."
    )


def far(moved: float) -> str:
    """A distance over that in FP32, in words that rounding on another machine does not change."""
    if moved < 0.01:
        return "less than 1 % as far as in FP32"
    return "about as far as in FP32" if abs(moved - 1) < 0.1 else f"{moved:.1f} times as far as in FP32"


def _order(row: dict, most: int) -> str:
    """What was written, and how many optimizer steps it took, if fewer than `most`."""
    taken = row["optimizer_steps"]
    return ORDERS[row["order"]].means + f" ({taken} of {most} steps taken)" * (taken < most)


def scaler_defaults() -> None:
    """What GradScaler does unless it is told otherwise, read from its signature."""
    default = {name: p.default for name, p in inspect.signature(torch.amp.GradScaler).parameters.items()}
    say(
        f"`GradScaler` begins at {default['init_scale']:,.0f}, times {default['backoff_factor']:g} after an overflow, "
        f"times {default['growth_factor']:g} after {default['growth_interval']:,} good steps in a row."
    )


def same_batch_text(run: Records) -> None:
    """What a missing zero_grad does to the gradient of one batch, taken three times."""
    told = []
    for order, name in (("no zero_grad", "in FP16 with a scaler"), ("no zero_grad, bf16", "in BF16")):
        norms = run.one("same_batch_norm_ratio", order=order).samples
        told.append(f"{name} {', '.join(f'{n:.3g}' for n in norms)}")
    say(f"Norms of the gradient of one batch, three times without `zero_grad`, the first one as 1: {'; '.join(told)}.")


def ops_table(run: Records, model: str = "char_gpt") -> None:
    """The operations of a model's forward pass under BF16 autocast, and torch's rule for each on a CPU and on CUDA."""
    rows = [
        {
            "operation": r["op"].removeprefix("_"),
            "calls": r["calls"],
            "ran in": r["dtype_in"].upper(),
            "result": r["dtype_out"].upper(),
            **{f"rule on {name}": autocast_ops.rule_of(run, r["op"], kind) for kind, name in KINDS.items()},
        }
        for r in autocast_ops.table(run, model, "bf16")
        if r["op"] != autocast_ops.CAST
    ]
    show_table(pandas.DataFrame(rows).set_index("operation"))


KINDS = {"cpu": "a CPU", "cuda": "CUDA"}


def rules_table(run: Records) -> None:
    """torch's rules where a CPU and CUDA differ, and how many operations were asked for."""
    by_op = {
        op: {f"on {name}": autocast_ops.rule_of(run, op, kind) for kind, name in KINDS.items()}
        for op in dict.fromkeys(r.case["op"] for r in run.where("has_rule"))
    }
    other = {op: rules for op, rules in by_op.items() if len(set(rules.values())) > 1}
    show_table(pandas.DataFrame(other).T)
    say(
        f"{len(other)} of the {len(by_op)} operations that torch was asked for have another rule on CUDA than on a CPU."
    )
