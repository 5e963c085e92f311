"""The roofline of one linear layer: above which batch is it limited by arithmetic instead of memory?"""

from __future__ import annotations

import math

from matplotlib.figure import Figure

from labs.explorers.controls import Menu, Slider, explore, powers
from labs.kit import hardware, plot
from labs.kit.errors import require
from labs.kit.record import Record

ITEMSIZE = {"FP32": 4, "TF32": 4, "BF16": 2, "FP16": 2}  # bytes; TF32 numbers are stored as FP32
INTENSITIES = (0.2, 5000.0)  # range of the axis, FLOP per byte


def intensity(rows: float, width: int, itemsize: int) -> float:
    """Return FLOP per byte of the three products of forward and backward of y = x W, with W of width x width.

    Each product has 2 rows width^2 FLOPs and moves two matrices of rows x width and one of width x width.
    """
    return 2 * rows * width / (itemsize * (width + 2 * rows))


def first_compute_bound(ridge: float, width: int, itemsize: int) -> float:
    """Return the batch at which `intensity` reaches `ridge`; inf if it never does."""
    rest = 2 * width - 2 * ridge * itemsize
    return ridge * itemsize * width / rest if rest > 0 else float("inf")


def draw(card: str, number_format: str, width: int, rows: int) -> tuple[Figure, str, str]:
    """Return the figure, its description, and the sentence below it."""
    spec, itemsize = hardware.require_spec(card), ITEMSIZE[number_format]
    tflops = spec.tflops(number_format.lower())
    require(tflops is not None, f"no sourced {number_format} peak of a {card}: choose another format")
    ridge, here = 1e3 * tflops / spec.bandwidth_gb_s, intensity(rows, width, itemsize)
    reached = min(tflops, here * spec.bandwidth_gb_s / 1e3)
    limit = "arithmetic" if here >= ridge else "memory"
    message = f"{rows:,} row{'s' * (rows > 1)}: {limit} limits the layer to {100 * reached / tflops:.0f} % of the peak"
    source = {"source": f"the peak and bandwidth published in {spec.source}"}
    origin = Record("roofline", "flop_s", "FLOP/s", (1e12 * tflops,), "modelled", provenance=source)
    fig, ax = plot.figure(message, xlabel="arithmetic intensity (FLOP per byte)", ylabel="TFLOP/s", records=[origin])
    ends = (INTENSITIES[0], ridge, INTENSITIES[1])
    roof = [min(tflops, i * spec.bandwidth_gb_s / 1e3) for i in ends]
    ax.loglog(ends, roof, color=plot.BLUE)
    ax.plot([here], [reached], "X", color=plot.VERMILION, markersize=11)
    beside = {"textcoords": "offset points"}
    ax.annotate(f"{rows:,} rows", (here, reached), (-10, 8), ha="right", color=plot.VERMILION, **beside)
    ax.annotate(f"{tflops:,g} TFLOP/s", (ridge, tflops), (6, 6), color=plot.BLUE, **beside)
    ax.axvline(ridge, color=plot.GREY, linestyle=":")
    ax.set(xlim=INTENSITIES, ylim=(0.05, 8000))
    first = first_compute_bound(ridge, width, itemsize)
    when = f"Compute-bound from {math.ceil(first):,} rows on." if math.isfinite(first) else "It is never compute-bound."
    sentence = f"{card}, {number_format}: the ridge is at {ridge:.0f} FLOP per byte; the layer has {here:.0f}. {when}"
    return fig, f"Roofline of {card} in {number_format}. {message}.", sentence


def roofline() -> None:
    """Explore a layer's roofline: card, number format, width of the layer, rows in the batch."""
    cards = [s.gpu for s in hardware.specs() if s.bandwidth_gb_s]
    explore(
        lambda card, number_format, width, rows: draw(card, number_format, int(width), int(rows)),
        card=Menu("card", cards, "H200 SXM"),
        number_format=Menu("number format", list(ITEMSIZE), "BF16"),
        width=Slider("features in and out", powers(256, 16384), 4096),
        rows=Slider("batch (rows)", powers(1, 8192), 64),
    )
