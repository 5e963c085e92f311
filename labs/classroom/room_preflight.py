"""The preflight for a room: GO or NO-GO for the course on this machine, in a few seconds, and a report as JSON.

    python -m labs.hardware_probe --preflight                     # exit code 0 GO, 1 NO-GO, 2 bad input
    python -m labs.hardware_probe --preflight --require-gpus 2    # NO-GO unless torch can use two GPUs
    python -m labs.hardware_probe --preflight --report mine.json  # default: the room's folder, or build/preflight.json

It checks what the first minutes of a course need: packages and files as in this version, a kernel that answers, ranks
that start, folders, ports and limits. It measures no speed: for that, leave out --preflight. Nothing is sent anywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from labs.classroom import course_checks, jupyter_checks, place_checks, system_checks
from labs.classroom.jupyter_checks import KernelTrial
from labs.classroom.ranks_trial import RanksTrial
from labs.classroom.verdict import Report, as_text
from labs.kit import cli, preflight
from labs.kit.errors import BadInput
from labs.kit.preflight import Check, Facts, Started, Trial, guarded, reason

try:
    import psutil
except ImportError:  # the check of packages says so
    psutil = None

ROOT = Path(__file__).parents[2]
INTERRUPTED = 130
PROG = "python -m labs.hardware_probe"
TAKES = ("--report", "--json", "--require-gpus")
BETTER_CHECKED = ("JupyterLab", "network")  # here by trials of their own, which do more


def inspect(require_gpus: int, kernel: KernelTrial, root: Path = ROOT) -> Report:
    """Check everything; takes some 10 s on two cores. `end_children` then ends what still runs."""
    start = time.time(), time.monotonic()
    folder, room_problem = _value(lambda: place_checks.room_folder(os.environ), (None, "it could not be checked"))
    quiet = guarded("quiet cores", lambda: system_checks.quiet(system_checks.busy_percent()))  # before anything starts
    number: list[str] = []
    ranks = RanksTrial()
    try:
        started = [Started(t) for t in trials(root, kernel, number)]
        machine, facts = _machine(require_gpus)
        launched = ranks.run(facts, require_gpus) if "torch" in sys.modules else []
        tried = [c for s in started for c in s.result()]
    finally:
        kernel.end()
    last = [
        *guarded("clock", lambda: system_checks.clock(system_checks.read_clock(course_checks.commit_s(root), start))),
        *place_checks.room(bool(os.environ.get("COURSE_ROOM", "").strip()), room_problem),
    ]
    return Report(
        checks=[*machine, *launched, *tried, *quiet, *last],
        course=next(iter(number), None),
        name=folder.name if folder else None,
        utc=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - start[1], 2),
        machine=_value(lambda: place_checks.machine(facts), {}) if facts else {},
        versions=_value(lambda: versions(facts, root), {}),
        ranks=ranks.about,
    )


def _value(read: Callable[[], Any], otherwise: Any) -> Any:
    try:
        return read()
    except Exception:
        return otherwise


def trials(root: Path, kernel: KernelTrial, number: list[str]) -> list[Trial]:
    """What is tried at the same time, in the order in which it is told. The course's fingerprint goes to `number`."""
    c, j, s = course_checks, jupyter_checks, system_checks
    kernel_s = kernel.ready_limit_s + j.SHOW_LIMIT_S + 5  # its own limits come first, and say more
    silent = replace(j.SILENT, detail=f"silent for {kernel_s:g} s")

    def files() -> list[Check]:
        found = c.course_files(root)
        return [c.notebooks(found), c.code(found)]

    return [
        Trial("kernel", lambda: j.kernel(kernel.run()), kernel_s, silent),
        Trial("JupyterLab", lambda: j.jupyterlab(j.lab_import()), j.IMPORT_LIMIT_S + 5),
        Trial("port", lambda: j.port(j.port_problem())),
        Trial("connection", lambda: s.connection(s.connection_problem()), s.TCP_LIMIT_S + 5),
        Trial("packages", lambda: c.versions(c.packages(root), c.outside_of_venv(root)), 10),
        Trial("notebooks", files, 15),
        Trial("data", lambda: c.data(*c.damaged_data(root)), 10),
        Trial("course number", lambda: number.append(c.fingerprint.course(root)) or [], 250),
        Trial("course folder", lambda: place_checks.course_place(root)),
        Trial("folders", lambda: place_checks.folders(place_checks.folder_problems(root))),
        Trial("processes", lambda: s.processes(s.processes_left())),
        Trial("settings", lambda: s.settings(os.environ)),
    ]


