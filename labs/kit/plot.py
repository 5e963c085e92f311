"""The course's figures: one style, one mark per kind of number, a provenance line, an alternative text.

fig, ax = figure("DDP hides most of its communication", xlabel="ranks", ylabel="speed-up (x)", records=run)
points(ax, [1, 2], [one, two], label="DDP")
ideal(ax, [1, 2])
prediction(ax, 2, guess)
show(fig, alt="Speed-up against ranks: 1.0, then 1.8 against an ideal of 2.")

Every drawing helper takes the kind of its numbers and marks them accordingly.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from labs.kit.errors import BadInput, require
from labs.kit.record import Record, provenance_line

# Safe for every kind of colour vision: Okabe and Ito, "Color Universal Design" (2008).
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
SERIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
GREY = "#5F6368"
MAX_PNG_BYTES = 60_000
TINTS = ("#E3E3E3", "#F3D9C9", "#BDBDBD")  # grid and areas
CSS_DPI = 80  # page pixels per inch of figure
DPI = 2 * CSS_DPI  # dots per inch: sharp on a high-density screen, with the lettering at its size
LEGEND_ROW_IN = 0.26
LEGEND_MARK_PT = 100  # a legend's mark and borders, plus the y axis label to its left
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
    message: str,
    *,
    xlabel: str,
    ylabel: str,
    records: Any = None,
    size: tuple[float, float] = (7.0, 3.9),
    legend_below: bool = False,
) -> tuple[Figure, Axes]:
    """Make a figure with its one message as the title. Labels include units. `size` is in inches.

    A legend of up to 3 entries goes inside, where it covers least. Longer ones, those of `bars`, and all with
    `legend_below` go below.

    `records` (Records, a Run, or several joined) give the provenance line that `show` puts under the figure.
    """
    require(bool(message.strip()), "a figure needs its message as the title, for example 'Two ranks halve it'")
    require(bool(xlabel.strip() and ylabel.strip()), "both axes of a figure need a label with a unit")
    with mpl.rc_context(STYLE):
        fig = Figure(figsize=size, dpi=DPI, layout="constrained")
        ax = fig.add_subplot()
        title = "\n".join(_title_lines(message, size[0]))
        fig.suptitle(title, x=0.01, ha="left", fontsize=STYLE["axes.titlesize"], fontweight="bold")
        ax.set_xlabel(xlabel)
        ax.set_ylabel(ylabel, labelpad=8)  # points, since words as tick labels come close
    fig._course_legend_below = legend_below
    caption(fig, records if records is not None else [])
    return fig, ax


def _title_lines(text: str, width_in: float) -> list[str]:
    """Split `text` into as few lines as fit, of about equal length."""
    words, limit = text.split(), 0.97 * 72 * width_in  # points
    fewest = len(_filled(words, limit))
    widths = (limit * share / 100 for share in range(100 // fewest, 100))
    return next((lines for width in widths if len(lines := _filled(words, width)) == fewest), _filled(words, limit))


def _filled(words: Sequence[str], width: float, size: float | None = None) -> list[str]:
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


def caption(fig: Figure, records: Any) -> None:
    """Add the provenance of `records` to the line under the figure."""
    fig._course_records = [*getattr(fig, "_course_records", []), *records]


def show(fig: Figure, alt: str) -> None:
    """Display the figure as a PNG of at most 60 KB, with `alt` as alternative text and its provenance as title.

    Sends an HTML image, because JupyterLab's PNG renderer drops alternative texts. nbval compares both texts but not
    the picture (see tests/nbval.cfg).
    """
    require(len(alt.strip()) >= 10, "show() needs alt=..., a sentence that says what the figure shows")
    from IPython.display import display

    alt = " ".join(alt.split())
    display({"text/html": picture_markup(fig, alt, to_png(fig)), "text/plain": f"[Figure: {alt}]"}, raw=True)


def picture_markup(fig: Figure, alt: str, image: bytes) -> str:
    """Return the finished figure, a PNG, as an HTML image of fixed size in page pixels, so the page doesn't jump."""
    width, height = (round(CSS_DPI * inches) for inches in fig.get_size_inches())
    markup = f'<img alt="{html.escape(alt)}" title="{html.escape(fig._course_caption)}" width="{width}" '
    markup += f'height="{height}" style="max-width: 100%; height: auto" '
    return markup + f'src="data:image/png;base64,{base64.b64encode(image).decode()}">'


