"""The roofline of notebook 00 with knobs: which card, number format, model and batch is limited by what?"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from torch import nn
from torch.nn.functional import mse_loss

from labs.chapters.nb00.figures_limits import roof
from labs.common import models
from labs.common.models import Workload
from labs.common.timing.limits import FORMATS
from labs.common.timing.roofline import Work, attainable_flop_s, ridge_flop_per_byte, training_step_work
from labs.kit import hardware
from labs.kit.errors import BadInput
from labs.kit.explore import Menu, Slider, explore, here, powers
from labs.kit.plot import curve, figure, log_axes, plain_number, points
from labs.kit.record import Record, Records

LAYER = 4096  # features in and out of the single linear layer
ITEMSIZE = {"FP32": 4, "TF32": 4, "BF16": 2, "FP16": 2}  # bytes; TF32 is FP32 in memory
HERE = "this machine, measured"
INTENSITIES = powers(1 / 4, 4096)  # FLOP per byte
Factory = Callable[[], Workload]


def layer() -> Workload:
    """One linear layer without bias: the smallest model whose intensity depends on the batch alone."""
    import torch

    with torch.device("meta"):
        module = nn.Linear(LAYER, LAYER, bias=False)
    return Workload(module, lambda rows: (torch.empty(rows, LAYER), torch.empty(rows, LAYER)), mse_loss)


def roofline(run: Records | None = None, model: str | Factory | None = None) -> None:
    """Explore the roofline. `run`: a hardware_probe run whose limits become one more card, in FP32.

    `model`: your own, as package.module:factory or a function that returns a labs.models.Workload.
    """
    factories: dict[str, Factory] = {f"layer {LAYER} x {LAYER}": layer}
    factories |= {name: models.MODELS[name] for name in ("mlp", "cnn", "cnn_batchnorm")}
    if model is not None:
        own = model if callable(model) else lambda: models.build(model)
        factories = {"yours": own, **factories}
    lines = {name: cache(lambda f=factory: work_line(f)) for name, factory in factories.items()}
    first = next(iter(lines))
    lines[first]()  # what is wrong with a model is told now
    cards = [s.gpu for s in hardware.specs() if s.bandwidth_gb_s]

    def draw(card: str, number_format: str, model: str, batch: float) -> tuple:
        if card == HERE:
            return _draw(f"{HERE} in FP32", "FP32", *roof(run), model, lines[model](), int(batch), run)
        spec = hardware.spec(card)
        peak, bandwidth = spec.tflops(_key(number_format)), spec.bandwidth_gb_s * 1e9
        where = f"{card}, {number_format}"
        if peak is None:
            raise BadInput(f"{card}: no sourced {number_format} peak, and none is guessed. Choose another format.")
        source = f"the roof from peak and bandwidth published in {spec.source}"
        origin = Records(
            [Record("datasheet", "flop_s", "FLOP/s", (peak * 1e12,), "modelled", provenance={"source": source})]
        )
        return _draw(where, number_format, peak * 1e12, bandwidth, model, lines[model](), int(batch), origin)

    explore(
        draw,
        card=Menu("card", [HERE, *cards] if run is not None else cards, HERE if run is not None else "H100 SXM"),
        number_format=Menu("number format", list(ITEMSIZE), "BF16"),
        model=Menu("model (forward and backward)", list(lines), first),
        batch=Slider("batch (rows)", powers(1, 8192), 64),
    )


def work_line(factory: Factory) -> tuple[Work, Work]:
    """(fixed part, part per row) of a training step's FLOPs and FP32 bytes; each is a straight line over the batch."""
    try:
        two, four = (training_step_work(factory(), rows) for rows in (2, 4))
    except BadInput:
        raise
    except Exception as e:
        told = " ".join(str(e).split())[:200]
        raise BadInput(f"the model's step cannot be counted: {type(e).__name__}: {told}") from e
    row = Work((four.flop - two.flop) / 2, (four.bytes - two.bytes) / 2)
    return Work(two.flop - 2 * row.flop, two.bytes - 2 * row.bytes), row


