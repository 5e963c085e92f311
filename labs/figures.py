"""Draws the README's figure from a recorded run.

python -m labs.data_parallel --model cnn --out records/NAME/data_parallel.jsonl
python -m labs.figures records/NAME/data_parallel.jsonl notebooks/scaling.png
"""

from __future__ import annotations

import sys
from pathlib import Path

from labs import data_parallel
from labs.kit.claims import model_of
from labs.kit.plot import bars, figure, to_png
from labs.kit.record import Records, load


def speedup_png(run: Records) -> bytes:
    """The speedup of DDP beside copies that never communicate and the ideal, as PNG bytes."""
    n, ddp, copies = run[0].layout["world_size"], data_parallel.speedup(run), data_parallel.speedup(run, "copies")
    message = f"DDP on {n} ranks trains a {model_of(run).upper()} {ddp.value:.1f}x as fast as one rank"
    fig, ax = figure(message, xlabel="speedup over one rank (x)", ylabel="way to train", records=run)
    bars(ax, ["copies", "DDP"], [copies, ddp], kind=run[0].kind)
    ax.axvline(n, linestyle=":", color="black")
    ax.annotate(f"ideal: {n}", (n, 0.5), ha="right", fontsize=10)
    ax.set_xlim(left=0)
    return to_png(fig)


def main() -> None:
    """Usage as in the module's docstring."""
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m labs.figures RECORDS.jsonl FIGURE.png")
    Path(sys.argv[2]).write_bytes(speedup_png(load(sys.argv[1])))


if __name__ == "__main__":
    main()
