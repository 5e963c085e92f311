"""Live progress of a run: in a notebook cell, in a terminal, or nowhere.

The launching process shares its CPU cores with the ranks it watches. So a view only formats a few KB of
text twice a second; no figure is drawn before the ranks are done.
"""

from __future__ import annotations

import contextlib
import html
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labs.kit.monitor import Monitor

REFRESH_S = 0.5
LINE_S = 10.0  # between two lines about a wait, where lines cannot be overwritten


class View:
    """Watches a run and shows nothing of it, but does show what it waits for."""

    notice: Callable[[str], None] | None = None

    def __enter__(self) -> View:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.close(failed=error is not None)

    def watch(self, monitor: Monitor, progress: Path) -> None:
        """The run has started: `monitor` samples it, `progress` is where rank 0 writes how far it is."""
        self.monitor, self.file, self.start, self.next = monitor, progress, time.monotonic(), 0.0
        self.last = (0, 0, "")

    def refresh(self) -> None:
        """Draw again if it is time to; called some 30 times a second."""
        if (now := time.monotonic()) >= self.next:
            self.next = now + REFRESH_S
            self.draw(*self.read())

    def read(self) -> tuple[int, int, str]:
        """Done, total and message as rank 0 last gave them; zeros before that."""
        with contextlib.suppress(OSError):  # not there yet, or, at the end, not any more
            self.last = tuple(json.loads(self.file.read_text()))
        return self.last

    def draw(self, done: int, total: int, message: str) -> None: ...

    def waiting(self, text: str) -> None:
        """The run waits for its turn, as `text` says; "" once it does not. Called some 20 times a second."""
        if text and self.notice is None:
            self.notice = _cell_notice() if _in_notebook() else _lines()
        if self.notice is not None:
            self.notice(text)

    def close(self, failed: bool = False) -> None: ...


def _lines() -> Callable[[str], None]:
    """Shows a text as a line on standard error, at most every LINE_S seconds."""
    due = [-math.inf]

    def show(text: str) -> None:
        if text and time.monotonic() >= due[0]:
            due[0] = time.monotonic() + LINE_S
            print(text, file=sys.stderr, flush=True)

    return show


def _cell_notice() -> Callable[[str], None]:
    """Shows a text in an output area of its own in the cell, which "" leaves empty."""
    from IPython.display import HTML, display

    handle, shown = display(HTML(""), display_id=True), [""]

    def show(text: str) -> None:
        if text != shown[0]:
            shown[0] = text
            handle.update(HTML(_monospace(html.escape(text)) if text else ""))

    return show


def _monospace(text: str) -> str:
    return f'<div class="labs-progress" style="font-family:monospace">{text}</div>'


class TerminalView(View):
    """A tqdm bar on standard error; under torchrun rank 0 feeds it directly through `progress`."""

    def __init__(self, lab: str) -> None:
        from tqdm import tqdm

        bar_format = "{desc}: {percentage:3.0f}% |{bar}| {elapsed} {postfix}"
        self.bar = tqdm(desc=lab, total=1, bar_format=bar_format, disable=not sys.stderr.isatty(), leave=False)

    def watch(self, monitor: Monitor, progress: Path) -> None:
        super().watch(monitor, progress)
        self.bar.reset()  # its clock counts the run, not the wait before it

    def draw(self, done: int, total: int, message: str) -> None:
        self.progress(done, total, message)

    def waiting(self, text: str) -> None:
        if self.bar.disable:  # no terminal: lines
            super().waiting(text)
        elif text != self.bar.postfix:
            self.bar.set_postfix_str(text, refresh=True)

    def progress(self, done: int, total: int, message: str) -> None:
        self.bar.total, self.bar.n = max(total, 1), done
        self.bar.set_postfix_str(message, refresh=True)

    def close(self, failed: bool = False) -> None:
        self.bar.close()


class NotebookView(View):
    """One output area in the cell: a bar, the last metric, and the monitor's strip."""

    def __init__(self, lab: str, nproc: int) -> None:
        from IPython.display import HTML, display

        self.lab, self.nproc, self.HTML = lab, nproc, HTML
        self.start, self.state, self.waits_for = time.monotonic(), "starting", ""
        self.handle = display(HTML(self._page(0, 0, "starting ranks")), display_id=True)

    def waiting(self, text: str) -> None:
        if text != self.waits_for:
            self.state, self.waits_for = "queued" if text else "starting", text
            self.handle.update(self.HTML(self._page(0, 0, text)))

    def draw(self, done: int, total: int, message: str) -> None:
        self.state = "running"
        self.handle.update(self.HTML(self._page(done, total, message) + self._strip()))

    def close(self, failed: bool = False) -> None:
        done, total, message = self.read() if hasattr(self, "file") else (0, 0, "not started")
        self.state = "stopped" if failed else "done"
        done = done if failed else total  # labs tell what they begin: the last part is over, too
        self.handle.update(self.HTML(self._page(done, total, message) + self._strip()))

    def _strip(self) -> str:
        from labs.kit.monitor import strip_html

        trace = self.monitor.trace if hasattr(self, "monitor") else None
        return strip_html(trace) if trace is not None and trace.t_s else ""

    def _page(self, done: int, total: int, message: str) -> str:
        seconds = time.monotonic() - self.start
        ranks = f"{self.nproc} rank{'s' if self.nproc > 1 else ''}"
        bar = f'<progress max="{total}" value="{done}" style="width:12em"></progress>' if total else ""
        text = html.escape(f"{self.lab}: {ranks}, {self.state}, {seconds:.1f} s  {message}")
        return _monospace(f"{bar} {text}")


def open_view(lab: str, nproc: int) -> View:
    """The view that fits: in the cell if this is a notebook's kernel, otherwise none."""
    return NotebookView(lab, nproc) if _in_notebook() else View()


def _in_notebook() -> bool:
    """Whether this code runs in a notebook's kernel."""
    if "ipykernel" not in sys.modules:
        return False
    from IPython import get_ipython

    return get_ipython() is not None
