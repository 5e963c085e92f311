"""The preflight for a room: GO or NO-GO for the course on this machine in about 10 seconds, with a report as JSON.

    python -m labs.hardware_probe --preflight                     # exit code 0 GO, 1 NO-GO, 2 bad input
    python -m labs.hardware_probe --preflight --require-gpus 2    # NO-GO unless torch can use two GPUs
    python -m labs.hardware_probe --preflight --report mine.json  # default: the room's folder, or build/preflight.json

It checks what the first minutes of a course need: this version's packages and files, a working kernel, ranks that
start, and writable folders. It measures no speed: leave out --preflight for that. Nothing is sent anywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import textwrap
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from labs.kit import cli, fingerprint, preflight, timeouts
from labs.kit.errors import BadInput
from labs.kit.host import affinity
from labs.kit.preflight import MARKS, Check, system

ROOT = Path(__file__).parents[2]
PROG = "python -m labs.hardware_probe"
TAKES = ("--report", "--json", "--require-gpus")
PORT = 8888  # Jupyter's default
KERNEL_LIMIT_S = 45.0  # a kernel on a crowded machine took 30
RANKS_LIMIT_S = 30.0
SLOW_IMPORT_S = 15.0
BUSY_PERCENT = 10.0  # as in labs.kit.monitor
TEMPORARY_BYTES = 2**29  # notebook 05 writes the most: 0.42 GiB
INTERRUPTED = 130
ANEW = "run: rm -rf .venv, then: make lab"
INSTALL = "python -m pip install -c constraints.txt -e '.[course]'"
SHOWS = """
import sys
from labs.kit.record import Record, Records
from IPython.display import display
display(Records([Record("preflight", "answer", "s", (1.0,))]))
print("prefix", sys.prefix)
"""
# These change timings. The report contains their names, never their values.
SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "LD_PRELOAD", "CUDA_LAUNCH_BLOCKING")
SETTINGS += ("NVIDIA_TF32_OVERRIDE", "PYTORCH_NO_CUDA_MEMORY_CACHING", "TORCH_DISTRIBUTED_DEBUG", "NCCL_DEBUG")


Found = Check | list[Check]
GO_ON = "continue; if a notebook fails, show this line to your instructor"
DETAIL_CHARACTERS = 160


@dataclass(frozen=True)
class Trial:
    """One thing to try, in its own thread."""

    name: str
    run: Callable[[], Found]
    limit_s: float = 5.0
    too_late: Check | None = None
    """The result if `run` hasn't returned after `limit_s`; default: a warning."""


class Started:
    """A trial running in a thread."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.found, self.until = trial, [], time.monotonic() + trial.limit_s
        self.thread = threading.Thread(target=self._run, name=trial.name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.found = guarded(self.trial.name, self.trial.run)

    def result(self) -> list[Check]:
        """Return the checks; at the limit, the trial's `too_late` result, abandoning its thread."""
        self.thread.join(max(0.0, self.until - time.monotonic()))
        if not self.thread.is_alive():
            return self.found
        late = f"no answer after {self.trial.limit_s:g} s"
        return [self.trial.too_late or Check(self.trial.name, "warn", late, GO_ON)]


def guarded(name: str, run: Callable[[], Found]) -> list[Check]:
    """Return the checks that `run` returns; if it raises, a warning with the name and the reason."""
    try:
        found = run()
    except Exception as e:
        return [unknown(name, e)]
    return found if isinstance(found, list) else [found]


def unknown(name: str, error: BaseException) -> Check:
    """Return a warning that `name` couldn't be checked."""
    return Check(name, "warn", f"could not be checked: {reason(error)}", GO_ON)


def reason(error: BaseException) -> str:
    """Return an exception's type and first line, with the home folder (a user's name) as ~."""
    first = next(iter(str(error).splitlines()), "")
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return text.replace(str(Path.home()), "~")[:DETAIL_CHARACTERS]