def at_batch(line: tuple[Work, Work], batch: float, itemsize: int) -> Work:
    """A step with `batch` rows whose tensors all have `itemsize` bytes per number."""
    fixed, row = line
    return Work(fixed.flop + batch * row.flop, (fixed.bytes + batch * row.bytes) * itemsize / 4)


def first_compute_bound(line: tuple[Work, Work], itemsize: int, ridge: float) -> float:
    """The least batch whose intensity is above `ridge` (FLOP per byte); inf if none is."""
    fixed, row = line
    per_row = row.flop - ridge * row.bytes * itemsize / 4
    missing = ridge * fixed.bytes * itemsize / 4 - fixed.flop
    return math.inf if per_row <= 0 else max(1, math.floor(missing / per_row) + 1)


def _key(number_format: str) -> str:
    return next(key for key, name in FORMATS.items() if name == number_format)


def _draw(
    where: str,
    number_format: str,
    peak: float,
    bandwidth: float,
    model: str,
    line: tuple[Work, Work],
    batch: int,
    records: Records,
) -> tuple:
    """One roof and one point. `peak` in FLOP/s, `bandwidth` in bytes/s."""
    itemsize, ridge = ITEMSIZE[number_format], ridge_flop_per_byte(peak, bandwidth)
    intensity = at_batch(line, batch, itemsize).intensity
    reach = attainable_flop_s(intensity, peak, bandwidth)
    limit = "arithmetic" if intensity > ridge else "memory"
    rows = f"{batch:,} row{'s' * (batch > 1)}"
    message = f"{model}, {rows}: {limit} allows {_rate(reach)}"
    fig, ax = figure(
        message, xlabel="arithmetic intensity (FLOP per byte)", ylabel="TFLOP/s", records=records, legend_below=True
    )
    roof = [attainable_flop_s(i, peak, bandwidth) / 1e12 for i in (INTENSITIES[0], ridge, INTENSITIES[-1])]
    curve(ax, (INTENSITIES[0], ridge, INTENSITIES[-1]), roof, label=f"roof: {where}")
    if any(r.kind == "measured" for r in records):
        points(ax, [ridge], [peak / 1e12], label="the best rate")
    here(ax, intensity, reach / 1e12, f"{rows}, at best")
    # The same axes for all cards: a faster one is higher, a ridge further to the right is further to the right.
    bottom, top = (0.05, 5000) if roof[-1] > 1 else (roof[0] / 4, 4 * roof[-1])
    log_axes(ax, INTENSITIES[::2], [t for t in (1e-4, 1e-3, 0.01, 0.1, 1, 10, 100, 1000) if bottom <= t <= top])
    ax.set_xlim(INTENSITIES[0] / 1.3, INTENSITIES[-1] * 1.3)
    ax.set_ylim(bottom, top)
    ax.axvline(ridge, color="black", linestyle=":", linewidth=1)
    ax.annotate(
        f" ridge: {plain_number(float(f'{ridge:.3g}'))} ",
        (ridge, bottom),
        fontsize=10,
        va="bottom",
        ha="left" if ridge < 100 else "right",
    )
    least = first_compute_bound(line, itemsize, ridge)
    more = f"Compute-bound from batch {least:,} on." if least < math.inf else "No batch makes it compute-bound."
    sentence = (
        f"{where}: compute-bound above {ridge:.1f} FLOP per byte. With {rows} this pass has "
        f"{intensity:.1f}: limited by {limit}, to {reach / peak:.0%} of the peak. {more}"
    )
    return fig, f"Roofline of {where}, ridge at {ridge:.1f} FLOP per byte. {message}.", sentence


def _rate(flop_s: float) -> str:
    return f"{flop_s / 1e12:,.3g} TFLOP/s" if flop_s >= 1e11 else f"{flop_s / 1e9:,.3g} GFLOP/s"