def to_png(fig: Figure) -> bytes:
    """Return the finished figure, with legend and provenance line, as PNG bytes with a small palette."""
    from PIL import Image

    with mpl.rc_context(STYLE):
        finish(fig)
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


def finish(fig: Figure) -> None:
    """Add legend and provenance line, once."""
    if hasattr(fig, "_course_caption"):
        return
    records = fig._course_records
    for ax in fig.axes:
        _add_legend(fig, ax)
    drawn = kinds_in(fig)
    _require_origin(drawn, {r.kind for r in records})
    line = fig._course_caption = provenance_line(
        [r for r in records if r.kind in drawn] + _without_records(drawn, records)
    )
    size = 9
    wrapped = "\n".join(_filled(line.split(), 0.97 * 72 * fig.get_figwidth(), size))
    fig.supxlabel(wrapped, fontsize=size, color=GREY, ha="left", x=0.01)


def _add_legend(fig: Figure, ax: Axes) -> None:
    """Put a short legend inside, framed, and a longer one below the axes, enlarging the figure.

    Beside rows of marks, a legend's mark would look like another row, so there it always goes below.
    """
    handles, labels = ax.get_legend_handles_labels()
    if not labels or ax.get_legend() is not None:
        return
    below = ax.images or getattr(ax, "_course_rows", False) or getattr(fig, "_course_legend_below", False)
    if len(labels) <= 3 and not below:
        ax.legend(handles, labels, loc="best", frameon=True, fancybox=False, framealpha=1, edgecolor="0.8")
        return
    width, height = fig.get_size_inches()
    left = max((len(line) for t in ax.get_yticklabels() for line in t.get_text().splitlines()), default=0)
    fits = len(labels) > 2 and 2 * max(map(len, labels)) + 1.3 * left < 74  # characters in two columns
    columns = 2 if fits else 1
    size = STYLE["legend.fontsize"]
    room = 72 * width - LEGEND_MARK_PT - 0.6 * size * left
    labels = ["\n".join(_filled(label.split(" "), room, size)) for label in labels]
    rows = math.ceil(sum(1 + label.count("\n") for label in labels) / columns)
    fig.set_size_inches(width, height + LEGEND_ROW_IN * rows)
    ax.legend(handles, labels, loc="upper left", bbox_to_anchor=(0, -0.58 / (height - 1.1)), ncols=columns)


def kinds_in(fig: Figure) -> set[str]:
    """Return the kinds of numbers drawn into the figure."""
    artists = [a for ax in fig.axes for a in (*ax.lines, *ax.images, *ax.collections)]
    return {str(a.get_gid())[5:] for a in artists if str(a.get_gid()).startswith("kind:")}


def _without_records(drawn: set[str], records: Iterable[Any]) -> list[Record]:
    """Return a placeholder record if curves come from a formula without records; otherwise []."""
    modelled = "modelled" in drawn or not drawn & {r.kind for r in records}
    return [Record("", "", "", [0.0], "modelled")] if modelled and "modelled" not in {r.kind for r in records} else []


def _require_origin(drawn: set[str], given: set[str]) -> None:
    for kind in sorted(drawn & {"measured", "recorded"} - given):
        raise BadInput(f"this figure shows {kind} numbers: pass their records, for example records=run")


