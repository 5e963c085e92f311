"""Figures and tables of notebook 04 about memory, the gradient scaler, lowered operations and communication."""

from __future__ import annotations

import pandas

from labs import amp_memory, autocast_ops, loss_scaling
from labs.kit.check import Prediction
from labs.kit.display import say, show_table
from labs.kit.plot import SERIES, curve, figure, log_axes, points, prediction, show
from labs.kit.record import Records
from labs.parts.memory import bert_memory

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def saved(run: Records, guess: Prediction, seq: int = 512, batch: int = 10) -> None:
    """Figure: share of a step's memory that AMP saves, for BERT-large and ResNet-152, against the batch."""
    share = bert_memory.saved_share(batch, seq)
    message = f"BERT-large, {batch} sequences of {seq}: AMP saves {share:.0%} of the memory, not half"
    fig, ax = figure(message, xlabel="batch size", ylabel="memory saved by AMP (%)", records=run, legend_below=True)
    for k, length in enumerate((128, 512)):
        values = [100 * bert_memory.saved_share(b, length) for b in BATCHES]
        curve(ax, BATCHES, values, label=f"BERT-large, {length} tokens, formula", color=SERIES[k])
        traced = amp_memory.saved_shares(run, "bert_large", length)
        ax.plot(list(traced), [100 * v for v in traced.values()], "x", color=SERIES[k], markeredgewidth=2,
                label=f"{length} tokens, traced (modelled)")  # fmt: skip
    resnet = amp_memory.saved_shares(run, "resnet152")
    curve(ax, list(resnet), [100 * v for v in resnet.values()], label="ResNet-152, traced", color=SERIES[2])
    prediction(ax, batch, guess)
    for line, text in ((50, "article: 50 %"), (20, "comment: 20 %")):
        ax.axhline(line, linestyle=":", color="black")
        ax.annotate(text, (BATCHES[0], line), va="bottom", fontsize=10)
    log_axes(ax, BATCHES)
    show(fig, alt=f"{message}. ResNet-152: {', '.join(f'{b}: {v:.0%}' for b, v in resnet.items())}.")
    say(_saved_text(guess, seq, batch, share))


def _saved_text(guess: Prediction, seq: int, batch: int, share: float) -> str:
    fp32, amp = (bert_memory.predict(batch, seq, p).total / 1e9 for p in ("fp32", "fp16"))
    limit = bert_memory.largest_saved_share(seq)
    return (
        f"{fp32:.1f} GB become {amp:.1f} GB. {guess.against(100 * share, 'modelled')} Parameters, gradients and "
        f"optimizer state stay in FP32, 16 bytes per parameter with Adam, and autocast adds 16-bit copies of the "
        f"parameters. With any batch, {limit:.0%} is the limit at {seq} tokens: LayerNorm, softmax and masks keep "
        "what they kept."
    )


def categories(seq: int = 512, batch: int = 10) -> pandas.DataFrame:
    """Memory of a training step of BERT-large in GB, by category. Modelled."""
    rows = {p: bert_memory.predict(batch, seq, p).by_category() for p in ("fp32", "fp16")}
    table = pandas.DataFrame(rows).rename(columns={"fp32": "FP32 (GB)", "fp16": "AMP (GB)"}) / 1e9
    table = table.rename(index={"optimizer": "optimizer state", "weight copies": "16-bit copies"})
    table.loc["together"] = table.sum()
    return table.round(2)


def predicted_against_measured(run: Records) -> pandas.DataFrame:
    """Small models, really trained: are the bytes kept for backward those that were predicted? Deterministic."""
    small = run.where("measured_bytes", category="activations")
    rows: dict[str, dict[str, str]] = {}
    for r in small:
        near = abs(amp_memory.relative_error(run, **_of(r.case))) < 0.02
        rows.setdefault(r.case["model"], {})[r.case["precision"].upper()] = "within 2 %" if near else "OFF"
    return pandas.DataFrame(rows).T


def _of(case: dict) -> dict:
    return {k: v for k, v in case.items() if k != "category"}


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


STOPS = "stops with an error"
OUTCOME = {"wrong": "silently wrong", "not finite": "NaN or infinite", "loses steps": "loses steps",
           "as FP32": "as in FP32", STOPS: STOPS}  # fmt: skip


def orders_table(run: Records) -> None:
    """What each order of calls does to 20 steps of training, against FP32. Deterministic up to rounding.

    First the orders that train on, by outcome; then those that stop, with what PyTorch says.
    """
    found = loss_scaling.outcomes(run)
    most = max(r["optimizer_steps"] for r in found)
    said = {OUTCOME[o]: [_order(r, most) for r in found if r["outcome"] == o] for o in OUTCOME if o != STOPS}
    show_table(pandas.DataFrame({"orders of calls": {o: "; ".join(names) for o, names in said.items() if names}}))
    stopped = {r["order"]: r["raised"] for r in found if r["outcome"] == STOPS}
    if stopped:
        show_table(pandas.DataFrame({"stops with": stopped}))


def _order(row: dict, most: int) -> str:
    """Its name, and how many optimizer steps it took, if not all of them."""
    return row["order"] + f" ({row['optimizer_steps']} of {most} steps)" * (row["optimizer_steps"] < most)


def ops_table(run: Records, model: str = "char_gpt") -> None:
    """Which operations of a running model autocast lowers to BF16. Deterministic."""
    rows = [
        {
            "autocast": r["treatment"],
            "operation": r["op"],
            "in": r["dtype_in"].upper(),
            "out": r["dtype_out"].upper(),
            "calls": r["calls"],
        }
        for r in autocast_ops.table(run, model, "bf16")
    ]
    show_table(pandas.DataFrame(rows).set_index("autocast"))


def lowered_flops(run: Records) -> pandas.DataFrame:
    """Share of the FLOPs of matrix products and convolutions that run in BF16, by model and phase. Deterministic."""
    rows: dict[str, dict[str, str]] = {}
    for r in run.where("lowered_flop_share", precision="bf16"):
        rows.setdefault(r.case["model"], {})[r.case["phase"]] = f"{r.value:.0%}"
    return pandas.DataFrame(rows).T


def _wire(run: Records, case: dict) -> float:
    return run.one("wire_bytes", precision=case["precision"], hook=case["hook"]).value


def wire_table(run: Records) -> pandas.DataFrame:
    """What DDP sends per step, by format and communication hook. Deterministic."""
    rows = [
        {
            "format": r.case["precision"].upper(),
            "hook": {"none": "none", "fp16": "FP16"}.get(r.case["hook"], r.case["hook"]),
            "gradients in buckets": f"{r.case['dtype'].replace('float32', 'FP32')}, {r.value / 1e6:.2f} MB",
            "on the wire": f"{_wire(run, r.case) / 1e6:.2f} MB",
        }
        for r in run.where("bucket_bytes")
    ]
    return pandas.DataFrame(rows).set_index("format")


def deprecated(run: Records) -> None:
    """What the names in the articles say today, in torch's own words."""
    rows = {
        r.case["interface"]: {"works here": r.case["works"], "warns": r.case["categories"] or "nothing"}
        for r in run.where("warnings")
    }
    show_table(pandas.DataFrame(rows).T)
