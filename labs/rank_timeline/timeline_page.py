"""A merged timeline as one HTML file that zooms without a network, and as a Chrome trace for Perfetto."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2

from labs.common.profiling.intervals import clip, length
from labs.common.profiling.traces import Trace
from labs.kit.record import write_atomic
from labs.rank_timeline.clock import LANES, Merged

TEMPLATE = Path(__file__).with_name("timeline_page.html.txt")
MOST_SPANS = 400_000  # in one page: some 8 MB; what follows is left out, and the page says so


def write(merged: Merged, path: str | Path) -> Path:
    """Write the page: lanes of every rank, ms in each, each clock's offset. Nothing in it is loaded from elsewhere."""
    lanes, cut_s = _within(merged)
    steps = {n: span for n, span in merged.steps[0].items() if span[1] <= cut_s}
    data = {
        "lanes": LANES,
        "ranks": [
            {"name": f"rank {r}", "spans": [_flat(of[lane]) for lane in LANES]}
            for r, of in zip(merged.ranks, lanes, strict=True)
        ],
        "steps": _flat(list(steps.values())),
        "numbers": list(steps),
    }
    page = jinja2.Environment(autoescape=True).from_string(TEMPLATE.read_text("utf-8"))
    text = page.render(
        ranks=len(merged.ranks),
        files=[Path(t.path).name for t in merged.traces],
        lanes=LANES,
        data=data,
        clocks=merged.offsets,
        cut_s=None if cut_s == float("inf") else cut_s,
        rows=[
            (r, [1e3 * length(of[lane]) for lane in LANES]) for r, of in zip(merged.ranks, merged.lanes, strict=True)
        ],
    )
    return write_atomic(Path(path), text)


def _within(merged: Merged) -> tuple[tuple[dict, ...], float]:
    """The lanes, and up to which moment: all of them, if they are not too many for a page."""
    ends = sorted(b for of in merged.lanes for spans in of.values() for _, b in spans)
    if len(ends) <= MOST_SPANS:
        return merged.lanes, float("inf")
    cut = ends[MOST_SPANS]
    return tuple({lane: clip(spans, 0, cut) for lane, spans in of.items()} for of in merged.lanes), cut


def _flat(spans: Sequence[tuple[float, float]]) -> list[float]:
    """start, length, start, length, ... in microseconds."""
    return [round(1e6 * t, 1) for a, b in spans for t in (a, b - a)]


def write_chrome(merged: Merged, paths: Sequence[str | Path], path: str | Path) -> Path:
    """Write all events of the ranks' files as one Chrome trace: a process for each rank, all on the reference's clock.

    The files are read again as streams: the memory that this takes does not grow with them.
    """
    path = Path(path)
    files = {str(Path(p)): p for p in paths}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as out:
            out.write('{"displayTimeUnit": "ms", "traceEvents": [\n{"ph": "M", "name": "merged", "pid": 0, "args": {}}')
            for trace, offset in zip(merged.traces, merged.offsets, strict=True):
                for event in _of_rank(Trace(files[str(Path(trace.path))]), trace.rank, offset.s + merged.start):
                    out.write(",\n" + json.dumps(event))
            out.write("\n]}\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _of_rank(file: Trace, rank: int, start_s: float) -> Iterator[dict[str, Any]]:
    """The events of a file, moved to the common clock and to a process of the rank's own."""
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    threads: dict[tuple[Any, Any], int] = {}  # a GPU's streams are threads of another process in the rank's file
    shift_us = None
    for event in file.events():
        if shift_us is None:  # torch writes its base before the events
            shift_us = 1e-3 * float(file.facts.get("baseTimeNanoseconds", 0)) - 1e6 * start_s
        if event.get("ph") == "M" and str(event.get("name")).startswith("process_"):
            continue  # the rank's own name stands above
        key = (str(event.get("pid")), str(event.get("tid")))
        if key not in threads:
            threads[key] = len(threads) + 1
            if not key[1].isdigit():
                yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": threads[key], "args": {"name": key[1]}}
        moved = event | {"pid": rank, "tid": threads[key]}
        if (ts := _number(event.get("ts"))) is not None:
            moved["ts"] = round(ts + shift_us, 3)
        if "id" in event:
            moved["id"] = f"{rank}/{event['id']}"  # an arrow stays within its rank
        yield moved


def _number(value: Any) -> float | None:
    """A time as it stands in a trace, of old versions as text; None for what is none."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
