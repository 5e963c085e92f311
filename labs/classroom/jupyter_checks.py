"""The preflight's checks of Jupyter: a kernel that really starts, JupyterLab's own start, its port and its folders."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from queue import Empty

from labs.kit import supervise
from labs.kit.preflight import Check

PORT = 8888  # Jupyter's default
READY_LIMIT_S = 45.0  # a kernel on a crowded machine took 30: slow is told as slow, and only silence is a failure
SHOW_LIMIT_S = 30.0
IMPORT_LIMIT_S = 45.0
OTHER_PORT = 'make lab LAB_ARGS="--port 9000"'
INSTALL = "run: make lab (it installs what is missing)"
ANEW = "run: rm -rf .venv, then: make lab"
RUNTIME = "Jupyter's runtime folder"
OTHER_RUNTIME = "run: export JUPYTER_RUNTIME_DIR=$(mktemp -d)"
SILENT = Check("kernel", "fail", "silent", ANEW)
LOADS = "import jupyterlab.labapp"
MARK = "labs-preflight"
SHOWS = f"""
import sys
from labs.kit.record import Record, Records
from IPython.display import display
display(Records([Record("{MARK}", "answer", "s", (1.0,))]))
print(sys.prefix)
"""


@dataclass(frozen=True)
class Kernel:
    """What came of a kernel that was asked to show a record."""

    seconds: float = 0.0
    """Until its first answer."""
    prefix: str = ""
    """Folder of the Python that it runs in."""
    shown: bool = False
    """It imported labs and sent a table of records."""
    problem: str = ""


class KernelTrial:
    """A kernel in the notebooks' folder, started as `make lab` starts one."""

    def __init__(self, root: Path, ready_limit_s: float = READY_LIMIT_S) -> None:
        self.root, self.ready_limit_s = root, ready_limit_s
        self.manager = None
        self.connection: Path | None = None

    def run(self) -> Kernel:
        """Start it, ask it, end it."""
        from jupyter_client import KernelManager

        if Path(sys.prefix) == self.root / ".venv":
            from labs.kit.course import use_own_kernel

            use_own_kernel()  # the Makefile says the same
        try:
            self.connection = _runtime_file(f"kernel-preflight-{secrets.token_hex(8)}.json")
        except OSError as e:
            return Kernel(problem=f"{RUNTIME} takes no files: {e.strerror}")
        start = time.monotonic()
        with tempfile.TemporaryFile(prefix="labs-") as said:
            try:
                self.manager = KernelManager(
                    kernel_name="python3", transport_encryption="auto", connection_file=str(self.connection)
                )
                self.manager.start_kernel(cwd=str(self.root / "notebooks"), stdout=said, stderr=said)
                return self._ask(start)
            except Exception as e:
                return Kernel(problem=_last_line(said) or next(iter(str(e).splitlines()), type(e).__name__))
            finally:
                self.end()

    def _ask(self, start: float) -> Kernel:
        client = self.manager.blocking_client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=self.ready_limit_s)
            seconds = time.monotonic() - start
            html, printed, error = _execute(client)
        finally:
            client.stop_channels()
        return Kernel(seconds, printed.strip().rpartition("\n")[2], MARK in html, error)

    def end(self) -> None:
        """Kill the kernel if it is there, and forget it."""
        manager, self.manager = self.manager, None
        if manager is None:
            return
        pid = getattr(manager.provisioner, "pid", None)
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(Exception):
            manager.shutdown_kernel(now=True)
        self.forget()

    def forget(self) -> None:
        """Remove what the kernel was reached by."""
        if self.connection is not None:
            with contextlib.suppress(OSError):
                self.connection.unlink(missing_ok=True)


def _runtime_file(name: str) -> Path:
    """Path of a file in Jupyter's runtime folder, made if missing: where its server keeps how kernels are reached."""
    folder = runtime_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / name


