"""Run the tests on a machine that is not this one: another day, place, processor, user and speed.

    python tests/elsewhere                      # what `make test` runs, on the small machine, then on the large one
    python tests/elsewhere --full               # what `make test-all` runs; takes hours
    python tests/elsewhere small -- notebooks   # what follows -- goes to pytest
    python tests/elsewhere --share -- notebooks/*.ipynb     # each file on one of them, both at once: half the time
    python tests/elsewhere large --shell        # look around there

What a strict cell prints must be the same on every machine that this course supports. Two machines are made out of
this one, so that a difference shows before a learner meets it. Each gets a copy of the files under version control,
with edits that are not committed yet, and it is removed in the end. What cannot be changed here (host and processor
name, reported CPUs and the user need Linux and root) is told and left as it is.
Exit code: 0 all green, 1 something failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LINUX = sys.platform == "linux"
ROOT_USER = LINUX and os.getuid() == 0
USER = 60_123  # belongs to nobody
SLOWER = 6
"""Time limits of tests and cells are so many times those of a quiet host."""


@dataclass(frozen=True)
class Machine:
    """What a run sees in place of this machine."""

    about: str
    days: int
    """Added to the date."""
    zone: str
    """Time zone: one that is no whole hour from UTC."""
    locale: str
    """language_COUNTRY.ENCODING: a file opened without encoding= is read in that one."""
    folder: str
    """Name of the folder that the copy lies in."""
    host: str
    cpu: str
    isa: dict[str, str]
    """Instruction sets that kernels may use: another one adds in another order and rounds differently."""
    reported: int
    """Logical CPUs that the system reports."""
    usable: int
    """CPUs that a process may use: 1 is pinned to one; more than there are share those that there are."""
    columns: int
    """Width of the terminal."""
    gpus: tuple[str, ...] = ()
    """GPUs that NVML reports. The CPU build of torch sees none of them."""
    start_method: str = ""
    """How multiprocessing starts processes by itself: "forkserver" as Python from 3.14 on, "" as it does here."""
    neighbour: bool = False
    """Another process keeps the first CPU busy."""


SSE = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "OPENBLAS_CORETYPE": "Nehalem",
}
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
}
MACHINES = {
    "small": Machine(
        about="one usable core of four, no AVX, one GPU that torch does not see, nobody's user, German in Latin-1, "
        "Nepal, in 40 days",
        days=40,
        zone="Asia/Kathmandu",
        locale="de_DE.ISO-8859-1",
        folder="GPU course",
        host="klein",
        cpu="Imaginary Atom 330",
        isa=SSE,
        reported=4,
        usable=1,
        columns=40,
        gpus=("Tesla T4",),
    ),
    "large": Machine(
        about="four usable cores of 64, AVX2, two GPUs that torch does not see, a fork server, a busy neighbour, "
        "Turkish, Newfoundland, in 400 days",
        days=400,
        zone="America/St_Johns",
        locale="tr_TR.UTF-8",
        folder="ders & kurs",
        host="grande-01",
        cpu="Imaginary Xeon 9999 @ 4.20GHz",
        isa=AVX2,
        reported=64,
        usable=4,
        columns=200,
        gpus=("NVIDIA A100-SXM4-80GB",) * 2,
        start_method="forkserver",
        neighbour=True,
    ),
}

# Run as root in a mount and host-name namespace of its own: nothing of it is seen outside, and it ends with the run.
# Python may lie in a folder that only root may enter: in its place comes one that holds nothing else.
BECOME = """
set -e
hostname "$HOST_NAME"
mount --bind "$DESK/hosts" /etc/hosts
mount --bind "$DESK/cpuinfo" /proc/cpuinfo
mount --bind "$DESK/online" /sys/devices/system/cpu/online
for closed in $CLOSED; do
    mkdir -p "$DESK/open$closed"
    mount --bind "$closed" "$DESK/open$closed"
    mount -t tmpfs -o mode=755 tmpfs "$closed"
    for needed in $NEEDED; do
        case "$needed" in "$closed"/*)
            mkdir -p "$needed"
            mount --bind "$DESK/open$needed" "$needed";;
        esac
    done
done
cd "$COPY"
exec setpriv --reuid "$AS_USER" --regid "$AS_USER" --clear-groups "$@"
"""


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python tests/elsewhere", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("machine", nargs="*", help=f"any of {', '.join(MACHINES)} (default: all, one after the other)")
    parser.add_argument("--full", action="store_true", help="notebooks at full length, and drills and long tests")
    parser.add_argument("--shell", action="store_true", help="start a shell there in place of the tests")
    parser.add_argument(
        "--share",
        action="store_true",
        help="all machines at once, each with its share of the files "
        "that follow --; each is a busy neighbour of the other",
    )
    parser.add_argument("--alone", action="store_true", help="no busy process beside the large machine")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, pytest_args = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    for name in options.machine:
        if name not in MACHINES:
            parser.error(f"there is no machine {name!r}; there are {', '.join(MACHINES)}")
    files = [a for a in pytest_args if Path(a).is_file()]
    if options.share and (not files or options.shell or options.machine):
        parser.error("--share needs files after --, as in --share -- notebooks/*.ipynb, and neither machine nor shell")
    commands = [["bash"]] if options.shell else pytest(options.full, pytest_args)
    for stop in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(stop, interrupt)
    codes = {}
    try:
        if options.share:
            codes = share(files, ["--full"] * options.full, [a for a in pytest_args if a not in files])
        else:
            for name in options.machine or MACHINES:
                print(f"== Elsewhere, the {name} machine: {MACHINES[name].about}", flush=True)
                machine = replace(MACHINES[name], neighbour=False) if options.alone else MACHINES[name]
                codes[name] = run(machine, commands, options.full, terminal=options.shell)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    print("== Elsewhere:", ", ".join(f"{name} {'failed' if code else 'passed'}" for name, code in codes.items()))
    return int(any(codes.values()))


def share(files: Sequence[str], options: list[str], pytest_args: list[str]) -> dict[str, int]:
    """Run every machine at once, in a process of its own, with its share of `files`; exit codes by machine.

    They are dealt by the cores that pytest uses there. What a machine prints comes when it is done. An interrupt ends
    them all.
    """
    turns = [name for name, machine in MACHINES.items() for _ in range(_workers(machine))]
    running: dict[str, tuple[subprocess.Popen, IO[str]]] = {}
    with contextlib.ExitStack() as stack:
        for name, machine in MACHINES.items():
            own = [file for n, file in enumerate(files) if turns[n % len(turns)] == name]
            if not own:
                continue
            said = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
            side_by_side = ["-n", str(_workers(machine)), "--dist", "loadfile"]
            command = [sys.executable, str(HERE), name, "--alone", *options, "--", *side_by_side, *pytest_args, *own]
            running[name] = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT), said
        try:
            codes = {}
            for name, (process, said) in running.items():
                codes[name] = process.wait()
                said.seek(0)
                shutil.copyfileobj(said, sys.stdout)
                sys.stdout.flush()
            return codes
        finally:
            for process, _ in running.values():
                process.send_signal(signal.SIGTERM)  # it stops its tests and removes its copy
            for process, _ in running.values():
                process.wait()


def _workers(machine: Machine) -> int:
    return min(2, machine.usable)


def pytest(full: bool = False, args: Sequence[str] = ()) -> list[list[str]]:
    """Commands for tests and notebooks, with time for slow machines: those of `make test`, or one with `args`."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--nbval",
        "--nbval-current-env",
        f"--nbval-cell-timeout={90 * SLOWER}",
        "-o",
        f"timeout={120 * SLOWER}",
    ]
    if full:
        return [[*command, *args]]
    if args:
        return [[*command, "-m", "not drill and not long", *args]]
    return [
        [*command, "-m", "not drill and not long and not quiet", "-n", "2", "--dist", "loadfile", "tests"],
        [*command, "-m", "quiet and not drill and not long"],
    ]


def run(machine: Machine, commands: list[list[str]], full: bool = False, terminal: bool = False) -> int:
    """Run `commands` on `machine`, in one copy; returns the largest exit code. Nothing is left, whatever ends it."""
    with tempfile.TemporaryDirectory(prefix="elsewhere-", ignore_cleanup_errors=True) as desk, neighbour(machine):
        Path(desk).chmod(0o755)
        for problem in prepare(machine, Path(desk)):
            print(f"   not here: {problem}", flush=True)
        given = environment(machine, Path(desk)) | ({} if full else {"COURSE_SMOKE": "1"})
        start = {"cwd": Path(desk) / machine.folder, "env": given, "start_new_session": not terminal}
        return max(_wait(subprocess.Popen([*become(machine, Path(desk)), *c], **start)) for c in commands)


def _wait(process: subprocess.Popen) -> int:
    try:
        return process.wait()
    except KeyboardInterrupt:
        end(process, signal.SIGINT, grace_s=20.0)  # pytest then stops its kernels and ranks
        raise
    finally:
        end(process, signal.SIGKILL, grace_s=5.0)


def end(process: subprocess.Popen, sent: signal.Signals, grace_s: float) -> None:
    """Send a signal to the process and all of its group, and wait for the process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # a group of which all members have gone
        os.killpg(process.pid, sent)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)


def interrupt(*_: object) -> None:
    """What stops this stops the tests, too."""
    raise KeyboardInterrupt


def prepare(machine: Machine, desk: Path) -> Iterator[str]:
    """Put the copy, a home, a folder for temporary files and the machine's files onto `desk`; yields what cannot be."""
    copy_to(desk / machine.folder)
    for name in ("home", "tmp", "locale"):
        (desk / name).mkdir()
    if LINUX and shutil.which("localedef"):
        language, encoding = machine.locale.split(".")
        made = ["localedef", "-i", language, "-f", encoding, str(desk / "locale" / machine.locale)]
        if subprocess.run(made, capture_output=True).returncode:
            yield f"the locale {machine.locale}: its sources are not installed (Debian: apt install locales)"
    else:
        yield f"the locale {machine.locale}: this system has no localedef"
    if not ROOT_USER:
        yield "another name of host and processor, the reported CPUs, another user: for them run it as root on Linux"
        return
    (desk / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {machine.host}\n")  # torchrun asks for its own address
    (desk / "online").write_text(f"0-{machine.reported - 1}\n")
    lines = Path("/proc/cpuinfo").read_text().splitlines(keepends=True)
    named = [f"model name\t: {machine.cpu}\n" if line.startswith("model name") else line for line in lines]
    (desk / "cpuinfo").write_text("".join(named))
    for path in (desk, *(desk / machine.folder).rglob("*"), *(desk / n for n in ("home", "tmp", machine.folder))):
        os.chown(path, USER, USER, follow_symlinks=False)


def copy_to(folder: Path) -> None:
    """The files under version control, edits and new ones included. Not .git: people also download archives."""
    asked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(asked, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def environment(machine: Machine, desk: Path) -> dict[str, str]:
    """What processes there inherit. `inside/sitecustomize.py` does the rest in each Python process."""
    copy = desk / machine.folder
    mask = {
        "days": machine.days,
        "here": cpus(),
        "usable": machine.usable,
        "gpus": machine.gpus,
        "start_method": machine.start_method,
    }
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "COURSE_", "PYTHON", "OMP_", "XDG_"))}
    return (
        kept
        | machine.isa
        | {
            "ELSEWHERE": json.dumps(mask),
            "PYTHONPATH": os.pathsep.join([str(copy / "tests" / "elsewhere" / "inside"), str(copy)]),
            "HOME": str(desk / "home"),
            "TMPDIR": str(desk / "tmp"),
            "USER": "nobody",
            "LOGNAME": "nobody",
            "TZ": machine.zone,
            "LOCPATH": str(desk / "locale"),
            "LANG": machine.locale,
            "LC_ALL": machine.locale,
            "COLUMNS": str(machine.columns),
            "COURSE_TESTS_SLOWER": str(SLOWER),
            **({"COURSE_OVERSUBSCRIBE": "1"} if machine.usable == 1 else {}),
        }
    )


def become(machine: Machine, desk: Path) -> list[str]:
    """The command before the command: pinned where the machine has fewer cores, another user where this is root."""
    pinned = []
    if machine.usable < len(cpus()) and shutil.which("taskset"):
        pinned = ["taskset", "--cpu-list", ",".join(map(str, cpus()[-machine.usable :]))]
    if not ROOT_USER:
        return pinned
    needed = [Path(p).resolve() for p in (sys.prefix, sys.base_prefix)]
    closed = {a for p in needed for a in p.parents if not a.stat().st_mode & 0o001}
    names = {
        "DESK": desk,
        "COPY": desk / machine.folder,
        "HOST_NAME": machine.host,
        "AS_USER": USER,
        "CLOSED": " ".join(map(str, sorted(closed))),
        "NEEDED": " ".join(map(str, needed)),
    }
    settings = [f"{k}={v}" for k, v in names.items()]
    return ["unshare", "--mount", "--uts", "env", *settings, "sh", "-c", BECOME, "elsewhere", *pinned]


def cpus() -> list[int]:
    """The logical CPUs that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


@contextlib.contextmanager
def neighbour(machine: Machine) -> Iterator[None]:
    """A process that keeps the first CPU busy meanwhile."""
    if not machine.neighbour:
        yield
        return
    pin = f"import os; hasattr(os, 'sched_setaffinity') and os.sched_setaffinity(0, [{cpus()[0]}])\n"
    busy = subprocess.Popen([sys.executable, "-c", pin + f"while os.getppid() == {os.getpid()}: sum(range(10**6))"])
    try:
        yield
    finally:
        busy.kill()
        busy.wait()


if __name__ == "__main__":
    sys.exit(main())
