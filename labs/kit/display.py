"""Output during and after a run: sentences and tables in a cell, live progress, and the monitor's strip below it.

The launching process shares its CPU cores with the ranks, so a view only formats a few KB of text twice a second and
draws no figure until they are done. The strip (a lane per core or GPU, CPU use by other programs, peak memory) is
inline SVG under 4 KB, on its own white card for light and dark themes.
"""

from __future__ import annotations

import contextlib
import html
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from labs.kit.monitor import Monitor, Series, Trace


REFRESH_S = 0.5


class View:
    """Follows a run without showing anything."""

    def __enter__(self) -> View:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.close(failed=error is not None)

    def watch(self, monitor: Monitor, progress: Path) -> None:
        """Start watching a run: `monitor` samples it, and rank 0 writes its progress to the file `progress`."""
        self.monitor, self.file, self.start, self.next = monitor, progress, time.monotonic(), 0.0
        self.last = (0, 0, "")

    def refresh(self) -> None:
        """Draw if REFRESH_S has passed; called some 30 times a second."""
        if (now := time.monotonic()) >= self.next:
            self.next = now + REFRESH_S
            self.draw(*self.read())

    def read(self) -> tuple[int, int, str]:
        """Return (done, total, message) as rank 0 last wrote them; zeros before that."""
        with contextlib.suppress(OSError):  # the file doesn't exist yet, or no longer
            self.last = tuple(json.loads(self.file.read_text()))
        return self.last

    def draw(self, done: int, total: int, message: str) -> None: ...

    def note(self, text: str) -> None:
        """Show one line about the run that stays, such as its devices; "" shows nothing."""

    def close(self, failed: bool = False) -> None: ...


def _monospace(text: str) -> str:
    return f'<div class="labs-progress" style="font-family:monospace">{text}</div>'


class TerminalView(View):
    """A tqdm bar on stderr; under torchrun, rank 0 calls `progress` directly."""

    def __init__(self, lab: str) -> None:
        from tqdm import tqdm

        bar_format = "{desc}: {percentage:3.0f}% |{bar}| {elapsed} {postfix}"
        self.bar = tqdm(desc=lab, total=1, bar_format=bar_format, disable=not sys.stderr.isatty(), leave=False)

    def watch(self, monitor: Monitor, progress: Path) -> None:
        super().watch(monitor, progress)
        self.bar.reset()  # its clock starts with the run, not with the wait before it

    def draw(self, done: int, total: int, message: str) -> None:
        self.progress(done, total, message)

    def note(self, text: str) -> None:
        if text:
            self.bar.write(text, file=sys.stderr)

    def progress(self, done: int, total: int, message: str) -> None:
        self.bar.total, self.bar.n = max(total, 1), done
        self.bar.set_postfix_str(message, refresh=True)

    def close(self, failed: bool = False) -> None:
        self.bar.close()


class NotebookView(View):
    """One output area in the cell: a bar, the last metric and the monitor's strip."""

    def __init__(self, lab: str, nproc: int) -> None:
        from IPython.display import HTML, display

        self.lab, self.nproc, self.HTML = lab, nproc, HTML
        self.start, self.state, self.noted = time.monotonic(), "starting", ""
        self.handle = display(HTML(self._page(0, 0, "starting ranks")), display_id=True)

    def note(self, text: str) -> None:
        self.noted = text

    def draw(self, done: int, total: int, message: str) -> None:
        self.state = "running"
        self.handle.update(self.HTML(self._page(done, total, message) + self._strip()))

    def close(self, failed: bool = False) -> None:
        done, total, message = self.read() if hasattr(self, "file") else (0, 0, "not started")
        self.state = "stopped" if failed else "done"
        done = done if failed else total  # labs report what they start, so the last part is done as well
        self.handle.update(self.HTML(self._page(done, total, message) + self._strip()))

    def _strip(self) -> str:
        trace = self.monitor.trace if hasattr(self, "monitor") else None
        return strip_html(trace) if trace is not None and trace.t_s else ""

    def _page(self, done: int, total: int, message: str) -> str:
        seconds = time.monotonic() - self.start
        ranks = f"{self.nproc} rank{'s' if self.nproc > 1 else ''}"
        bar = f'<progress max="{total}" value="{done}" style="width:12em"></progress>' if total else ""
        text = html.escape(f"{self.lab}: {ranks}, {self.state}, {seconds:.1f} s  {message}")
        noted = _monospace(html.escape(self.noted)) if self.noted else ""
        return _monospace(f"{bar} {text}") + noted


def open_view(lab: str, nproc: int) -> View:
    """Return the view for this process: NotebookView in a notebook's kernel, otherwise a silent one."""
    return NotebookView(lab, nproc) if _in_notebook() else View()


