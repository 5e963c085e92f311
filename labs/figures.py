"""Draws the README's figure from a recorded run.

python -m labs.data_parallel --batch-size 128 --inner 1 --rounds 24 --out records/NAME/data_parallel.jsonl
python -m labs.figures records/NAME/data_parallel.jsonl notebooks/scaling.png
"""

from __future__ import annotations

import sys
from pathlib import Path

from labs import data_parallel
from labs.chapters.nb03.figures import NAMES, ranks_of, share_of_ceiling, ways_message
from labs.kit.plot import bars, curve, figure, to_png
from labs.kit.record import Records, load


def speedup_png(run: Records) -> bytes:
    """The speed-up of DDP beside the machine's ceiling, the model and the ideal, as PNG bytes."""
    n, found = ranks_of(run), data_parallel.speedups(run)
    ddp, ceiling = found["ddp", n], found["copies", n]
    message = ways_message(n, ddp, ceiling, share_of_ceiling(run))
    fig, ax = figure(message, xlabel="samples per second, relative to one rank (x)", ylabel="way to train", records=run)
    bars(ax, [NAMES["copies"], "DDP"], [ceiling, ddp], kind=run[0].kind)
    modelled = data_parallel.modelled_speedup(run)
    curve(ax, [modelled, modelled], [0.75, 1.25], label="DDP without overlap")
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