# The course's files and packages


def notebooks(root: Path) -> Check:
    """Check that all notebooks named in the README exist and can be read."""
    expected = sorted(set(re.findall(r"notebooks/\w+\.ipynb", (root / "README.md").read_text("utf-8"))))
    lost = [name for name in expected if not _is_notebook(root / name)]
    if lost:
        return Check("notebooks", "fail", f"missing or unreadable: {_some(lost)}", "run: git checkout -- notebooks")
    return Check("notebooks", "pass", f"{len(expected)} can be read")


def _is_notebook(path: Path) -> bool:
    with contextlib.suppress(ValueError, OSError):
        return bool(fingerprint.notebook(path))
    return False


def data(root: Path) -> Check:
    """Compare the labs' training data with its checksums."""
    folder = root / "labs" / "common" / "data"
    sums = dict(line.split()[::-1] for line in (folder / "SHA256SUMS").read_text("ascii").splitlines())
    bad = [name for name, digest in sums.items() if _sha256(folder / name) != digest]
    if bad:
        return Check("data", "fail", f"damaged or missing: {_some(bad)}", "run: git checkout -- labs/common/data")
    return Check("data", "pass", f"{len(sums)} files intact")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def packages(root: Path) -> Check:
    """Compare the installed packages with constraints.txt; torch has its own check."""
    lines = (root / "constraints.txt").read_text("utf-8").splitlines()
    tested = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    needed = [re.match(r"[\w.-]+", p)[0] for p in project["dependencies"] + project["optional-dependencies"]["course"]]
    missing = sorted(name for name in needed if version(name) is None)
    if missing:
        own = (root / ".venv" / "bin" / "python").exists() and Path(sys.prefix) != root / ".venv"
        remedy = ".venv/bin/python -m labs.hardware_probe --preflight" if own else f"make lab, or {INSTALL}"
        return Check("packages", "fail", f"not installed in this Python: {_some(missing)}", f"run: {remedy}")
    pairs = ((name, version(name), want) for name, want in tested.items() if name != "torch")
    other = [f"{name} {have} (tested {want})" for name, have, want in pairs if have and have.partition("+")[0] != want]
    if other:
        return Check("packages", "warn", f"{len(other)} differ from constraints.txt: {_some(other)}", f"run: {INSTALL}")
    return Check("packages", "pass", f"{len(tested)} as tested")


def version(name: str) -> str | None:
    """Return the installed version of a package; None if it isn't installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _some(names: Sequence[str]) -> str:
    return ", ".join(Path(n).name for n in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# This machine


def quiet(percent: float) -> Check:
    """Judge the share of the usable cores that other programs use."""
    if percent <= BUSY_PERCENT:
        return Check("quiet cores", "pass", f"others take {percent:.0f} %")
    detail = f"other programs take {percent:.0f} % of the usable cores: timings will suffer"
    return Check("quiet cores", "warn", detail, "close other programs (top shows them), then run this again")


def busy_percent(seconds: float = 0.5) -> float:
    """Return the percentage of the usable cores that is busy while this process sleeps."""
    import psutil

    use = psutil.cpu_percent(interval=seconds, percpu=True)
    cores = [use[c] for c in affinity() if c < len(use)] or use
    return sum(cores) / len(cores)


def settings(environ: Mapping[str, str]) -> Check:
    """Look for environment variables that change timings."""
    found = [name for name in SETTINGS if environ.get(name)]
    if not found:
        return Check("settings", "pass", "no variable that changes timings")
    return Check("settings", "warn", f"set here, and changing timings: {', '.join(found)}", f"unset {' '.join(found)}")


def port(number: int = PORT) -> Check:
    """Check that JupyterLab's usual port is free."""
    try:
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Jupyter's server does
            s.bind(("127.0.0.1", number))
    except OSError as e:
        why = "is taken, so JupyterLab uses the next one" if e.errno == errno.EADDRINUSE else f"fails: {e.strerror}"
        remedy = 'open the link that JupyterLab prints, or run: make lab LAB_ARGS="--port 9000"'
        return Check("port", "warn", f"{number} {why}", remedy)
    return Check("port", "pass", f"{number} is free")