def _machine(require_gpus: int) -> tuple[list[Check], Facts | None]:
    """The longer probe's checks that need no ranks, and their facts; a torch that cannot be loaded is a failure."""
    try:
        importlib.import_module("torch")
    except Exception as e:
        return [Check("torch", "fail", f"cannot be loaded: {reason(e)}", jupyter_checks.INSTALL)], None
    facts: list[Facts] = []
    found = guarded("machine", lambda: facts.append(preflight.gather(require_gpus)) or [])
    if facts:
        found = [c for c in preflight.machine_checks(facts[0]) if c.name not in BETTER_CHECKED]
    return found, next(iter(facts), None)


def versions(facts: Facts | None, root: Path) -> dict[str, Any]:
    """Versions for the report, and packages that differ from the tested ones."""
    build = facts.build if facts else {}
    found = {name: course_checks.version(name) for name in ("jupyterlab", "ipykernel")}
    different: list[dict] = []
    guarded("packages", lambda: different.append(course_checks.packages(root).different) or [])
    found |= {"python": platform.python_version(), "torch": build.get("torch"), "cuda": build.get("cuda")}
    return {**found, "nccl": build.get("nccl"), "different": next(iter(different), {})}


def end_children() -> None:
    """End whatever this command has started and what still runs, also what a trial left that hangs."""
    if psutil is None:
        return
    current = getattr(sys.modules.get("labs.kit.fork_server"), "_current", None)
    if current is not None:
        current.close()  # fork server, ranks and their folder
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "resource_tracker" not in " ".join(child.cmdline()):  # ends by itself, last
                child.kill()


class Parser(argparse.ArgumentParser):
    """Bad input is one line and exit code 2, as for every lab."""

    def error(self, message: str) -> NoReturn:
        """One line."""
        cli.fail(PROG, message)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options that go with --preflight; any other is refused, since this measures nothing."""
    parser = Parser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--preflight", action="store_true", help="GO or NO-GO, in place of measuring speed limits")
    parser.add_argument("--report", type=Path, metavar="FILE", help="where the JSON report goes")
    parser.add_argument("--json", action="store_true", help="print the report in place of text")
    parser.add_argument("--require-gpus", type=int, default=0, metavar="N", help="NO-GO unless torch can use N GPUs")
    options, unknown = parser.parse_known_args(arguments)
    for option in (u.partition("=")[0] for u in unknown):
        parser.error(f"{option} does not go with --preflight, which takes only {', '.join(TAKES)}")
    if "TORCHELASTIC_RUN_ID" in os.environ or "RANK" in os.environ:
        parser.error("--preflight starts ranks of its own: run it without torchrun")
    if options.require_gpus < 0:
        parser.error(f"--require-gpus must be at least 0, not {options.require_gpus}")
    try:
        cli.Output(options.report)
    except BadInput as e:
        parser.error(str(e).replace("--out", "--report"))
    return options


def save(report: Report, chosen: Path | None, root: Path = ROOT) -> tuple[str, bool]:
    """Write the report: (where to, in words; whether that worked)."""
    from labs.kit.record import write_atomic

    folder = place_checks.room_folder(os.environ)[0] if chosen is None and report.name else None
    path = chosen or (folder / "preflight.json" if folder else root / "build" / "preflight.json")
    shown = "preflight.json in your folder of the room" if folder else str(chosen or path.relative_to(root))
    try:
        write_atomic(path, report.as_json())
    except OSError as e:
        return f"not written to {shown} ({e.strerror}): choose another file with --report", False
    return shown, True


def stop_at_signals(kernel: KernelTrial) -> None:
    """Ctrl-C and SIGTERM end everything, and this process at once: an exception could be lost in an import of torch."""

    def stop(*_: object) -> NoReturn:
        end_children()
        kernel.forget()
        os._exit(INTERRUPTED)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The command line. Exits with 0 (GO), 1 (NO-GO, or no report where --report asked for one) or 2 (bad input)."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    kernel = KernelTrial(ROOT)
    stop_at_signals(kernel)
    if sys.stderr.isatty():
        print("checking this machine, for some 10 s ...", end="\r", file=sys.stderr, flush=True)
    try:
        report = inspect(options.require_gpus, kernel)
    finally:
        end_children()
    saved, written = save(report, options.report)
    with cli.closed_pipe_is_no_error():
        if options.json:
            print(report.as_json(), end="")
            if not written:
                print(saved, file=sys.stderr)
        else:
            colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
            print(as_text(report, shutil.get_terminal_size((100, 24)).columns, colour, saved), end="")
    raise SystemExit(int(report.verdict != "GO" or (options.report is not None and not written)))
