"""Draws the README's figure from recorded runs.

python -m labs.data_parallel --model mlp --rounds 24 --out mlp.jsonl       # and --model cnn --out cnn.jsonl cat
mlp.jsonl cnn.jsonl > records/NAME/data_parallel.jsonl python -m labs.figures records/NAME/data_parallel.jsonl
notebooks/scaling.png
"""

from __future__ import annotations

import sys
from pathlib import Path

from labs import data_parallel
from labs.claims.registry import model_of
from labs.common.sources import published
from labs.kit import plot
from labs.kit.claim_records import launches
from labs.kit.record import Records, load


def speedup_png(records: Records) -> bytes:
    """Draw each model's DDP speedup, its limit by copies, and a published speedup of two GPUs; return PNG bytes."""
    v100 = Records(r for r in published.table("pytorch_ddp") if r.case["model"] == "ResNet-50")
    one, two = v100.one("step", gpus=1, ddp=False), v100.one("step", gpus=2, ddp=True)
    runs = {model_of(run).upper(): run for run in launches(records)}
    names = [*(f"{model}, 2 CPU cores" for model in runs), "ResNet-50, 2 x V100"]
    found = [*(data_parallel.speedup(run).value for run in runs.values()), 2 * one.value / two.value]
    message = f"Two devices train between {min(found):.1f}x and {max(found):.1f}x as fast as one"
    fig, ax = plot.figure(
        message, xlabel="speedup over one device", ylabel="model", records=[*records, one, two], size=(7.0, 3.0)
    )
    colors = [plot.BLUE] * len(runs) + [plot.GREEN]
    bars = ax.barh(names, found, height=0.55, color=colors)
    ax.bar_label(bars, fmt="%.1fx", label_type="center", color="white", fontweight="bold")
    for row, run in enumerate(runs.values()):
        copies = data_parallel.speedup(run, "copies").value
        ax.vlines(copies, row - 0.4, row + 0.4, color="black", linewidth=3)
        ax.text(copies + 0.03, row, "copies that never\ncommunicate", va="center", fontsize=9)
    ax.set(xlim=(0, 2.6), ylim=(len(names) - 0.5, -0.5))
    return plot.to_png(fig)


def main() -> None:
    """Run the command line described in the module's docstring."""
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m labs.figures RECORDS.jsonl FIGURE.png")
    Path(sys.argv[2]).write_bytes(speedup_png(load(sys.argv[1])))


if __name__ == "__main__":
    main()