def course_place(root: Path, where: str = "") -> Check:
    """Check that the course isn't on a Windows disk under WSL, where reading is many times slower."""
    if (where or system()) == "WSL" and re.match(r"/mnt/[a-z]/", f"{root}/"):
        remedy = "copy it into WSL's own home: cp -r . ~/course && cd ~/course && make lab"
        return Check("course folder", "warn", "on a Windows disk, which WSL reads slowly", remedy)
    return Check("course folder", "pass", "on a disk of this system")


def folders(root: Path) -> list[Check]:
    """Write a file into each folder that must be writable."""
    from jupyter_core.paths import jupyter_runtime_dir

    places = {
        "my": (root / "my", 0, "run: chmod -R u+w . (or clone the course into your own home)"),
        "runtime": (Path(jupyter_runtime_dir()), 0, "run: export JUPYTER_RUNTIME_DIR=$(mktemp -d)"),
        "temporary": (Path(tempfile.gettempdir()), TEMPORARY_BYTES, "run: export TMPDIR=/var/tmp"),
    }
    found = []
    for name, (folder, need, remedy) in places.items():
        problem = folder_problem(folder, need)
        bad = Check(f"{name} folder", "fail", f"takes no files: {problem}", remedy)
        found.append(bad if problem else Check(f"{name} folder", "pass", "takes files"))
    return found


def folder_problem(folder: Path, need_bytes: int = 0) -> str:
    """Return why `folder`, or its nearest existing parent, isn't writable; "" if it is."""
    there = next(p for p in (folder, *folder.parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=there, prefix="labs-") as f:
            f.write(b"x")
            f.flush()
        free = shutil.disk_usage(there).free
    except OSError as e:
        return e.strerror or str(e)
    return f"{free / 2**20:.0f} MiB free, {need_bytes / 2**20:.0f} MiB needed" if free < need_bytes else ""


def room(folder: Path | None) -> list[Check]:
    """Check the learner's folder in the room; nothing without COURSE_ROOM."""
    if not os.environ.get("COURSE_ROOM", "").strip():
        return []
    if folder is None or folder_problem(folder):
        remedy = "mount the share, or ask your instructor to run: chmod 1777 THE_ROOM_FOLDER"
        return [Check("room", "warn", "your folder in COURSE_ROOM takes no files", remedy)]
    return [Check("room", "pass", "your folder in it takes files")]


def room_folder() -> Path | None:
    """Return the learner's folder in the room, or None, without printing the room's messages."""
    from labs.kit.room import own_folder

    with open(os.devnull, "w") as silent, contextlib.redirect_stderr(silent):
        return own_folder()


# Trials: a kernel, and ranks


class KernelTrial:
    """A kernel in the notebooks' folder, started as `make lab` does it, that must show a table of records."""

    def __init__(self, root: Path, limit_s: float = KERNEL_LIMIT_S) -> None:
        self.root, self.limit_s = root, limit_s
        self.manager: Any = None

    def run(self) -> Check:
        """Start a kernel, run one cell, and end the kernel."""
        from jupyter_client import KernelManager
        from jupyter_core.paths import jupyter_runtime_dir

        if Path(sys.prefix) == self.root / ".venv":
            from labs.kit.course import use_own_kernel

            use_own_kernel()
        start, said = time.monotonic(), {"html": "", "text": ""}
        file = Path(jupyter_runtime_dir()) / f"kernel-preflight-{secrets.token_hex(8)}.json"
        with tempfile.TemporaryFile(prefix="labs-") as log:
            try:
                file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.manager = KernelManager(kernel_name="python3", connection_file=str(file))
                self.manager.start_kernel(cwd=str(self.root / "notebooks"), stdout=log, stderr=log)
                seconds = self._ask(start, said)
            except Exception as e:
                log.seek(0)
                last = log.read().decode(errors="replace").strip().splitlines()[-1:]
                return Check("kernel", "fail", f"runs no cell: {last[0] if last else reason(e)}", ANEW)
            finally:
                self.end()
        prefix = re.search(r"^prefix (.*)$", said["text"], re.MULTILINE)
        if prefix is None or "preflight" not in said["html"]:
            return Check("kernel", "fail", "answers, but shows no table of records", ANEW)
        if os.path.realpath(prefix[1]) != os.path.realpath(sys.prefix):
            remedy = "run: export JUPYTER_PREFER_ENV_PATH=1; unset JUPYTER_PATH (make lab does both)"
            return Check("kernel", "fail", "python3 is a kernel of another Python", remedy)
        return Check("kernel", "pass", f"answers after {seconds:.1f} s and shows records")

    def _ask(self, start: float, said: dict[str, str]) -> float:
        def take(message: dict) -> None:
            content = message["content"]
            said["html"] += content.get("data", {}).get("text/html", "")
            said["text"] += content.get("text", "")

        client = self.manager.blocking_client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=self.limit_s)
            seconds = time.monotonic() - start
            client.execute_interactive(SHOWS, timeout=self.limit_s, allow_stdin=False, output_hook=take)
        finally:
            client.stop_channels()
        return seconds

    def end(self) -> None:
        """End the kernel if it runs, and remove its connection file."""
        manager, self.manager = self.manager, None
        if manager is not None:
            with contextlib.suppress(Exception):
                manager.shutdown_kernel(now=True)
            Path(manager.connection_file).unlink(missing_ok=True)