@dataclass(frozen=True)
class Mark:
    """How to draw one kind of number. `color` None lets the series choose."""

    marker: str | None
    line: str
    color: str | None
    filled: bool
    word: str


KIND_STYLE = {
    "measured": Mark("o", "-", None, True, "measured"),
    "recorded": Mark("s", "-", None, True, "recorded"),
    "modelled": Mark(None, "--", GREY, True, "modelled"),
    "published": Mark("D", ":", None, False, "published"),
    "prediction": Mark("*", "", ORANGE, True, "your prediction"),
}


def points(
    ax: Axes,
    x: Sequence[Any],
    y: Iterable[Any],
    *,
    kind: str = "measured",
    label: str = "",
    color: str | None = None,
    line: bool = False,
) -> None:
    """Draw `y` against `x` with the mark of its kind; `line` joins the marks.

    An item of `y` is a number, an Estimate (anything with `value`, `low` and `high`), or a Record, whose samples give
    value and interval. Intervals are drawn as bars. None and NaN are skipped.
    """
    mark = mark_of(kind)
    rows = [(a, *interval(b)) for a, b in zip(x, y, strict=True) if _is_there(b)]
    if not rows:
        return
    a, value, low, high = (list(column) for column in zip(*rows, strict=True))
    below = [max(0.0, v - bound) for v, bound in zip(value, low, strict=True)]
    above = [max(0.0, bound - v) for v, bound in zip(value, high, strict=True)]
    drawn = ax.errorbar(
        a,
        value,
        yerr=(below, above) if any(below + above) else None,
        label=labelled(label, mark),
        linestyle=(mark.line if line or mark.marker is None else "") or "none",
        **_look(kind, color or mark.color or _next_color(ax)),
    )
    drawn.lines[0].set_gid(f"kind:{kind}")


def bars(
    ax: Axes,
    names: Sequence[str],
    y: Iterable[Any],
    *,
    kind: str = "measured",
    label: str = "",
    color: str | None = None,
) -> None:
    """Draw one horizontal row per name, best for names that are words; items of `y` as in `points`.

    Draws a mark with its interval instead of a filled bar: the eye compares positions, and the interval stays visible.
    """
    mark = mark_of(kind)
    look = _look(kind, color or mark.color or _next_color(ax))
    if mark.marker is None:
        look |= {"marker": "|", "markersize": 14, "markeredgewidth": 2.0}
    first = True
    for row, item in enumerate(y):
        if not _is_there(item):
            continue
        value, low, high = interval(item)
        error = [[max(0.0, value - low)], [max(0.0, high - value)]] if high > low else None
        drawn = ax.errorbar(
            [value], [row], xerr=error, linestyle="none", label=labelled(label, mark) if first else "_", **look
        )
        drawn.lines[0].set_gid(f"kind:{kind}")
        first = False
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax._course_rows = True


def curve(
    ax: Axes,
    x: Sequence[float],
    y: Sequence[float],
    *,
    label: str,
    kind: str = "modelled",
    color: str | None = None,
) -> None:
    """Draw a line without marks: a formula (modelled, dashed), or measured samples too dense for marks (solid)."""
    mark = mark_of(kind)
    color = color or mark.color or _next_color(ax)
    (drawn,) = ax.plot(x, y, linestyle=mark.line or "-", color=color, label=labelled(label, mark))
    drawn.set_gid(f"kind:{kind}")


def ideal(ax: Axes, x: Sequence[float], y: Sequence[float] | None = None, label: str = "ideal") -> None:
    """Draw the dashed line of the ideal: y = x unless `y` is given."""
    curve(ax, x, list(x) if y is None else y, label=label)


def prediction(ax: Axes, x: Any, guess: Any, label: str = "") -> None:
    """Draw the learner's prediction as a star; nothing if they made none."""
    points(ax, [x], [float(guess)], kind="prediction", label=label)


