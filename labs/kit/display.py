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
import sys
import time
from itertools import pairwise
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
LEFT, RIGHT, LANE, GAP, TOP, AXIS = 124, 130, 26, 5, 6, 24
MAX_LANES, MAX_CHARS = 8, 4000


def strip_svg(trace: Trace, width_px: int = 640) -> str:
    """Draw `trace` as an SVG of that width, under 4 KB, with its content as text for screen readers."""
    points = 64
    while len(svg := _svg(trace, width_px, points)) > MAX_CHARS and points > 8:
        points = points * 2 // 3
    return svg


def _svg(trace: Trace, width: int, points: int) -> str:
    lanes = [*_lanes(trace), *_neighbours(trace)]
    height = TOP + (LANE + GAP) * len(lanes) + AXIS
    span = max(trace.t_s[-1] if trace.t_s else 0.0, 1.0)
    room = width - LEFT - RIGHT
    parts = []
    for row, (label, color, series, note) in enumerate(lanes):
        y = TOP + row * (LANE + GAP)
        area = _area(trace.t_s, series.values, span, room, points)
        parts.append(
            f'<g transform="translate({LEFT},{y})"><path d="M0 {LANE}h{room}" stroke="#bbb"/>'
            f'<path d="{area}" fill="{color}"/><text x="-8" y="18" text-anchor="end">{label}</text>'
            f'<text x="{room + 26}" y="18">{note}</text></g>'
        )
    parts.append(_axis(span, room, height))
    alt = html.escape(alt_text(trace))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{alt}" font-family="sans-serif" font-size="14" '
        f'fill="#222" style="max-width:100%;height:auto"><title>{alt}</title>'
        f'<rect width="{width}" height="{height}" rx="4" fill="#fff"/>{"".join(parts)}</svg>'
    )


def strip_html(trace: Trace, width_px: int = 640) -> str:
    """Return the strip as an HTML image, because JupyterLab removes inline SVG from untrusted notebooks."""
    source = quote(strip_svg(trace, width_px), safe=" =:/,;()%'")
    return f'<img alt="{html.escape(alt_text(trace))}" src="data:image/svg+xml,{source}">'


def alt_text(trace: Trace) -> str:
    """Describe the strip in one sentence."""
    if not trace.t_s:
        return "Nothing sampled yet."
    lanes = _lanes(trace)
    busy = ", ".join(f"{label} {_mean(series):.0f} %" for label, _, series, _ in lanes)
    if len(lanes) > 4:
        means = [_mean(series) for _, _, series, _ in lanes]
        busy = f"{len(lanes)} lanes, {min(means):.0f} to {max(means):.0f} %"
    peak = trace.peak("resident_bytes")
    others = trace.neighbours_percent
    return (
        f"Use over {trace.t_s[-1]:.1f} s: {busy}"
        + (f"; others {others:.0f} %" if not math.isnan(others) else "")
        + (f"; peak memory of a rank {_bytes(peak)}" if not math.isnan(peak) else "")
    )


def _lanes(trace: Trace) -> list[tuple[str, str, Series, str]]:
    """Return (label, colour, series, note) of each lane: GPUs if there are any, otherwise cores with ranks first."""
    gpus = trace.find("gpu_percent")
    found = gpus or sorted(_latest(trace.find("cpu_percent")), key=lambda s: (s.per.get("rank", 99), s.per["core"]))
    lanes = []
    for i, series in enumerate(found[:MAX_LANES]):
        rank = series.per.get("rank")
        name = f"GPU {series.per['gpu']}" if gpus else f"core {series.per['core']}"
        color = COLORS[(rank if rank is not None else i) % len(COLORS)] if gpus or rank is not None else "#777"
        memory = trace.peak("gpu_memory_bytes", gpu=series.per["gpu"]) if gpus else math.nan
        memory = trace.peak("resident_bytes", rank=rank) if math.isnan(memory) and rank is not None else memory
        note = f"{_mean(series):.0f} %" + (f", {_bytes(memory)}" if not math.isnan(memory) else "")
        lanes.append((name + (f", rank {rank}" if rank is not None else ""), color, series, note))
    return lanes


def _latest(series: list[Series]) -> list[Series]:
    """Merge the series of each core: samples from before its rank was pinned, and after."""
    cores: dict[int, Series] = {}
    for s in series:
        old = cores.get(s.per["core"])
        if old is None:
            cores[s.per["core"]] = s
            continue
        values = [a if a is not None else b for a, b in zip(s.values, old.values, strict=True)]
        cores[s.per["core"]] = type(s)(s.name, s.unit, values, {**old.per, **s.per})
    return list(cores.values())


def _neighbours(trace: Trace) -> list[tuple[str, str, Series, str]]:
    return [("others", "#999", s, f"{_mean(s):.0f} % of CPU") for s in trace.find("neighbours_percent")]


def _area(t_s: list[float], values: list[float | None], span: float, room: int, points: int) -> str:
    """Return the SVG path of the filled curve: means of at most `points` bins, whole pixels, relative steps."""
    bins: dict[int, list[float]] = {}
    for t, v in zip(t_s, values, strict=True):
        if v is not None:
            bins.setdefault(min(points - 1, int(t / span * points)), []).append(v)
    if not bins:
        return ""
    xy = [
        (round((b + 0.5) / points * room), round(LANE * (1 - min(100.0, sum(v) / len(v)) / 100)))
        for b, v in sorted(bins.items())
    ]
    x0, y0 = xy[0]
    # Drop points between two of the same height, so that a steady lane is one line.
    inner = [b for a, b, c in zip(xy, xy[1:], xy[2:], strict=False) if not a[1] == b[1] == c[1]]
    xy = [xy[0], *inner, xy[-1]] if len(xy) > 1 else xy
    steps = "".join(f"l{x - px} {y - py}" for (px, py), (x, y) in pairwise(xy))
    return f"M{x0} {LANE}V{y0}{steps}V{LANE}z"


def _axis(span: float, room: int, height: int) -> str:
    """Draw the time axis in seconds, and label the two numbers right of each lane."""
    most = max(1, room // 60)
    step = next(s for s in (0.5, 1, 2, 5, 10, 30, 60, 300, 900, 3600, 1e9) if span / s <= min(6, most))
    marks = [i * step for i in range(int(span / step + 1e-9) + 1)]
    ticks = "".join(f'<text x="{LEFT + round(t / span * room)}" y="{height - 6}">{t:g} s</text>' for t in marks)
    note = f'<text x="{LEFT + room + 26}" y="{height - 6}" fill="#555">mean, peak</text>'
    return f'<g text-anchor="middle" fill="#555">{ticks}</g>{note}'


def _mean(series: Series) -> float:
    present = series.present
    return sum(present) / len(present) if present else 0.0


def _bytes(value: float) -> str:
    return f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"