class RanksTrial:
    """Ranks started as in a notebook: the fork server loads torch, ranks start, multiply, exchange a sum, and end."""

    def __init__(self) -> None:
        from labs.kit.fork_server import start_fork_server

        self.start, self.start_s = time.monotonic(), time.time()
        self.server = start_fork_server(lean=True, forked=True)

    def run(self, facts: preflight.Facts | None, require_gpus: int = 0) -> list[Check]:
        """Launch ranks on the available devices and judge their results."""
        try:
            while not self.server.ready.exists():
                if time.monotonic() - self.start > timeouts.IMPORT_S:
                    raise TimeoutError(f"torch wasn't loaded within {timeouts.IMPORT_S:g} s")
                time.sleep(0.02)
            warm_s = max(0.0, self.server.ready.stat().st_mtime - self.start_s)
            found = []
            for nproc, device in plans(facts.gpus_for_torch if facts else 0, require_gpus):
                found += preflight.rank_checks(*_launched(nproc, device), facts)
        except Exception as e:
            last = str(e).strip().splitlines()[-1:] or [reason(e)]
            return [Check("ranks", "fail", last[0], f"run: {PROG} --smoke (it shows what the ranks print)")]
        detail = f"torch loads in {warm_s:.1f} s"
        if warm_s > SLOW_IMPORT_S:
            slow = Check("first launch", "warn", detail, "put .venv on a local disk, or close other programs")
            return [*found, slow]
        return [*found, Check("first launch", "pass", detail)]


def plans(gpus: int, require_gpus: int = 0) -> list[tuple[int, str]]:
    """Return launches to try as (ranks, device): two ranks, or as many as required; a single GPU is tried alone."""
    if gpus == 1:
        return [(2, "cpu"), (1, "cuda")]
    return [(min(max(2, require_gpus), gpus), "cuda")] if gpus else [(2, "cpu")]


def _launched(nproc: int, device: str) -> tuple[Any, float]:
    from labs.kit.display import View
    from labs.kit.launch import launch

    with _without_room():
        run = launch(
            "hardware_probe",
            nproc,
            timeout_s=RANKS_LIMIT_S,
            device=device,
            oversubscribe=True,
            view=View(),
            parts=("correctness",),
        )
    return run, run.seconds