def _in_notebook() -> bool:
    if "ipykernel" not in sys.modules:
        return False
    from IPython import get_ipython

    return get_ipython() is not None


COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito
LEFT, ROOM, RIGHT, LANE, GAP, TOP, AXIS = 124, 386, 130, 26, 5, 6, 24  # pixels
MAX_LANES, POINTS = 8, 40


def strip_html(trace: Trace) -> str:
    """Return the strip as an HTML image, because JupyterLab removes inline SVG from untrusted notebooks."""
    alt = html.escape(alt_text(trace))
    source = quote(strip_svg(trace), safe=" =:/,;()%'")
    return f'<img alt="{alt}" src="data:image/svg+xml,{source}">'


def strip_svg(trace: Trace) -> str:
    """Draw `trace` as an SVG of a few KB: a lane for each GPU or core, and one for other programs."""
    lanes = _lanes(trace)
    width, height = LEFT + ROOM + RIGHT, TOP + (LANE + GAP) * len(lanes) + AXIS
    span = max(trace.t_s[-1], 1.0)
    parts = []
    for row, (label, color, series, note) in enumerate(lanes):
        parts.append(
            f'<g transform="translate({LEFT},{TOP + row * (LANE + GAP)})"><path d="M0 {LANE}h{ROOM}" stroke="#bbb"/>'
            f'<path d="{_area(trace.t_s, series.values, span)}" fill="{color}"/>'
            f'<text x="-8" y="18" text-anchor="end">{label}</text><text x="{ROOM + 26}" y="18">{note}</text></g>'
        )
    for at, anchor, text in (
        (LEFT, "start", "0 s"),
        (LEFT + ROOM, "end", f"{span:.1f} s"),
        (LEFT + ROOM + 26, "start", "mean, peak"),
    ):
        parts.append(f'<text x="{at}" y="{height - 6}" text-anchor="{anchor}" fill="#555">{text}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="14" fill="#222" style="max-width:100%;height:auto">'
        f'<rect width="{width}" height="{height}" rx="4" fill="#fff"/>{"".join(parts)}</svg>'
    )


def alt_text(trace: Trace) -> str:
    """Describe the strip in one sentence."""
    busy = "; ".join(f"{label} {note}" for label, _, _, note in _lanes(trace))
    return f"Use over {trace.t_s[-1]:.1f} s, mean and peak memory: {busy}"


def _lanes(trace: Trace) -> list[tuple[str, str, Series, str]]:
    """Return (label, colour, series, note) of each lane: GPUs if there are any, otherwise cores with ranks first."""
    gpus, lanes = trace.find("gpu_percent"), []
    cores = sorted(trace.find("cpu_percent"), key=lambda s: (trace.rank_of_core.get(s.per["core"], 99), s.per["core"]))
    for i, series in enumerate((gpus or cores)[:MAX_LANES]):
        if gpus:
            label, color = f"GPU {series.per['gpu']}", COLORS[i % len(COLORS)]
            memory = trace.peak("gpu_memory_bytes", gpu=series.per["gpu"])
        else:
            core = series.per["core"]
            rank = trace.rank_of_core.get(core)
            label = f"core {core}" if rank is None else f"core {core}, rank {rank}"
            color = "#777" if rank is None else COLORS[rank % len(COLORS)]
            memory = math.nan if rank is None else trace.peak("resident_bytes", rank=rank)
        note = f"{_mean(series):.0f} %" + ("" if math.isnan(memory) else f", {_bytes(memory)}")
        lanes.append((label, color, series, note))
    others = [("others", "#999", s, f"{_mean(s):.0f} % of CPU") for s in trace.find("neighbours_percent")]
    return lanes + others


def _area(t_s: list[float], values: list[float | None], span: float) -> str:
    """Return the SVG path of the filled curve through the means of up to POINTS bins, in whole pixels."""
    bins: dict[int, list[float]] = {}
    for t, v in zip(t_s, values, strict=True):
        if v is not None:
            bins.setdefault(min(POINTS - 1, int(t / span * POINTS)), []).append(v)
    if not bins:
        return ""
    xs = [round((b + 0.5) / POINTS * ROOM) for b in sorted(bins)]
    ys = [round(LANE * (1 - min(100.0, statistics.fmean(bins[b])) / 100)) for b in sorted(bins)]
    return f"M{xs[0]} {LANE}" + "".join(f"L{x} {y}" for x, y in zip(xs, ys, strict=True)) + f"V{LANE}z"


def _mean(series: Series) -> float:
    return statistics.fmean(series.present) if series.present else 0.0


def _bytes(value: float) -> str:
    return f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"
