"""Memory of a step of BERT-large in notebook 04 with knobs: what does mixed precision save?"""

from __future__ import annotations

from labs.common.memory.bert_memory import largest_batch, predict
from labs.common.models.large_models import BertShape
from labs.common.oracle.fits import memory_bytes
from labs.kit import hardware
from labs.kit.explore import Menu, Slider, explore, powers, stacked
from labs.kit.plot import SERIES, figure

COLORS = {
    "parameters": SERIES[0],
    "gradients": SERIES[2],
    "optimizer": SERIES[5],
    "activations": SERIES[1],
    "weight copies": SERIES[4],
}
FORMATS = {"FP32": "fp32", "BF16 or FP16": "bf16"}
OPTIMIZERS = {"AdamW": "adam", "SGD with momentum": "momentum", "SGD": "sgd"}
ATTENTION = {"written out": "eager", "fused (SDPA)": "sdpa"}
GB = 1e9


def memory() -> None:
    """Explore what fills the memory of a step of BERT-large, in FP32 and with autocast."""
    cards = [s.gpu for s in hardware.specs() if memory_bytes(s.gpu)]
    explore(
        draw,
        batch=Slider("batch (sequences)", powers(1, 512), 8),
        seq=Slider("tokens in a sequence", (64, 128, 256, 384, 512), 512),
        optimizer=Menu("optimizer", list(OPTIMIZERS), "AdamW"),
        attention=Menu("attention", list(ATTENTION), "written out"),
        card=Menu("card", cards, "RTX 4090"),
    )


def draw(batch: float, seq: float, optimizer: str, attention: str, card: str) -> tuple:
    """What a step holds by category, in FP32 and in a 16-bit format."""
    shape, limit = BertShape(attention=ATTENTION[attention]), memory_bytes(card) / GB
    own = OPTIMIZERS[optimizer]
    found = {name: predict(int(batch), int(seq), p, shape, own) for name, p in FORMATS.items()}
    full, half = (m.total / GB for m in found.values())
    saved = 1 - half / full
    message = f"{batch:.0f} x {seq:.0f} tokens: {_gb(full)} GB, in mixed precision {_gb(half)} ({-saved:+.0%})"
    fig, ax = figure(
        message, xlabel="memory of a step of BERT-large (GB)", ylabel="format", size=(7.0, 3.2), legend_below=True
    )
    parts = {name: {c: size / GB for c, size in m.by_category().items()} for name, m in found.items()}
    stacked(ax, parts, COLORS)
    ax.set_xlim(0, 1.1 * max(full, half, limit))
    ax.axvline(limit, color="black", linestyle=":", linewidth=1)
    side = "right" if limit > ax.get_xlim()[1] / 2 else "left"
    ax.annotate(f" {card}, {_gb(limit)} GB ", (limit, 1.55), fontsize=10, ha=side, va="bottom")
    fits = {name: largest_batch(limit * GB, int(seq), p, shape, own) for name, p in FORMATS.items()}
    sentence = (
        f"Parameters, gradients and optimizer take {_gb((found['FP32'].total - found['FP32'].activations) / GB)} GB in "
        f"either format: autocast shrinks activations and adds copies of weights. {card} has {_gb(limit)} GB "
        f"({limit * GB / 2**30:.0f} GiB), which hold at most "
        + ", ".join(f"{n:,} sequences in {name}" for name, n in fits.items())
        + "; CUDA's own memory comes on top."
    )
    return fig, f"Memory of a step of BERT-large by category. {message}. {card} has {_gb(limit)} GB.", sentence


def _gb(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
