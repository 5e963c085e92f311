"""Run every notebook of the course and write one browsable page of the results.

    python -m labs.kit.course                       # all of notebooks/, into build/
    python -m labs.kit.course 03_dataparallel_vs_ddp -p NPROC 1

The output folder gets the executed notebooks, their HTML pages and index.html. At the end it prints the slowest cells
and those over 30 s. The limits grow on a slow or busy machine, measured by a short calculation between notebooks. A
failing notebook doesn't stop the others. Exit code: 0 all ran, 1 a notebook failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from labs.kit import timeouts
from labs.kit.cli import fail
from labs.kit.errors import BadInput, require
from labs.kit.notebook_report import (
    CellTime,
    Entry,
    cell_times,
    over_the_limits,
    reference_s,
    slowest,
    slowness,
    write_index,
    write_page,
)

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
KERNEL_GRACE_S = 3.0


def use_own_kernel() -> None:
    """Make kernels run in this Python, even if the user has another kernel named python3."""
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    os.environ.pop("JUPYTER_PATH", None)


def execute(source: Path, target: Path, parameters: dict[str, Any], *, cell_timeout_s: float = timeouts.CELL_S) -> str:
    """Run the notebook `source` in its own folder and write it, with outputs, to `target`.

    Returns "" if every cell ran, otherwise which cell failed and the end of its traceback.
    """
    import papermill

    try:
        papermill.execute_notebook(
            source,
            target,
            parameters=parameters,
            kernel_name="python3",
            cwd=source.parent,
            execution_timeout=cell_timeout_s,
            extra_arguments=["--log-level=50"],  # otherwise a kernel stopped in a cell complains about closed sockets
            progress_bar={"desc": source.stem, "disable": None, "leave": False},
        )
    except papermill.PapermillExecutionError as e:
        trace = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(e.traceback or [f"{e.ename}: {e.evalue}"]))
        return f"Cell [{e.exec_count}]\n" + "\n".join(trace.strip().splitlines()[-12:])
    except Exception as e:
        return f"{type(e).__name__}: {e}".strip()
    return ""


def choose(notebooks: Path, names: list[str]) -> list[Path]:
    """Return all notebooks in the folder, or those with the given names. BadInput lists the valid names."""
    known = {p.stem: p for p in sorted(notebooks.glob("*.ipynb"))}
    require(bool(known), f"there are no notebooks in {notebooks}: run this in a checkout of the course")
    for name in names:
        require(Path(name).stem in known, f"there is no notebook {name!r}; there are {', '.join(known)}")
    return [known[Path(n).stem] for n in names] or list(known.values())


def own_parameters(sources: list[Path], given: dict[str, Any]) -> dict[Path, dict[str, Any]]:
    """Return each notebook's share of the given parameters: those in its parameters cell.

    Raises:
        BadInput: if no notebook has a parameter of that name.
    """
    import papermill

    has = {source: papermill.inspect_notebook(source) for source in sources}
    known = sorted({name for parameters in has.values() for name in parameters})
    for name in given:
        require(name in known, f"no notebook has a parameter {name!r}; there are {', '.join(known) or 'none'}")
    return {source: {k: v for k, v in given.items() if k in has[source]} for source in sources}


def run_course(
    entries: dict[Path, Entry],
    parameters: dict[Path, dict[str, Any]],
    out: Path,
    timeout_s: int,
    references_s: list[float] | None = None,
) -> int:
    """Run the notebooks one after another and keep `out`/index.html up to date. Returns how many failed.

    Appends the machine's pace (seconds of `reference_s`) before each notebook and after the last to `references_s`.
    """
    references_s = [] if references_s is None else references_s
    out.mkdir(parents=True, exist_ok=True)
    for number, (source, entry) in enumerate(entries.items(), start=1):
        print(f"[{number}/{len(entries)}] {source.stem}: {entry.title}", flush=True)
        references_s.append(reference_s())
        target, start = out / source.name, time.perf_counter()
        target.unlink(missing_ok=True)
        entry.state = "running"
        write_index(list(entries.values()), out)
        try:
            entry.error = execute(source, target, parameters[source], cell_timeout_s=timeout_s)
        except KeyboardInterrupt:
            entry.state = "stopped"
            write_index(list(entries.values()), out)
            raise
        entry.seconds, entry.state = time.perf_counter() - start, "failed" if entry.error else "passed"
        if target.exists():
            entry.slowest = slowest(cell_times(target), 3)
            write_page(target, entry, folder=source.parent)
        write_index(list(entries.values()), out)
        print(f"      {entry.state} in {entry.seconds:.0f} s", *entry.error.splitlines()[-1:], flush=True)
    references_s.append(reference_s())
    return sum(entry.state == "failed" for entry in entries.values())


def tell_times(times: list[CellTime], course_s: float, slower: float = 1.0) -> None:
    """Print the slowest cells, and those over the course's limits times `slower`, this machine's slowness."""
    if times:
        print("slowest cells:", *slowest(times, 5), sep="\n  ")
    for line in over_the_limits(times, course_s, slower):
        print(line)


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Treat SIGTERM and a closed terminal like Ctrl-C, and end every process started within the block."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), stop)
    try:
        yield
    finally:
        left = psutil.Process().children(recursive=True)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        for process in psutil.wait_procs(left, timeout=KERNEL_GRACE_S)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m labs.kit.course",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help="notebooks to run (default: all)")
    parser.add_argument("-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="a parameter")
    parser.add_argument("--notebooks", type=Path, default=NOTEBOOKS, help="folder of the notebooks")
    parser.add_argument("--out", type=Path, default=NOTEBOOKS.parent / "build", help="output folder")
    parser.add_argument("--cell-timeout", type=int, default=300, metavar="S", help="seconds a cell may take")
    options = parser.parse_args()
    use_own_kernel()
    logging.getLogger("papermill").setLevel(logging.ERROR)
    try:
        sources = choose(options.notebooks.resolve(), options.names)
        entries = {source: Entry.of(source) for source in sources}
        parameters = own_parameters(sources, {name: literal(value) for name, value in options.p})
    except BadInput as e:
        fail(parser.prog, str(e))
    out, references_s = options.out.resolve(), []
    try:
        with nothing_left():
            failed = run_course(entries, parameters, out, options.cell_timeout, references_s)
    except KeyboardInterrupt:
        print(f"\nstopped; {out / 'index.html'} shows what had run", file=sys.stderr)
        return 130
    seconds = sum(e.seconds for e in entries.values())
    times = [t for e in entries.values() if e.state == "passed" for t in cell_times(out / f"{e.name}.ipynb")]
    tell_times(times, seconds, slowness(references_s))
    print(f"{len(sources) - failed} passed, {failed} failed: open {out / 'index.html'}")
    return 1 if failed else 0


def literal(text: str) -> Any:
    """Parse a parameter: a Python literal such as 1, 2.5, True or [1, 2], otherwise the text itself."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


if __name__ == "__main__":
    sys.exit(main())
