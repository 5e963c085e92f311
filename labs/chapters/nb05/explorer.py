"""Peak memory of BERT-large in notebook 05 with knobs: what does it take to compute layers again, and what is left?"""

from __future__ import annotations

import math
from functools import cache

from labs.activation_checkpointing.splitting import at_peak, share_again, time_ratio
from labs.chapters.nb05.bert_chain import bert_chain, optimizer_step_bytes
from labs.chapters.nb05.figures import COLORS
from labs.common.memory.bert_memory import parameter_count, predict
from labs.common.memory.recomputation import segment_bounds
from labs.common.models.large_models import BertShape
from labs.common.oracle.fits import memory_bytes
from labs.kit import hardware
from labs.kit.explore import Menu, Slider, explore, powers, stacked
from labs.kit.plot import figure

SHAPE = BertShape()
ROOT = round(math.sqrt(SHAPE.layers))  # segments that make the sum of what is kept smallest: Chen et al. 2016
POLICIES = {"nothing recomputed": 0, f"{ROOT} segments recomputed": ROOT, "each layer recomputed": SHAPE.layers}
FORMATS = {"FP32": "fp32", "BF16 or FP16 (autocast)": "bf16"}
OPTIMIZERS = {"AdamW": "adam", "SGD with momentum": "momentum", "SGD": "sgd"}
PARTS = {name: color for name, color in COLORS.items() if name != "inputs/buffers"}
MOST = 4096  # sequences, for the largest batch
GB = 1e9


def memory() -> None:
    """Explore the peak of a step of BERT-large by format, batch, policy and optimizer."""
    cards = [s.gpu for s in hardware.specs() if memory_bytes(s.gpu)]
    explore(
        draw,
        batch=Slider("batch (sequences)", powers(1, 512), 32),
        seq=Slider("tokens in a sequence", (64, 128, 256, 384, 512), 256),
        number_format=Menu("format", list(FORMATS), "FP32"),
        optimizer=Menu("optimizer", list(OPTIMIZERS), "AdamW"),
        card=Menu("card", cards, "RTX 4090"),
    )


def runs(count: int) -> list[tuple[int, int, bool]]:
    """The layers in `count` segments that are all computed again; 0: none is."""
    return [(a, b, True) for a, b in segment_bounds(SHAPE.layers, count)] if count else []


def peak(batch: int, seq: int, precision: str, optimizer: str, count: int) -> dict[str, float]:
    """Bytes by category at the fuller of two moments: somewhere in backward, or in the optimizer's step."""
    states = predict(0, seq, "fp32", SHAPE, optimizer)
    moment = at_peak(bert_chain(batch, seq, precision, SHAPE, optimizer), runs(count))
    kept = moment.total - moment.fixed - moment.gradients
    in_backward = {
        "parameters": states.parameters,
        "gradients": moment.gradients,
        "optimizer": states.optimizer,
        "activations": kept,
    }
    in_optimizer = {"parameters": states.parameters, "gradients": states.gradients, "optimizer": states.optimizer}
    whole = optimizer_step_bytes(parameter_count(SHAPE), optimizer)
    in_optimizer["temporaries"] = whole - sum(in_optimizer.values())
    return max(in_backward, in_optimizer, key=lambda m: sum(m.values()))


@cache  # it does not depend on the batch: that knob need not wait for it
def largest(memory_bytes: float, seq: int, precision: str, optimizer: str, count: int) -> int:
    """The largest batch whose peak fits, 0 if none does, at most MOST."""
    low, high = 0, MOST + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = sum(peak(middle, seq, precision, optimizer, count).values()) <= memory_bytes
        low, high = (middle, high) if fits else (low, middle)
    return low


def draw(batch: float, seq: float, number_format: str, optimizer: str, card: str) -> tuple:
    """The peak by category, a row for each policy."""
    limit, size = round(memory_bytes(card) / GB, 1), (int(batch), int(seq))
    own = (FORMATS[number_format], OPTIMIZERS[optimizer])
    found = {name: peak(*size, *own, count) for name, count in POLICIES.items()}
    most, *_, least = (sum(parts.values()) / GB for parts in found.values())
    message = f"{size[0]} x {size[1]} tokens: {_gb(most)} GB, or {_gb(least)} GB with each layer recomputed"
    fig, ax = figure(
        message,
        xlabel="peak memory of a step of BERT-large (GB)",
        ylabel="recomputed",
        size=(7.0, 3.6),
        legend_below=True,
    )
    rows = {}
    for name, parts in found.items():
        more = time_ratio(share_again(SHAPE.layers, runs(POLICIES[name]))) - 1
        rows[f"{name.removesuffix(' recomputed')},\n+{more:.0%} operations"] = {p: v / GB for p, v in parts.items()}
    stacked(ax, rows, PARTS)
    ax.set_xlim(0, 1.1 * max(most, limit))
    ax.axvline(limit, color="black", linestyle=":", linewidth=1)
    side = "right" if limit > ax.get_xlim()[1] / 2 else "left"
    ax.annotate(f" {card}, {limit:g} GB ", (limit, 2.55), fontsize=10, ha=side, va="bottom")
    fits = {name: largest(memory_bytes(card), size[1], *own, count) for name, count in POLICIES.items()}
    told = ", ".join(f"{_batch(n)} with {name}" for name, n in fits.items())
    in_optimizer = ""
    if "temporaries" in found["each layer recomputed"]:
        in_optimizer = " With each layer recomputed the optimizer's own step is the peak (foreach, usual on a GPU)."
    sentence = (
        f"Largest batch that {card} holds: {told}.{in_optimizer} A closed form, from below: gradients of "
        "activations and other tensors of a moment are left out."
    )
    return fig, f"Peak memory of BERT-large by category and policy. {message}. {card} has {limit:g} GB.", sentence


def _batch(n: int) -> str:
    return f"over {MOST:,}" if n == MOST else f"{n:,}" if n else "none"


def _gb(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
