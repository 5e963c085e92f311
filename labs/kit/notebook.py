"""The ten names of the course that a notebook uses. Everything else in a cell is PyTorch, pandas or matplotlib.

    launch(lab, nproc, **parameters)    run an experiment of labs/ on real ranks
    run_on_ranks(function, nproc)       call a function of this notebook on real ranks; what they print appears here
    recorded(name)                      the same experiment as recorded on a GPU, or a published table
    predict(value, what, unit)          keep your guess: `.reveal(x)` prints it beside x, `.mark(ax)` draws it
    compare(a, b)                       a / b, pair by pair: `.value`, and its 95 % interval from `.low` to `.high`
    show_figure(fig, *results, alt=)    a matplotlib figure, and a line that says where its numbers come from
    show_code(f), show_diff(f, g)       the source of a function or a recipe, or what changes from one to the other
    check(id, answer, SOLUTIONS)        test your answer to an exercise; show_solution(id) shows one

`launch` and `recorded` return Results. `.frame(metric)` is a pandas table of them with one row per sample.
Without `nproc`, ranks are two GPUs, or else two CPU cores.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import display

from labs.kit import evidence, hardware, measure, plot, record
from labs.kit import launch as _launch
from labs.kit.check import check, predict, show_solution
from labs.kit.code import show_code, show_diff
from labs.kit.errors import require
from labs.kit.host import core_count

__all__ = [
    "check", "compare", "launch", "predict", "recorded", "run_on_ranks", "show_code", "show_diff", "show_figure",
    "show_solution",
]  # fmt: skip

NAME = "COURSE_NOTEBOOK"
"""A variable of the environment: the name of the notebook that runs in this kernel, where no server sets it."""
RECORDS = Path(__file__).resolve().parents[2] / "records"
FEW = 9
"""Below so many pairs, a 95 % interval is nearly the range of the samples."""
SUFFIXES = {
    "s": "_s",
    "B": "_bytes",
    "1/s": "_per_s",
    "B/s": "_b_s",
    "FLOP": "_flop",
    "FLOP/s": "_flop_s",
    "1": "",
    "": "",
}
"""How the name of a metric in this unit ends; other units are added to it as they are."""

plt.rcParams.update(plot.STYLE | {"figure.constrained_layout.use": True, "figure.dpi": plot.DPI})


class Results(record.Records):
    """What an experiment measured."""

    def __init__(self, records: Iterable[record.Record] = (), nproc: int = 0) -> None:
        super().__init__(records)
        self.nproc = nproc

    def __add__(self, other: Iterable[record.Record]) -> Results:
        return Results((*self, *other), self.nproc)

    def _repr_html_(self) -> str:
        return f"<code>{self!r}</code>"

    def frame(self, metric: str) -> pd.DataFrame:
        """A row per sample of `metric`: the columns of its case, `rank` if it has one, `sample`, and the value.

        The value's column has the metric's name and ends in its unit ("step_s", "gradient_bytes"). Without any
        results the table is empty. LookupError names the metrics there are.
        """
        rows = []
        for r in self.where(metric):
            rank = {} if r.layout.get("rank") is None else {"rank": r.layout["rank"]}
            column = _column(metric, r.unit)
            rows += [{**r.case, **rank, "sample": i, column: value} for i, value in enumerate(r.samples)]
        if not rows and len(self):
            raise LookupError(f"no results for {metric!r}; there are {', '.join(sorted({r.metric for r in self}))}")
        return pd.DataFrame(rows)


def _column(metric: str, unit: str) -> str:
    suffix = SUFFIXES.get(unit, f"_{unit}")
    named = not suffix or suffix.strip("_") in (metric, *metric.split("_")) or metric.endswith(suffix)
    return metric if named else metric + suffix


def launch(lab: str, nproc: int | None = None, **parameters: Any) -> Results:
    """Run the experiment `lab` on `nproc` ranks: a GPU each if there are that many, otherwise a CPU core each.

    A parameter such as `model` may be a function of this notebook. Raises as labs.kit.launch.launch does.
    """
    ranks = _ranks(nproc)
    results = Results(_launch.launch(lab, ranks, **parameters), ranks)
    _keep(results)
    return results


_launched: list[record.Record] = []


def _keep(results: Results) -> None:
    """Keep what this notebook has launched for `python -m labs.claims --own`, if the kernel knows its notebook."""
    name = os.environ.get(NAME) or Path(os.environ.get("JPY_SESSION_NAME", "")).name
    if re.match(r"\d\d_", name):
        _launched.extend(results)
        evidence.keep(name[:2], record.Records(_launched))


def run_on_ranks(function: Callable[..., Any], nproc: int | None = None, *args: Any) -> list[Any]:
    """Call `function(*args)` on `nproc` ranks in a process group; return what each returned, in rank order.

    Ranks get devices as in `launch`. A rank on a CPU core sees no GPU.
    """
    ranks = _ranks(nproc)
    device = hardware.place(ranks, "auto", True)[0].kind
    return FromRanks(_launch.run_on_ranks(function, ranks, *args, device="auto"), ranks, device)


class FromRanks(list):
    """What a function returned on each rank. `show_figure` takes it, and names the machine."""

    def __init__(self, returned: Iterable[Any], nproc: int, device: str) -> None:
        super().__init__(returned)
        layout = {"world_size": nproc, "device": device}
        self.origin = record.attach_provenance([record.Record("run_on_ranks", "runs", "1", (1.0,), layout=layout)])


def _ranks(nproc: int | None) -> int:
    return min(2, core_count()) if nproc is None else nproc


def recorded(name: str) -> Results:
    """Results of `launch(name)` as a GPU machine recorded them, or a published table of that name, from records/.

    One line says so if there are none; the Results are empty then.
    """
    files = sorted(RECORDS.glob(f"*/{name}.jsonl"), reverse=True)
    found = [record.load(path) for path in files]
    of_gpus = [r for r in found if r.provenance.get("gpus") or r[0].kind == "published"]
    if not of_gpus:
        print(f"No GPU run of {name} has been recorded yet.")
        return Results()
    return Results(of_gpus[0])


def compare(a: Sequence[float], b: Sequence[float]) -> measure.Estimate:
    """The median of a[i] / b[i] with its 95 % interval; the i-th of both were measured in the same round.

    Warns below nine pairs, where the interval is hardly narrower than the range.
    """
    if 1 < len(a) < FEW and os.environ.get("COURSE_SMOKE") != "1":
        warnings.warn(f"{len(a)} pairs: the interval is nearly their range; {FEW} or more narrow it", stacklevel=2)
    return measure.paired_ratio(list(a), list(b))


def show_figure(fig: Any, *results: record.Records | FromRanks, alt: str) -> None:
    """Display the figure `fig` with alternative text `alt`, and under it where the numbers of `results` come from.

    Without results the line says that this course's own formula gave the numbers.
    """
    require(len(alt.strip()) >= 10, "show_figure() needs alt=..., a sentence that says what the figure shows")
    if len(fig.axes) == 1 and (title := fig.axes[0].get_title(loc="left")):
        fig.axes[0].set_title("", loc="left")
        fig.suptitle(title)
    if fig._suptitle:
        title = "\n".join(plot._title_lines(fig._suptitle.get_text(), fig.get_figwidth()))
        fig.suptitle(title, x=0.01, ha="left", fontsize=plot.STYLE["axes.titlesize"], fontweight="bold")
    shown = [r for each in results for r in (each.origin if isinstance(each, FromRanks) else each)]
    line = record.provenance_line(shown) if shown else "modelled by this course"
    fig._course_records, fig._course_caption = [], line
    wrapped = "\n".join(plot._filled(line.split(), 0.97 * 72 * fig.get_figwidth(), 9))
    fig.supxlabel(wrapped, fontsize=9, color=plot.GREY, ha="left", x=0.01)
    alt = " ".join(alt.split())
    markup = plot.picture_markup(fig, alt, plot.to_png(fig))
    plt.close(fig)
    display({"text/html": markup, "text/plain": f"[Figure: {alt}]"}, raw=True)
