"""The preflight's checks of the system: loopback, load, clock, limits, settings that change timings.

Judgements are functions of plain facts; what is read here works on Linux, macOS and WSL, or says that it cannot.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from labs.kit import supervise
from labs.kit.host import affinity
from labs.kit.preflight import Check, system

LOAD_S = 0.5
BUSY_PERCENT = 10.0  # as labs.kit.monitor: above it, a run's own trace says that its timings may be disturbed
TCP_LIMIT_S = 5.0
FIRST_LAUNCH_S = 15.0
THREADS_NEEDED = 512  # the notebooks' peak was 107 (06, two CPU cores); every GPU and DataLoader worker adds some
CLOCK_TICK_S = 1e-5
CLOCK_STEP_S = 0.5
DAY_S = 86_400.0
# What changes timings behind everybody's back. Only names are ever shown, never values.
SETTINGS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_PROC_BIND",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "LD_PRELOAD",
    "CUDA_LAUNCH_BLOCKING",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_DISTRIBUTED_DEBUG",
    "NCCL_DEBUG",
)
TALK = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=float(sys.argv[2])) as s:
    s.sendall(s.recv(5))
"""


def busy_percent(seconds: float = LOAD_S) -> float:
    """Mean share of the usable cores that anybody takes while this process sleeps; what a hypervisor takes counts."""
    import psutil

    use = psutil.cpu_percent(interval=seconds, percpu=True)
    cores = [use[c] for c in affinity() if c < len(use)] or use
    return sum(cores) / len(cores)


def quiet(percent: float) -> Check:
    """Cores are quiet enough to measure on."""
    if percent <= BUSY_PERCENT:
        return Check("quiet cores", "pass", f"others take {percent:.0f} %")
    return Check(
        "quiet cores",
        "warn",
        f"other programs take {percent:.0f} % of the usable cores: timings will suffer",
        "close other programs (top shows them), then run this again",
    )


def connection_problem() -> str:
    """Why another process cannot talk to this one over TCP on 127.0.0.1; "" if it can."""
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            server.settimeout(TCP_LIMIT_S)
            command = [sys.executable, "-I", "-S", "-c", TALK, str(server.getsockname()[1]), str(TCP_LIMIT_S)]
            with supervise.started(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
                peer, _ = server.accept()
                with peer:
                    peer.settimeout(TCP_LIMIT_S)
                    peer.sendall(b"hello")
                    return "" if peer.recv(5) == b"hello" else "the answer is another one"
    except TimeoutError:
        return f"no connection within {TCP_LIMIT_S:g} s"
    except OSError as e:
        return e.strerror or str(e)


def connection(problem: str, where: str = "") -> Check:
    """Two processes of this machine reach each other: ranks and notebooks do nothing else."""
    if not problem:
        return Check("connection", "pass", "two processes talk over 127.0.0.1")
    remedy = {
        "macOS": "allow Python in System Settings, Network, Firewall",
        "WSL": "run in PowerShell: wsl --shutdown, then open WSL again",
    }.get(where or system(), "let the firewall pass the loopback interface: sudo iptables -I INPUT -i lo -j ACCEPT")
    return Check("connection", "fail", f"two processes cannot talk over 127.0.0.1: {problem}", remedy)


@dataclass(frozen=True)
class Clock:
    """Seconds since 1970 (UTC) now and of the course's last commit; the timer's tick; how far the clock was moved."""

    now_s: float
    commit_s: float | None
    tick_s: float
    moved_s: float = 0.0


def read_clock(commit_s: float | None, start: tuple[float, float]) -> Clock:
    """`start` is time.time() and time.monotonic() when the preflight began: both must have gone on alike."""
    moved = (time.time() - start[0]) - (time.monotonic() - start[1])
    return Clock(time.time(), commit_s, time.get_clock_info("perf_counter").resolution, moved)


def clock(read: Clock, where: str = "") -> Check:
    """Records carry dates, and durations come from a fine timer."""
    remedy = {"macOS": "sudo sntp -sS time.apple.com", "WSL": "sudo hwclock -s"}.get(
        where or system(), "sudo timedatectl set-ntp true"
    )
    date = datetime.fromtimestamp(read.now_s, UTC).date()
    if read.commit_s is not None and read.now_s < read.commit_s - DAY_S:
        return Check("clock", "warn", f"it says {date}, before this version was made: records get that date", remedy)
    if abs(read.moved_s) > CLOCK_STEP_S:
        return Check("clock", "warn", f"it was moved by {read.moved_s:+.1f} s during these checks", remedy)
    if read.tick_s > CLOCK_TICK_S:
        return Check(
            "clock",
            "warn",
            f"the timer ticks every {read.tick_s * 1e6:.0f} us: short timings are coarse",
            "measure on another machine",
        )
    return Check("clock", "pass", f"{date} UTC")


def processes_left(root: str | Path = "/") -> int | None:
    """How many more threads this user may start, by ulimit and control group; None without a limit."""
    left = [n for n in (_left_by_ulimit(), _left_by_group(Path(root))) if n is not None]
    return min(left, default=None)


def _left_by_ulimit() -> int | None:
    import resource

    import psutil

    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == resource.RLIM_INFINITY or os.getuid() == 0:  # the limit does not hold for root
        return None
    own = (p.info for p in psutil.process_iter(["uids", "num_threads"]) if p.info["uids"])
    return soft - sum(i["num_threads"] or 1 for i in own if i["uids"].real == os.getuid())


def _left_by_group(root: Path) -> int | None:
    """Control groups v2 (own namespace) and v1; a group further up that is tighter goes unseen."""
    for folder in ("sys/fs/cgroup", "sys/fs/cgroup/pids"):
        try:
            limit = (root / folder / "pids.max").read_text().strip()
            return None if limit == "max" else int(limit) - int((root / folder / "pids.current").read_text())
        except (OSError, ValueError):
            continue
    return None


def processes(left: int | None) -> Check:
    """Ranks, workers and their threads can be started."""
    if left is None or left >= THREADS_NEEDED:
        return Check("processes", "pass", "no limit" if left is None else f"{left} more threads allowed")
    status = "warn" if left >= THREADS_NEEDED // 4 else "fail"
    return Check(
        "processes",
        status,
        f"only {left} more threads allowed, {THREADS_NEEDED} are safe",
        "run: ulimit -u 4096 (in a container: start it with --pids-limit 4096)",
    )


def settings(environ: Mapping[str, str]) -> Check:
    """No environment variable changes timings: names only, values are nobody's business."""
    found = [name for name in SETTINGS if environ.get(name)]
    if not found:
        return Check("settings", "pass", "no variable that changes timings")
    return Check("settings", "warn", f"set here, and changing timings: {', '.join(found)}", f"unset {' '.join(found)}")


def first_launch(warm_s: float, launch_s: float) -> Check:
    """How long a learner waits at the first launch: for torch to be read and two ranks to start."""
    detail = f"torch loaded in {warm_s:.1f} s, then ranks in {launch_s:.1f} s"
    if warm_s <= FIRST_LAUNCH_S:
        return Check("first launch", "pass", detail)
    return Check(
        "first launch",
        "warn",
        detail + ": the first launch of each notebook is that slow",
        "put .venv on a local disk, or close other programs",
    )
