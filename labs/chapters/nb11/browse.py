"""All claims with menus for article, subject and verdict; without a live page, all of them below one line each."""

from __future__ import annotations

from typing import Any

from labs.kit.claims import WORDS, articles
from labs.kit.docket import Docket, kind_of
from labs.kit.explore import NO_WIDGETS, is_live

ALL = "all"


def browse(docket: Docket) -> None:
    """Show `docket` with menus above it, which choose what is shown."""
    from IPython.display import display

    if not is_live():
        return display(docket)
    try:
        import ipywidgets
    except ImportError:
        print(NO_WIDGETS)
        return display(docket)
    menus = {
        name: ipywidgets.Dropdown(options=options, description=name, value=ALL)
        for name, options in choices(docket).items()
    }
    shown = ipywidgets.Output()

    def redraw(_change: Any = None) -> None:
        chosen = {name: menu.value for name, menu in menus.items() if menu.value != ALL}
        shown.clear_output(wait=True)
        with shown:
            display(docket.where(**chosen))

    for menu in menus.values():
        menu.observe(redraw, names="value")
    redraw()
    return display(ipywidgets.VBox([ipywidgets.HBox(list(menus.values())), shown]))


def choices(docket: Docket) -> dict[str, list[str]]:
    """What each menu offers, for arguments of `Docket.where`."""
    used = {kind_of(v) for _, v in docket.rows}
    return {
        "article": [ALL, *(key for key in articles() if any(c.id[0] == key for c, _ in docket.rows))],
        "subject": [ALL, *dict.fromkeys(c.subject for c, _ in sorted(docket.rows, key=lambda row: row[0].notebook))],
        "verdict": [ALL, *(word for word in WORDS if word in used)],
    }
