"""The ten names of the course that a notebook uses. Everything else in a cell is PyTorch, pandas or matplotlib.

    launch(lab, nproc, **parameters)    run an experiment from labs/ on real ranks
    run_on_ranks(function, nproc)       call a function of this notebook on real ranks; what they print appears here
    recorded(name)                      the same experiment's results from a GPU machine, or a published table
    predict(value, what, unit)          store your guess: `.reveal(x)` prints it beside x, `.mark(ax)` draws it
    compare(a, b)                       a / b, pair by pair: `.value`, and its 95 % interval from `.low` to `.high`
    show_figure(fig, *results, alt=)    a matplotlib figure, with a line that says where its numbers come from
    show_code(f), show_diff(f, g)       the source of a function or recipe, or the changes from one to another
    check(id, answer, SOLUTIONS)        test your answer to an exercise; show_solution(id) shows one

`launch` and `recorded` return Results. `.frame(metric)` returns them as a pandas table with one row per sample.
Without `nproc`, there are two ranks, or one on a machine with one core. They use GPUs if there are enough.
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

from labs.kit import claim_records, hardware, measure, plot, record
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
"""Environment variable with the name of the notebook in this kernel, for runs without a Jupyter server."""
RECORDS = Path(__file__).resolve().parents[2] / "records"
FEW = 9
"""With fewer pairs, a 95 % interval is nearly the range of the samples."""
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
"""Suffix of a metric's name by unit; other units are appended unchanged."""

plt.rcParams.update(plot.STYLE | {"figure.constrained_layout.use": True, "figure.dpi": plot.DPI})


class Results(record.Records):
    """The results of an experiment."""

    def __init__(self, records: Iterable[record.Record] = (), nproc: int = 0) -> None:
        super().__init__(records)
        self.nproc = nproc

    def __add__(self, other: Iterable[record.Record]) -> Results:
        return Results((*self, *other), self.nproc)

    def _repr_html_(self) -> str:
        return f"<code>{self!r}</code>"

    def frame(self, metric: str) -> pd.DataFrame:
        """Return a row per sample of `metric`: its case's columns, `rank` if it has one, `sample`, and the value.

        The value's column is named after the metric and its unit ("step_s", "gradient_bytes"). Without any results, the
        table is empty. LookupError lists the metrics.
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
    """Run the experiment `lab` on `nproc` ranks: each on its own GPU if there are enough, otherwise on a CPU core.

    A parameter such as `model` may be a function of this notebook. Raises as labs.kit.launch.launch does.
    """
    ranks = _ranks(nproc)
    results = Results(_launch.launch(lab, ranks, **parameters), ranks)
    _keep(results)
    return results


_launched: list[record.Record] = []


def _keep(results: Results) -> None:
    """Save what this notebook has launched for `python -m labs.claims --own`, if the kernel knows its notebook."""
    name = os.environ.get(NAME) or Path(os.environ.get("JPY_SESSION_NAME", "")).name
    if re.match(r"\d\d_", name):
        _launched.extend(results)
        claim_records.keep(name[:2], record.Records(_launched))


def run_on_ranks(function: Callable[..., Any], nproc: int | None = None, *args: Any) -> list[Any]:
    """Call `function(*args)` on `nproc` ranks in a process group; return their results in rank order.

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
    """Load the results of `launch(name)` recorded on a GPU machine, or the published table of that name.

    If there are none, prints one line and returns empty Results.
    """
    files = sorted(RECORDS.glob(f"*/{name}.jsonl"), reverse=True)
    found = [record.load(path) for path in files]
    of_gpus = [r for r in found if r.provenance.get("gpus") or r[0].kind == "published"]
    if not of_gpus:
        print(f"No GPU run of {name} has been recorded yet.")
        return Results()
    return Results(of_gpus[0])


def compare(a: Sequence[float], b: Sequence[float]) -> measure.Estimate:
    """Return the median of a[i] / b[i] with its 95 % interval; a[i] and b[i] must come from the same round.

    Warns below nine pairs, where the interval is hardly narrower than the range.
    """
    if 1 < len(a) < FEW and os.environ.get("COURSE_SMOKE") != "1":
        warnings.warn(f"{len(a)} pairs: the interval is nearly their range; {FEW} or more narrow it", stacklevel=2)
    return measure.paired_ratio(list(a), list(b))


def show_figure(fig: Any, *results: record.Records | FromRanks | pd.DataFrame | pd.Series, alt: str) -> None:
    """Display `fig` with alternative text `alt`, and below it where the numbers of `results` come from.

    A pandas table holds what the notebook itself measured. Without results, the line says that this course modelled
    the numbers.
    """
    require(len(alt.strip()) >= 10, "show_figure() needs alt=..., a sentence that says what the figure shows")
    title = fig._suptitle.get_text() if fig._suptitle else ""
    if len(fig.axes) == 1 and (own_title := fig.axes[0].get_title(loc="left")):
        fig.axes[0].set_title("", loc="left")
        title = own_title
    own = record.Record("notebook", "own", "", (0.0,))
    tables = any(isinstance(each, pd.DataFrame | pd.Series) for each in results)
    shown = [r for each in results if isinstance(each, record.Records) for r in each]
    shown += [r for each in results if isinstance(each, FromRanks) for r in each.origin]
    shown += record.attach_provenance([own]) if tables else []
    line = record.provenance_line(shown) if shown else "modelled by this course"
    plot.annotate(fig, title, line)
    alt = " ".join(alt.split())
    markup = plot.picture_markup(fig, alt)
    plt.close(fig)
    display({"text/html": markup, "text/plain": f"[Figure: {alt}]"}, raw=True)