@contextmanager
def _without_room() -> Iterator[None]:
    before = os.environ.pop("COURSE_ROOM", None)
    try:
        yield
    finally:
        if before is not None:
            os.environ["COURSE_ROOM"] = before


# The report


@dataclass(frozen=True)
class Report:
    """All checks, and what an instructor wants to know about the machine. Contains no host names or folders."""

    checks: Sequence[Check]
    course: str | None = None
    name: str | None = None
    seconds: float = 0.0
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)

    def with_status(self, status: str) -> list[Check]:
        return [c for c in self.checks if c.status == status]

    @property
    def verdict(self) -> str:
        """ "GO" unless a check failed: warnings don't stop a course."""
        return "NO-GO" if self.with_status("fail") else "GO"

    @property
    def headline(self) -> str:
        """The verdict in one line: "NO-GO: fix memory, data; 1 warning"."""
        failed = ", ".join(dict.fromkeys(c.name for c in self.with_status("fail")))
        warnings = len(self.with_status("warn"))
        after = f"; {warnings} warning{'s' * (warnings > 1)}" if warnings else ""
        return f"{self.verdict}: {'fix ' + failed if failed else 'ready for the course'}{after}"

    def as_json(self) -> str:
        """Return one JSON object, which `python -m labs.classroom` reads."""
        reasons = [f"{c.name}: {c.detail}" for c in self.with_status("fail")]
        head = {"verdict": self.verdict, "reasons": reasons, "warnings": len(self.with_status("warn"))}
        utc = datetime.now(UTC).isoformat(timespec="seconds")
        return json.dumps({**head, "utc": utc, **asdict(self)}, indent=2) + "\n"

    def as_text(self, saved: str = "") -> str:
        """Return the headline, problems with fixes, passed checks, the report's place, the headline."""
        banner = f" {self.headline} ".center(80, "=")
        lines = [banner, f"course {self.course or 'unknown'}  {self.name or ''}  {self.seconds:.1f} s"]
        for c in (*self.with_status("fail"), *self.with_status("warn")):
            lines += [f"{MARKS[c.status]}  {c.name}: {c.detail}", f"      -> {c.remedy}"]
        fine = "; ".join(f"{c.name}: {c.detail}" for c in self.with_status("pass"))
        lines += textwrap.wrap(fine, 80, initial_indent="ok    ", subsequent_indent="      ", break_on_hyphens=False)
        return "\n".join([*lines, *([f"report: {saved}"] if saved else []), banner]) + "\n"


def inspect(require_gpus: int, kernel: KernelTrial, root: Path = ROOT) -> Report:
    """Check everything; takes about 10 s on two cores."""
    start = time.monotonic()
    first = guarded("quiet cores", lambda: quiet(busy_percent()))  # before anything else runs
    trials = [
        Trial("kernel", kernel.run, 2 * kernel.limit_s + 5),
        Trial("port", port),
        Trial("packages", lambda: packages(root), 10),
        Trial("notebooks", lambda: notebooks(root), 15),
        Trial("data", lambda: data(root), 10),
        Trial("course folder", lambda: course_place(root)),
        Trial("folders", lambda: folders(root)),
        Trial("settings", lambda: settings(os.environ)),
    ]
    started = [Started(t) for t in trials]
    facts, found = None, []
    try:
        ranks = RanksTrial()
        facts = preflight.gather(require_gpus)
        found = [*preflight.machine_checks(facts), *ranks.run(facts, require_gpus)]
    except Exception as e:
        found = [Check("imports", "fail", reason(e), "run: make lab (it installs what is missing)")]
    finally:
        tried = [c for s in started for c in s.result()]
        kernel.end()
    folder = room_folder() if facts else None
    return Report(
        checks=[*found, *tried, *first, *room(folder)],
        course=fingerprint.course(root) if (root / "notebooks").is_dir() and not _lost(tried) else None,
        name=folder.name if folder else None,
        seconds=round(time.monotonic() - start, 1),
        machine=machine(facts) if facts else {},
        versions={n: version(n) for n in ("torch", "jupyterlab", "ipykernel")} | {"python": platform.python_version()},
    )