def _execute(client) -> tuple[str, str, str]:  # type: ignore[no-untyped-def]
    """HTML, printed text and error of the cell SHOWS."""
    html, printed, error = "", "", ""

    def take(message: dict) -> None:
        nonlocal html, printed, error
        content = message["content"]
        html += content.get("data", {}).get("text/html", "") if message["msg_type"] == "display_data" else ""
        printed += content["text"] if message["msg_type"] == "stream" and content["name"] == "stdout" else ""
        error = f"{content['ename']}: {content['evalue']}" if message["msg_type"] == "error" else error

    try:
        client.execute_interactive(SHOWS, timeout=SHOW_LIMIT_S, allow_stdin=False, output_hook=take)
    except (TimeoutError, Empty):
        error = error or f"a cell did not end within {SHOW_LIMIT_S:g} s"
    return html, printed, error


def _last_line(said) -> str:  # type: ignore[no-untyped-def]
    said.seek(0)
    lines = said.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def kernel(found: Kernel, prefix: str = sys.prefix) -> Check:
    """Notebooks run: a kernel answers, in this Python, and shows records."""
    if found.problem:
        detail = f"does not run a cell: {found.problem}".replace(str(Path.home()), "~")
        if found.problem.startswith(RUNTIME):
            return Check("kernel", "fail", detail, OTHER_RUNTIME)
        if "ModuleNotFoundError" in found.problem or "No module named" in found.problem:
            return Check("kernel", "fail", detail, INSTALL)
        return Check("kernel", "fail", detail, ANEW)
    if not _same(found.prefix, prefix):
        return Check(
            "kernel",
            "fail",
            "python3 is a kernel of another Python than this one",
            "run: export JUPYTER_PREFER_ENV_PATH=1; unset JUPYTER_PATH (make lab does both)",
        )
    if not found.shown:
        return Check("kernel", "fail", "answers, but shows no table of records", ANEW)
    return Check("kernel", "pass", f"answers after {found.seconds:.1f} s, in this Python, and shows records")


def _same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def lab_import() -> str:
    """Why JupyterLab's own program cannot be loaded, its last line; "" if it can. In a process of its own."""
    done = supervise.run([sys.executable, "-c", LOADS], IMPORT_LIMIT_S)
    if done.returncode is None:
        raise TimeoutError(f"not loaded within {IMPORT_LIMIT_S:g} s")
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it ends without a word"])[-1]


def jupyterlab(problem: str) -> Check:
    """JupyterLab itself starts, not only its kernels."""
    if problem:
        return Check("JupyterLab", "fail", f"cannot be loaded: {problem}", ANEW)
    return Check("JupyterLab", "pass", "can be loaded")


def port_problem(port: int = PORT) -> str:
    """Why nobody can listen on this port of 127.0.0.1: "taken", or the system's reason; "" if it is free."""
    try:
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Jupyter's server does
            s.bind(("127.0.0.1", port))
            s.listen()
    except OSError as e:
        return "taken" if e.errno == errno.EADDRINUSE else e.strerror or str(e)
    return ""


def port(problem: str, number: int = PORT) -> Check:
    """JupyterLab's usual port; another will do, but then the link is another, too."""
    if not problem:
        return Check("port", "pass", f"{number} is free")
    if problem == "taken":
        return Check(
            "port",
            "warn",
            f"{number} is taken: JupyterLab takes the next one, and prints that link",
            f"open the printed link, or choose one: {OTHER_PORT}",
        )
    return Check("port", "warn", f"{number} cannot be used: {problem}", f"choose another: {OTHER_PORT}")


def folder_problem(folder: Path, need_bytes: int = 0) -> str:
    """Why nothing can be written into `folder`, or into the one in which it would be made; "" if it can."""
    there = next(p for p in (folder, *folder.parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=there, prefix="labs-") as f:
            f.write(b"x")
            f.flush()
        free = shutil.disk_usage(there).free
    except OSError as e:
        return e.strerror or str(e)
    return f"{free / 2**20:.0f} MiB free, {need_bytes / 2**20:.0f} MiB are needed" if free < need_bytes else ""


def runtime_folder() -> Path:
    """Where Jupyter keeps how its kernels are reached."""
    from jupyter_core.paths import jupyter_runtime_dir

    return Path(jupyter_runtime_dir())
