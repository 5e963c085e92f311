"""Figures with controls: on a live page, sliders and menus redraw a figure; elsewhere it shows the default values.

def draw(batch):
    fig, ax = figure(f"Batch {batch}", xlabel="batch", ylabel="samples/s", records=[record])
    ...
    return fig, "A description for people who can't see the figure.", "Limited by memory: batch 512 would not be."

explore(draw, batch=Slider("batch (samples)", (16, 32, 64), 32))
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from labs.kit import plot
from labs.kit.errors import BadInput

ELSEWHERE = "Run this cell in JupyterLab to move the knobs."

Draw = Callable[..., tuple[Figure, str, str]]
"""Takes each control's value by name; returns a figure, its alternative text and the sentence below it."""


def plain_number(value: float) -> str:
    """Format 1234567 as "1.23M", 131072 as "131,072", 0.5 as "0.5": no powers of ten on an axis."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:,.0f}" if value == round(value) else f"{value:.3g}"


@dataclass(frozen=True)
class Slider:
    """A slider over `values`, moved by mouse or arrow keys. Steps may be uneven, such as powers of two."""

    label: str
    """Includes the unit."""
    values: Sequence[float]
    default: float

    def widget(self, widgets: Any, **look: Any) -> Any:
        options = [(plain_number(v), v) for v in self.values]
        return widgets.SelectionSlider(options=options, value=self.default, description=self.label, **look)


@dataclass(frozen=True)
class Menu:
    """A menu of names."""

    label: str
    values: Sequence[str]
    default: str

    def widget(self, widgets: Any, **look: Any) -> Any:
        return widgets.Dropdown(options=list(self.values), value=self.default, description=self.label, **look)


def explore(draw: Draw, **controls: Slider | Menu) -> None:
    """Show `draw` with the controls' defaults and, on a live page, the controls above it.

    The picture is an ordinary output, so a saved notebook shows it without a kernel. Moving a control replaces it.
    """
    drawn = draw(**{name: control.default for name, control in controls.items()})
    if not is_live():
        return _show(drawn)
    picture = f"explorer-{next(_numbers)}"
    _display({**knobs(draw, controls, picture)._repr_mimebundle_(), "text/plain": ELSEWHERE})
    return _show(drawn, picture)


_numbers = itertools.count()


def is_live() -> bool:
    """Return whether this cell runs on a page with a user, who can be asked for input.

    nbconvert, nbval and papermill set "allow_stdin" to false in their Jupyter messages.
    """
    from IPython import get_ipython

    kernel = getattr(get_ipython(), "kernel", None)
    parent = kernel.get_parent() if kernel is not None else None
    return bool((parent or {}).get("content", {}).get("allow_stdin"))


def knobs(draw: Draw, controls: dict[str, Slider | Menu], picture: str) -> Any:
    """Return the controls as a box of widgets; each change redraws the display `picture`.

    The page sends no further slider position until the last one is drawn, so none queue up.
    """
    import ipywidgets

    look = {"style": {"description_width": "16em"}, "layout": {"width": "40em", "max_width": "98%"}}
    made = {name: control.widget(ipywidgets, **look) for name, control in controls.items()}

    def redraw(_change: Any) -> None:
        try:
            _show(draw(**{name: w.value for name, w in made.items()}), picture, update=True)
        except BadInput as e:  # raised here, it would only reach the page's log
            _display({"text/plain": f"{e}"}, picture, update=True)

    for widget in made.values():
        widget.observe(redraw, names="value")
    return ipywidgets.VBox(list(made.values()))


def _show(drawn: tuple[Figure, str, str], picture: str | None = None, update: bool = False) -> None:
    """Display picture and sentence as one output of fixed size, so the page doesn't jump."""
    fig, alt, sentence = drawn
    markup = f'{plot.picture_markup(fig, alt)}<p aria-live="polite">{html.escape(sentence)}</p>'
    _display({"text/html": markup, "text/plain": f"[Figure: {alt}]\n{sentence}"}, picture, update)


def _display(bundle: dict[str, Any], picture: str | None = None, update: bool = False) -> None:
    from IPython.display import display

    display(bundle, raw=True, **({"display_id": picture, "update": update} if picture else {}))


def here(ax: Axes, x: float, y: float) -> None:
    """Mark the controls' current point."""
    ax.plot([x], [y], "X", markersize=11, color="black", markeredgecolor="white", label="your knobs", zorder=5)


def log_axis(ax: Axes, ticks: Sequence[float]) -> None:
    """Make the x axis logarithmic, with plain numbers (1,024 or 0.5) as tick labels at the given places."""
    ax.set_xscale("log", base=2)
    ax.xaxis.set_ticks(list(ticks))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain_number(value)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_minor_formatter(NullFormatter())


def powers(first: float, last: float, base: float = 2) -> tuple[float, ...]:
    """Return `first`, `first * base` and so on up to `last`, for a slider with a wide range."""
    found = [first]
    while found[-1] * base <= last:
        found.append(found[-1] * base)
    return tuple(found)
