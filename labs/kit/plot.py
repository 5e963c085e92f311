"""The figures of the course: one style, one mark per kind of number, a provenance line, an alt text.

fig, ax = figure("DDP hides most of its communication", xlabel="ranks", ylabel="speed-up (x)", records=run)
points(ax, [1, 2], [one, two], label="DDP")
ideal(ax, [1, 2])
prediction(ax, 2, guess)
show(fig, alt="Speed-up against ranks: 1.0, then 1.8 against an ideal of 2.")
"""

from __future__ import annotations

import base64
import html
import io
import math
import textwrap
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labs.kit.caption import provenance_line
from labs.kit.cli import BadInput, require
from labs.kit.marks import (
    GREY,
    KIND_STYLE,
    SERIES,
    bars,
    choice_map,
    curve,
    heat_map,
    ideal,
    log_axes,
    plain_number,
    points,
    prediction,
    spans,
    stack,
)

__all__ = [
    "GREY", "KIND_STYLE", "SERIES", "bars", "caption", "choice_map", "curve", "figure", "heat_map", "ideal",
    "log_axes", "plain_number", "points", "prediction", "show", "spans", "stack", "to_png",
]  # fmt: skip

MAX_PNG_BYTES = 30_000
TINTS = ("#E3E3E3", "#F3D9C9", "#BDBDBD")  # grid and areas
DPI = 80  # dots per inch; more of them would be bytes in every notebook
LEGEND_ROW_IN = 0.26
STYLE = {
    "figure.facecolor": "white", "savefig.facecolor": "white", "font.family": "DejaVu Sans", "font.size": 12,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left", "axes.titlesize": 13,
    "axes.titleweight": "bold", "axes.titlepad": 12, "axes.grid": True, "grid.color": "#E3E3E3",
    "grid.linewidth": 0.8, "axes.axisbelow": True, "axes.edgecolor": GREY, "legend.frameon": False,
    "legend.fontsize": 11, "lines.linewidth": 2.0, "lines.markersize": 8, "mathtext.default": "regular",
    "axes.prop_cycle": mpl.cycler(color=SERIES),
}  # fmt: skip


def figure(
    message: str, *, xlabel: str, ylabel: str, records: Any = None, size: tuple[float, float] = (7.0, 3.9),
    legend_below: bool = False,
) -> tuple[Figure, Axes]:  # fmt: skip
    """A figure whose title is the one message it has; labels carry units. `size` is in inches.

    A legend of up to 3 entries goes where it covers least, longer ones below; `legend_below` puts it there anyway.

    `records` (Records, a Run, or several joined) give the provenance line that `show` puts under it.
    """
    require(bool(message.strip()), "a figure needs its message as the title, for example 'Two ranks halve it'")
    require(bool(xlabel.strip() and ylabel.strip()), "both axes of a figure need a label with a unit")
    with mpl.rc_context(STYLE):
        fig = Figure(figsize=size, dpi=DPI, layout="constrained")
        ax = fig.add_subplot()
        title = "\n".join(_wrapped(message, int(size[0] * 9.5)))
        fig.suptitle(title, x=0.01, ha="left", fontsize=STYLE["axes.titlesize"], fontweight="bold")
        ax.set_xlabel(xlabel)
        ax.set_ylabel(ylabel, labelpad=8)  # points; words as tick labels come close
    fig._course_legend_below = legend_below
    caption(fig, records if records is not None else [])
    return fig, ax


def _wrapped(text: str, most: int) -> list[str]:
    """As few lines of at most `most` characters as there can be, about equally long: no word is left alone."""
    lines = textwrap.wrap(text, most)
    widths = range(math.ceil(len(text) / len(lines)), most)
    return next((w for width in widths if len(w := textwrap.wrap(text, width)) == len(lines)), lines)


def caption(fig: Figure, records: Any) -> None:
    """Add the provenance of `records` to the line under the figure."""
    fig._course_records = [*getattr(fig, "_course_records", []), *records]