def _lost(tried: Sequence[Check]) -> bool:
    return any(c.name == "notebooks" and c.status != "pass" for c in tried)


def machine(facts: preflight.Facts) -> dict[str, Any]:
    """Return the inventory for the instructor."""
    from labs.kit.hardware import cpu_name

    gpus = [{"name": g.name, "memory_bytes": g.memory_total_bytes} for g in facts.report.gpus]
    container = facts.container
    return {
        "cpu": cpu_name(),
        "cores": container.cores,
        "memory_available_bytes": container.memory_available_bytes,
        "gpus": gpus,
        "gpus_for_torch": facts.gpus_for_torch,
        "driver": facts.report.driver,
        "platform": f"{system()} {platform.release()} {platform.machine()}",
    }


# The command


def end_children() -> None:
    """End all processes that this command started."""
    with contextlib.suppress(ImportError):
        import psutil

        server = getattr(sys.modules.get("labs.kit.fork_server"), "_current", None)
        if server is not None:
            server.close()
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "resource_tracker" not in " ".join(child.cmdline()):  # it ends by itself, last
                    child.kill()


class Parser(argparse.ArgumentParser):
    """Reports bad input in one line with exit code 2, as every lab does."""

    def error(self, message: str) -> NoReturn:
        cli.fail(PROG, message)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options that go with --preflight; reject any other."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=PROG, description=__doc__, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("--preflight", action="store_true", help="GO or NO-GO, in place of measuring speed limits")
    parser.add_argument("--report", type=Path, metavar="FILE", help="where the JSON report goes")
    parser.add_argument("--json", action="store_true", help="print the report in place of text")
    parser.add_argument("--require-gpus", type=int, default=0, metavar="N", help="NO-GO unless torch can use N GPUs")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(f"{unknown[0].partition('=')[0]} does not go with --preflight, which takes {', '.join(TAKES)}")
    if "RANK" in os.environ:
        parser.error("--preflight starts its own ranks: run it without torchrun")
    if options.require_gpus < 0:
        parser.error(f"--require-gpus must be at least 0, not {options.require_gpus}")
    try:
        cli.Output(options.report)
    except BadInput as e:
        parser.error(str(e).replace("--out", "--report"))
    return options


def save(report: Report, chosen: Path | None) -> tuple[str, bool]:
    """Write the report; return (place or problem, whether it was written)."""
    from labs.kit.record import write_atomic

    folder = room_folder() if chosen is None and report.name else None
    path = chosen or (folder / "preflight.json" if folder else ROOT / "build" / "preflight.json")
    shown = "preflight.json in your folder of the room" if folder else str(chosen or path.relative_to(ROOT))
    try:
        write_atomic(path, report.as_json())
    except OSError as e:
        return f"not written to {shown} ({e.strerror}): choose another file with --report", False
    return shown, True


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line. Exits with 0 (GO), 1 (NO-GO, or --report couldn't be written) or 2 (bad input)."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    kernel = KernelTrial(ROOT)

    def stop(*_: object) -> NoReturn:  # an exception could be swallowed in an import of torch
        kernel.end()
        end_children()
        os._exit(INTERRUPTED)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        report = inspect(options.require_gpus, kernel)
    finally:
        end_children()
    saved, written = save(report, options.report)
    with cli.closed_pipe_is_no_error():
        print(report.as_json() if options.json else report.as_text(saved), end="")
    raise SystemExit(int(report.verdict != "GO" or (options.report is not None and not written)))
