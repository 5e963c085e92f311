"""Figures with controls: on a live page, sliders and menus redraw a figure; elsewhere it shows the default values.

def draw(batch):
    fig, ax = figure(f"Batch {batch}", xlabel="batch", ylabel="samples/s")
    ...
    return fig, "A description for people who can't see the figure.", "Limited by memory: batch 512 would not be."

explore(draw, batch=Slider("batch (samples)", (16, 32, 64), 32))
"""

from __future__ import annotations

import gc
import html
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labs.kit import plot
from labs.kit.errors import BadInput, require

NO_WIDGETS = "The sliders need ipywidgets: `pip install ipywidgets`, or run `make lab` again; then restart the kernel."
ELSEWHERE = "Run this cell in JupyterLab to move the knobs."

Draw = Callable[..., tuple[Figure, str, str]]
"""Takes each control's value by name; returns a figure, its alternative text and the sentence below it."""


@dataclass(frozen=True)
class Slider:
    """A slider over `values`, moved by mouse or arrow keys. Steps may be uneven, such as powers of two."""

    label: str
    """Includes the unit."""
    values: Sequence[float]
    default: float
    form: Callable[[float], str] = plot.plain_number

    @property
    def choices(self) -> dict[str, Any]:
        """The values by their displayed text."""
        return {self.form(v): v for v in self.values}


@dataclass(frozen=True)
class Menu:
    """A menu of names."""

    label: str
    values: Sequence[str]
    default: str

    @property
    def choices(self) -> dict[str, Any]:
        """The values by their displayed text."""
        return {v: v for v in self.values}


Control = Slider | Menu


def explore(draw: Draw, **controls: Control) -> None:
    """Show `draw` with the controls' defaults and, on a live page, the controls above it.

    The picture is an ordinary output, so a saved notebook shows it without a kernel. Moving a control replaces it.
    Raises BadInput if a default isn't among its control's values, and anything `draw` raises for the defaults.
    """
    for name, control in controls.items():
        known = len(control.choices) == len(control.values) and control.default in control.values
        require(known, f"{name}: take different values, and one of them as the default, not {control.default!r}")
    drawn = draw(**{name: control.default for name, control in controls.items()})
    if not is_live():
        return _show(drawn, plot.to_png(drawn[0]))
    try:
        import ipywidgets
    except ImportError:
        _show(drawn, plot.to_png(drawn[0]))
        return print(NO_WIDGETS)
    picture = f"explorer-{next(_numbers)}"
    _display({**knobs(ipywidgets, draw, controls, picture)._repr_mimebundle_(), "text/plain": ELSEWHERE})
    return _show(drawn, plot.to_png(drawn[0]), picture)


_numbers = itertools.count()


def is_live() -> bool:
    """Return whether this cell runs on a page with a user, who can be asked for input.

    nbconvert, nbval and papermill set "allow_stdin" to false in their Jupyter messages.
    """
    from IPython import get_ipython

    kernel = getattr(get_ipython(), "kernel", None)
    parent = kernel.get_parent() if kernel is not None else None
    return bool((parent or {}).get("content", {}).get("allow_stdin"))


def knobs(widgets: Any, draw: Draw, controls: dict[str, Control], picture: str) -> Any:
    """Return the controls as a box of widgets; each change redraws the display `picture`.

    The page sends no further slider position until the last one is drawn, so none queue up.
    """
    look = {"style": {"description_width": "16em"}, "layout": {"width": "40em", "max_width": "98%"}}
    kinds = {Slider: widgets.SelectionSlider, Menu: widgets.Dropdown}
    made = {
        name: kinds[type(c)](options=list(c.choices.items()), value=c.default, description=c.label, **look)
        for name, c in controls.items()
    }

    def redraw() -> None:
        try:
            drawn = draw(**{name: w.value for name, w in made.items()})
        except BadInput as e:  # raised here, it would only reach the page's log
            return _display({"text/plain": f"{e}"}, picture, update=True)
        return _show(drawn, plot.to_png(drawn[0]), picture, update=True)

    def follow(_change: Any) -> None:
        with no_full_collection():
            redraw()

    for widget in made.values():
        widget.observe(follow, names="value")
    return widgets.VBox(list(made.values()))


@contextmanager
def no_full_collection() -> Iterator[None]:
    """Turn the garbage collector off, then collect only young objects.

    A figure's parts refer to each other, so reference counting doesn't free them. After a few figures, a full
    collection would scan everything in the kernel, including torch, and pause for several redraws.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
            gc.collect(1)


def _show(drawn: tuple[Figure, str, str], image: bytes, picture: str | None = None, update: bool = False) -> None:
    """Display picture and sentence as one output of fixed size, so the page doesn't jump."""
    fig, alt, sentence = drawn
    require(len(alt.strip()) >= 10, "a figure needs an alternative text, a sentence that says what it shows")
    alt = " ".join(alt.split())
    markup = plot.picture_markup(fig, alt, image)
    markup += f'<p aria-live="polite">{html.escape(sentence)}</p>'
    _display({"text/html": markup, "text/plain": f"[Figure: {alt}]\n{sentence}"}, picture, update)


def _display(bundle: dict[str, Any], picture: str | None = None, update: bool = False) -> None:
    from IPython.display import display

    display(bundle, raw=True, **({"display_id": picture, "update": update} if picture else {}))


def here(ax: Axes, x: float, y: float, label: str = "your knobs") -> None:
    """Mark the controls' current point."""
    (drawn,) = ax.plot(
        [x],
        [y],
        marker="X",
        markersize=11,
        linestyle="",
        color="black",
        markeredgecolor="white",
        label=f"{label} (modelled)",
        zorder=5,
    )
    drawn.set_gid("kind:modelled")


def stacked(ax: Axes, rows: Mapping[str, Mapping[str, float]], colors: Mapping[str, str]) -> None:
    """Draw one bar per row, its parts one after another in the order of `colors` (part: colour)."""
    for row, parts in enumerate(rows.values()):
        start = 0.0
        for part, color in colors.items():
            size = parts.get(part, 0.0)
            if size or row == 0:  # the first row puts all parts into the legend
                label = part if row == 0 else ""
                plot.spans(ax, row, [(start, start + size)], kind="modelled", color=color, label=label)
            start += size
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_ylim(len(rows) - 0.4, -0.6)


def powers(first: float, last: float, base: float = 2) -> tuple[float, ...]:
    """Return `first`, `first * base` and so on up to `last`, for a slider with a wide range."""
    found = [first]
    while found[-1] * base <= last:
        found.append(found[-1] * base)
    return tuple(found)