def spans(
    ax: Axes,
    row: int,
    intervals: Sequence[tuple[float, float]],
    *,
    kind: str = "measured",
    label: str = "",
    color: str | None = None,
    hatch: str = "",
) -> None:
    """Draw bars from start to end in one row of a timeline, in units of the x axis. Name the rows with set_yticks."""
    color = color or _next_color(ax)
    bars_ = [(start, end - start) for start, end in intervals]
    drawn = ax.broken_barh(bars_, (row - 0.38, 0.76), facecolors=color, edgecolor="white", hatch=hatch, linewidth=0.6)
    drawn.set_gid(f"kind:{kind}")
    drawn.set_label(labelled(label, mark_of(kind)) if label else "_")


def stack(
    ax: Axes,
    x: Sequence[float],
    parts: Mapping[str, Sequence[float]],
    *,
    kind: str = "measured",
    colors: Sequence[str] = (),
) -> None:
    """Draw areas on top of each other, the first at the bottom: the parts of a total over `x`. Keys are labels."""
    mark = mark_of(kind)
    base = [0.0] * len(x)
    for k, (label, values) in enumerate(parts.items()):
        top = [b + v for b, v in zip(base, values, strict=True)]
        color = colors[k] if colors else _next_color(ax)
        drawn = ax.fill_between(x, base, top, color=color, linewidth=0, step="post", label=labelled(label, mark))
        drawn.set_gid(f"kind:{kind}")
        base = top


def log_axes(ax: Axes, x: Sequence[float] | None = None, y: Sequence[float] | None = None) -> None:
    """Make x and/or y logarithmic, with plain numbers (1,024 or 0.5) as tick labels at the given places."""
    for axis, ticks, scale in ((ax.xaxis, x, ax.set_xscale), (ax.yaxis, y, ax.set_yscale)):
        if ticks is not None:
            scale("log", base=2)
            axis.set_ticks(list(ticks))
            axis.set_major_formatter(FuncFormatter(lambda value, _: plain_number(value)))
            axis.set_minor_locator(NullLocator())
            axis.set_minor_formatter(NullFormatter())


def plain_number(value: float) -> str:
    """Format 1234567 as "1.23M", 131072 as "131,072", 0.5 as "0.5": no powers of ten on an axis."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:,.0f}" if value == round(value) else f"{value:.3g}"


def interval(item: Any) -> tuple[float, float, float]:
    """Return (value, low, high) of a number, an Estimate or a Record; all equal if no interval is known."""
    if hasattr(item, "samples"):
        from labs.kit.measure import estimate

        item = estimate(item.samples, item.unit)
    value = float(getattr(item, "value", item))
    return value, float(getattr(item, "low", value)), float(getattr(item, "high", value))


def mark_of(kind: str) -> Mark:
    """Return the mark of a kind. BadInput lists the kinds."""
    require(kind in KIND_STYLE, f"kind must be one of {', '.join(KIND_STYLE)}, not {kind!r}")
    return KIND_STYLE[kind]


def labelled(label: str, mark: Mark) -> str:
    """Return a legend entry with the kind of its mark: "DDP (measured)"."""
    if mark.word in label:
        return label
    return f"{label} ({mark.word})" if label else mark.word


def _is_there(item: Any) -> bool:
    return item is not None and not math.isnan(interval(item)[0])


def _look(kind: str, color: str) -> dict[str, Any]:
    mark, star = KIND_STYLE[kind], kind == "prediction"
    return {
        "color": color,
        "marker": mark.marker,
        "markersize": 16 if star else 8,
        "capsize": 4,
        "elinewidth": 1.8,
        "markerfacecolor": color if mark.filled else "white",
        "markeredgecolor": "black" if star else color,
        "markeredgewidth": 1.0 if mark.filled else 2.0,
        "zorder": 2.5 if star else 3,  # behind measured points, which stay visible where they meet it
    }


def _next_color(ax: Axes) -> str:
    return ax._get_lines.get_next_color()
