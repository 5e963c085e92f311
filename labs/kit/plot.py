"""The course's figures: one style, a title that says what they show, a line that says where numbers come from.

fig, ax = figure("DDP hides most of its communication", xlabel="ranks", ylabel="speed-up (x)", records=run)
ax.plot([1, 2], [1.0, 1.8])
png = to_png(fig)
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Iterable
from functools import cache

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from labs.kit.record import Record, provenance_line

# Safe for every kind of colour vision: Okabe and Ito, "Color Universal Design" (2008).
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
SERIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
GREY = "#5F6368"
MAX_PNG_BYTES = 60_000
CSS_DPI = 80  # page pixels per inch of figure
DPI = 2 * CSS_DPI  # dots per inch: sharp on a high-density screen, with the lettering at its size
LEGEND_ROW_IN = 0.26
STYLE = {
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlepad": 12,
    "axes.grid": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "legend.frameon": False,
    "legend.fontsize": 11,
    "lines.linewidth": 2.0,
    "lines.markersize": 8,
    "mathtext.default": "regular",
    "axes.prop_cycle": mpl.cycler(color=SERIES),
}


def figure(
    message: str, *, xlabel: str, ylabel: str, records: Iterable[Record], size: tuple[float, float] = (7.0, 3.9)
) -> tuple[Figure, Axes]:
    """Make a figure with its one message as the title. Labels include units. `size` is in inches."""
    with mpl.rc_context(STYLE):
        fig = Figure(figsize=size, dpi=DPI, layout="constrained")
        ax = fig.add_subplot()
        ax.set_xlabel(xlabel)
        ax.set_ylabel(ylabel, labelpad=8)  # points, since words as tick labels come close
        annotate(fig, message, provenance_line(records))
    return fig, ax


def annotate(fig: Figure, title: str, origin: str) -> None:
    """Write `title` above the figure, and below it `origin`, which says where its numbers come from."""
    width, bold = 0.97 * 72 * fig.get_figwidth(), STYLE["axes.titlesize"]  # points
    if title:
        fig.suptitle(_title(title, width), x=0.01, ha="left", fontsize=bold, fontweight="bold")
    fig.supxlabel("\n".join(_filled(origin.split(), width, 9)), fontsize=9, color=GREY, ha="left", x=0.01)
    fig._course_caption = origin


def _title(text: str, limit: float) -> str:
    """Split `text` into as few lines of at most `limit` points as possible, of about equal length."""
    words = text.split()
    fewest = len(_filled(words, limit))
    widths = (limit * share / 100 for share in range(100 // fewest, 101))
    return "\n".join(next(lines for width in widths if len(lines := _filled(words, width)) == fewest))


def _filled(words: list[str], width: float, size: float | None = None) -> list[str]:
    """Fill lines of up to `width` points: of a title, or of a caption with font size `size`."""
    lines: list[str] = []
    for word in words:
        if lines and _points_wide(f"{lines[-1]} {word}", size) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


@cache  # a slider's title is wrapped again at every move
def _points_wide(text: str, size: float | None) -> float:
    """Return the width of a title, or of a caption with font size `size`, in points."""
    weight = "bold" if size is None else "normal"
    font = FontProperties(family=STYLE["font.family"], weight=weight, size=size or STYLE["axes.titlesize"])
    return text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]


def legend_below(fig: Figure, ax: Axes) -> None:
    """Add the legend below the axes and enlarge the figure for it. Call it last."""
    _, labels = ax.get_legend_handles_labels()
    columns = 2 if len(labels) > 2 else 1
    width, height = fig.get_size_inches()
    fig.set_size_inches(width, height + LEGEND_ROW_IN * math.ceil(len(labels) / columns))
    with mpl.rc_context(STYLE):
        ax.legend(loc="upper left", bbox_to_anchor=(0, -0.58 / (height - 1.1)), ncols=columns)


def picture_markup(fig: Figure, alt: str) -> str:
    """Return the figure as an HTML image of fixed size in page pixels, so that the page doesn't jump.

    Not as a PNG output, because JupyterLab's renderer drops its alternative text.
    """
    image = base64.b64encode(to_png(fig)).decode()
    width, height = (round(CSS_DPI * inches) for inches in fig.get_size_inches())
    markup = f'<img alt="{html.escape(alt)}" title="{html.escape(fig._course_caption)}" width="{width}" '
    return markup + f'height="{height}" style="max-width: 100%; height: auto" src="data:image/png;base64,{image}">'


def to_png(fig: Figure) -> bytes:
    """Return the figure as PNG bytes with a small palette, of at most 60 KB."""
    from PIL import Image

    with mpl.rc_context(STYLE):
        for _ in range(2):  # constrained layout needs a second pass if legends changed the size
            fig.draw_without_rendering()
        raw = io.BytesIO()
        fig.savefig(raw, format="png")
    picture = Image.open(raw).convert("RGB")
    for colors in (32, 16):
        small = io.BytesIO()
        picture.quantize(colors, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
        if small.tell() <= MAX_PNG_BYTES:
            break
    return small.getvalue()
