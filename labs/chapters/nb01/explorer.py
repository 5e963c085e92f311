"""The batch of notebook 01 with knobs."""

from __future__ import annotations

import math

from labs.batch_size import StepModel
from labs.kit.explore import Slider, explore, here, powers
from labs.kit.plot import curve, figure, log_axes, plain_number

BATCHES = powers(1, 4096)


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
