"""py-spy, where it is installed: what a process is doing in this moment, asked from outside, without its help.

An optional tool: nothing of the course needs it. It reads the memory of another process, which Linux grants to root and
to whom the setting kernel.yama.ptrace_scope lets; in a container it takes the capability SYS_PTRACE.
Source: py-spy's README, github.com/benfred/py-spy.
"""

from __future__ import annotations

import shutil
import subprocess

LOOK_S = 20.0  # a look at a process takes a fraction of a second


def problem() -> str:
    """Why there is no py-spy here, in a line; "" if there is one."""
    return "" if shutil.which("py-spy") else "py-spy is not installed here: pip install py-spy"


def stack(pid: int) -> tuple[str, str]:
    """(the Python stacks of process `pid` as py-spy prints them, "") or ("", why there are none, in a line).

    The process is not paused: a stack that changes meanwhile may come out mixed, and nothing is disturbed.
    """
    if found := problem():
        return "", found
    try:
        done = subprocess.run(
            ["py-spy", "dump", "--nonblocking", "--pid", str(pid)], capture_output=True, text=True, timeout=LOOK_S
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return "", f"py-spy gave no answer: {e}"
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        return "", f"py-spy may not look at process {pid}: {said[0]}"
    return done.stdout, ""


def frames(dump: str, thread: str = "MainThread") -> list[str]:
    """Frames of one thread in a dump, the innermost first, such as "backward (torch/_tensor.py:630)"."""
    found: list[str] = []
    of_thread = False
    for line in dump.splitlines():
        if line.startswith("Thread "):
            of_thread = f'"{thread}"' in line
        elif of_thread and line.startswith("    "):
            found.append(line.strip())
    return found
