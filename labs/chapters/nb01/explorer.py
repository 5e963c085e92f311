"""Batch and learning rate of notebook 01 with knobs."""

from __future__ import annotations

import math

from labs import lr_scaling
from labs.batch_size import StepModel
from labs.kit.explore import Menu, Slider, explore, here, powers
from labs.kit.plot import SERIES, curve, figure, log_axes, plain_number

BATCHES = powers(1, 4096)
BASE = lr_scaling.Config()  # the experiment's base batch, base rate, images and epochs


def batch() -> None:
    """Explore what a larger batch buys: throughput of a step of t0 + b / r seconds."""
    explore(
        draw_batch,
        fixed_ms=Slider("fixed part of a step (ms)", (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50), 1),
        sample_us=Slider("each sample adds (µs)", (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000), 20),
        batch=Slider("batch (samples)", BATCHES, 32),
    )


def draw_batch(fixed_ms: float, sample_us: float, batch: float) -> tuple:
    """Share of the throughput that no batch exceeds, against the batch."""
    step = StepModel(1, 2, fixed_ms / 1e3, sample_us / 1e6)
    limit = step.samples_per_s(math.inf)
    shares = {b: 100 * step.samples_per_s(b) / limit for b in BATCHES}
    half = plain_number(float(f"{step.half_batch:.3g}"))
    message = f"Batch {batch:,.0f}: {shares[batch]:.0f}% of the limit; half of it is at {half}"
    fig, ax = figure(message, xlabel="batch (samples)", ylabel="share of the limit (%)", legend_below=True)
    curve(ax, BATCHES, list(shares.values()), label="throughput b / (t0 + b / r)")
    here(ax, batch, shares[batch])
    log_axes(ax, BATCHES[::2])
    ax.set_xlim(BATCHES[0] / 1.2, BATCHES[-1] * 1.2)
    ax.set_ylim(0, 105)
    if BATCHES[0] <= step.half_batch <= BATCHES[-1]:
        ax.axvline(step.half_batch, color="black", linestyle=":", linewidth=1)
        right = step.half_batch < 100
        ax.annotate(f" half: {half} ", (step.half_batch, 1), fontsize=10, ha="left" if right else "right")
    gain = step.samples_per_s(2 * batch) / step.samples_per_s(batch)
    longer = step.step_s(2 * batch) / step.step_s(batch)
    sentence = (
        f"A step of {1e3 * step.step_s(batch):.3g} ms trains {plain_number(round(step.samples_per_s(batch)))} "
        f"samples/s of at most {plain_number(round(limit))}. Twice the batch: {gain:.2f} times the samples/s, "
        f"{longer:.2f} times the time of a step."
    )
    return fig, f"Share of the limit against the batch. {message}.", sentence


def learning_rate() -> None:
    """Explore what a rule makes of the learning rate when ranks and batch grow."""
    explore(
        draw_learning_rate,
        ranks=Slider("ranks", powers(1, 64), 4),
        batch_per_rank=Slider("batch of each rank (samples)", powers(8, 128), 128),
        rule=Menu("rule", lr_scaling.RULES, "linear, warm-up"),
        warm_up_percent=Slider("warm-up (% of all steps)", (5, 10, 25, 50, 75, 100), 50),
    )


def draw_learning_rate(ranks: float, batch_per_rank: float, rule: str, warm_up_percent: float) -> tuple:
    """Learning rate against epochs for the whole batch of all ranks, and for the base batch."""
    whole = int(ranks * batch_per_rank)
    factor = whole / BASE.base_batch
    steps = BASE.epochs * BASE.samples // whole
    warm_up = round(warm_up_percent / 100 * steps)
    every = max(1, steps // 200)
    drawn = [*range(0, steps, every), steps - 1]
    base = lr_scaling.base_rate(BASE, rule)
    rates = [lr_scaling.learning_rate(s, base, factor, rule, warm_up) for s in drawn]
    last = lr_scaling.learning_rate(steps, base, factor, rule, 0)
    message = f"Batch {whole:,}, {plain_number(factor)} times the base batch: learning rate {last:.3g}"
    fig, ax = figure(message, xlabel="epoch", ylabel="learning rate (logarithmic)", legend_below=True)
    epochs = [s * whole / BASE.samples for s in drawn]
    curve(ax, epochs, rates, label=f"batch {whole:,}, rule: {rule}", color=SERIES[0])
    ends = [0, BASE.epochs]
    curve(ax, ends, [base] * 2, label=f"base batch {BASE.base_batch}")
    log_axes(ax, None, [0.00125 * 4**k for k in range(7)])
    ax.set_xlim(-0.2, BASE.epochs + 0.2)
    ax.set_ylim(0.0008, 8)
    grows = f"{warm_up:,} of them warm up. " if "warm-up" in rule else ""
    base_steps = lr_scaling.predict(BASE)[1]
    sentence = (
        f"{ranks:.0f} ranks x {batch_per_rank:.0f} samples = {whole:,}. {BASE.epochs} epochs are {steps:,} steps in "
        f"place of {base_steps:,}. {grows}Whether the model still learns as well with {last:.3g}, only a run can tell."
    )
    return fig, f"Learning rate over {BASE.epochs} epochs. {message}, by the rule {rule!r}.", sentence
