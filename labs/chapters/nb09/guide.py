"""What the clinic's measurements answer, and illnesses of the trade that a CPU does not feel: tables of notebook 09."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas
from IPython.display import display

from labs.clinic.illnesses import ILLNESSES, WELL
from labs.clinic.measurements import MEASUREMENTS
from labs.kit.code import code_shown
from labs.kit.display import show_table

ANSWERS = {
    "steps": "how long a step takes on each rank, and whether it grows",
    "shares": "in which part of the step: from a trace of rank 0",
    "ops": "which operators take the time, and how many forwards there are for a backward",
    "memory": "whether memory grows from step to step",
    "arrivals": "which rank comes last to the exchange, and by how much",
    "cores": "how many cores and threads a rank uses",
    "disk": "what is read, written and forced to disk in a step",
    "census": "number formats and switches",
    "traffic": "collectives, buckets and bytes of a step",
    "same_batch": "a step without its loader",
    "batch": "a step with another batch size",
    "alone": "a step without the exchange of gradients",
}
NAMES_NONE = {
    "steps": "none: says how long",
    "shares": "none: says where",
    "alone": "none: says what the exchange costs",
}
"""What those are for that name no illness."""


def guide() -> None:
    """Each measurement, what it answers, and how many of the clinic's illnesses it is made to name."""
    rows = {}
    for name in MEASUREMENTS:
        named = sum(i.key == name for i in ILLNESSES)
        told = f"{named} of {len(ILLNESSES)}" if named else NAMES_NONE[name]
        rows[name.replace("_", " ")] = {"answers": ANSWERS[name], "names, of all illnesses": told}
    show_table(pandas.DataFrame(rows).T)


def causes() -> None:
    """The causes that `diagnose()` takes, folded: a name for each illness, and one for all who are well."""
    rows = {i.name: i.cause for i in ILLNESSES} | {WELL[0].name: "nothing, or nothing that is worth a cure"}
    show_table(pandas.DataFrame({"what it is": rows}), folded="The causes that diagnose() takes")


def code(summary: str, *parts: Callable[..., Any]) -> None:
    """The source of functions, folded below a line with that text, which opens it."""
    shown = code_shown(*parts)
    folded = f"<details><summary>{summary}</summary>\n\n{shown['text/markdown']}\n\n</details>"
    display({"text/markdown": folded, "text/plain": shown["text/plain"]}, raw=True)