def show(fig: Figure, alt: str) -> None:
    """Display the figure as a PNG with `alt` as its alternative text and its provenance as its title, at most 30 KB.

    It is sent as an HTML image: JupyterLab's own PNG renderer drops alternative texts. nbval compares both texts, and
    not the picture (see tests/nbval.cfg).
    """
    require(len(alt.strip()) >= 10, "show() needs alt=..., a sentence that says what the figure shows")
    from IPython.display import display

    alt = " ".join(alt.split())
    source = base64.b64encode(to_png(fig)).decode()
    markup = f'<img alt="{html.escape(alt)}" title="{html.escape(fig._course_caption)}" '
    markup += f'src="data:image/png;base64,{source}">'
    display({"text/html": markup, "text/plain": f"[Figure: {alt}]"}, raw=True)


def to_png(fig: Figure) -> bytes:
    """The finished figure, with legend and provenance line, as PNG bytes; a palette keeps them few."""
    from PIL import Image

    with mpl.rc_context(STYLE):
        _finish(fig)
        for _ in range(2):  # constrained layout needs more than one pass where legends changed the size
            fig.draw_without_rendering()
        raw = io.BytesIO()
        fig.savefig(raw, format="png")
    picture = Image.open(raw).convert("RGB")
    for colors in (64, 32, 16):
        small = io.BytesIO()
        _reduced(picture, colors, fixed=not any(ax.images for ax in fig.axes)).save(small, "PNG", optimize=True)
        if small.tell() <= MAX_PNG_BYTES:
            break
    return small.getvalue()


def _reduced(picture: Any, colors: int, fixed: bool) -> Any:
    """`picture` with a palette of few colours: those of the course, `fixed`, or its own most frequent ones.

    A palette of frequent colours would merge a thin green line into the blue ones.
    """
    from PIL import Image

    if not fixed or colors < 64:
        return picture.quantize(colors, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    shades = [mpl.colors.to_rgb(c) for c in (*SERIES, GREY, "black", *TINTS)]
    steps = [[round(255 * (1 - share * (1 - c))) for c in rgb] for rgb in shades for share in (1, 0.66, 0.33)]
    palette = Image.new("P", (1, 1))
    palette.putpalette([255, 255, 255] + [c for rgb in steps for c in rgb])
    return picture.quantize(palette=palette, dither=Image.Dither.NONE)


def _finish(fig: Figure) -> None:
    """Add legend and provenance line, once."""
    if hasattr(fig, "_course_caption"):
        return
    records = fig._course_records
    for ax in fig.axes:
        _add_legend(fig, ax)
    _require_origin(kinds_in(fig), {r.kind for r in records})
    line = provenance_line(records) or "modelled by this course"
    fig._course_caption = line
    wrapped = "\n".join(textwrap.wrap(line, int(fig.get_figwidth() * 15)))
    fig.supxlabel(wrapped, fontsize=9, color=GREY, ha="left", x=0.01)


def _add_legend(fig: Figure, ax: Axes) -> None:
    """Inside while it is short; otherwise below the axes, with room of its own."""
    handles, labels = ax.get_legend_handles_labels()
    if not labels or ax.get_legend() is not None:
        return
    if len(labels) <= 3 and not ax.images and not getattr(fig, "_course_legend_below", False):
        ax.legend(handles, labels, loc="best")
        return
    width, height = fig.get_size_inches()
    left = max((len(line) for t in ax.get_yticklabels() for line in t.get_text().splitlines()), default=0)
    fits = len(labels) > 2 and 2 * max(map(len, labels)) + 1.3 * left < 74  # characters beside each other
    columns = 2 if fits else 1
    rows = math.ceil(len(labels) / columns)
    fig.set_size_inches(width, height + LEGEND_ROW_IN * rows)
    ax.legend(handles, labels, loc="upper left", bbox_to_anchor=(0, -0.58 / (height - 1.1)), ncols=columns)


def kinds_in(fig: Figure) -> set[str]:
    """The kinds of number that were drawn into the figure."""
    artists = [a for ax in fig.axes for a in (*ax.lines, *ax.images, *ax.collections)]
    return {str(a.get_gid())[5:] for a in artists if str(a.get_gid()).startswith("kind:")}


def _require_origin(drawn: set[str], given: set[str]) -> None:
    for kind in sorted(drawn & {"measured", "recorded"} - given):
        raise BadInput(f"this figure shows {kind} numbers: pass the records they come from, records=run")
