"""Ranks for the programs that hang: forked from a process that has torch, watched, and gone within seconds.

Every program has processes of its own, so that they may be killed. On each a thread watches: if the rank makes no
progress for `patience_s`, all ranks write what they know and end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from labs.hang_clinic.hangs import HANGS
from labs.kit import _compat, supervise, timeouts
from labs.watch import evidence

_compat.preload_dynamo()

Way = Literal["evidence", "detail", "monitored"]
HUNG = 86  # exit code of a rank that was ended because it hung
MONITORED = ("all_reduce", "broadcast", "barrier")  # calls that monitored_barrier is put before
LISTEN_S = 2.0  # time limit of a collective, where torch's own checks are tried


@dataclass(frozen=True)
class Drilled:
    """What became of the ranks of one drill."""

    exit_codes: tuple[int | None, ...]
    printed: str
    """All that the ranks wrote to stderr."""
    pids: tuple[int, ...]
    ended: float
    """time.time() when the last one was gone."""

    @property
    def well(self) -> bool:
        """Whether all ended by themselves, without an error."""
        return set(self.exit_codes) == {0}


ROOT = Path(__file__).parents[2]


@contextmanager
def server() -> Iterator[Callable[..., Drilled]]:
    """A function that runs a drill as `_drill` does, in a process that has torch loaded and forks the ranks.

    Not this process: it may have a group and threads. Nor multiprocessing's fork server: in a rank that `python -m`
    started, that would be a fork of the rank, group and all.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # Not -m: the package imports this module, and Python would warn that it is there twice.
    command = [sys.executable, "-c", f"from {__name__} import _serve; _serve()", str(os.getpid())]

    def drill(
        name: str, ranks: int, wrong: int, cured: bool, folder: Path, patience_s: float, way: Way = "evidence"
    ) -> Drilled:
        folder.mkdir(parents=True, exist_ok=True)
        print(json.dumps([name, ranks, wrong, cured, str(folder), patience_s, way]), file=process.stdin, flush=True)
        answer = process.stdout.readline()
        if not answer or not (folder / "began").exists():
            printed = "".join(p.read_text(errors="replace") for p in folder.glob("*.printed.txt"))
            raise RuntimeError(f"the ranks of {name} did not start: {printed[-2000:]}")
        exit_codes, printed, pids, ended = json.loads(answer)
        return Drilled(tuple(exit_codes), printed, tuple(pids), ended)

    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with supervise.started(command, env=os.environ | {"PYTHONPATH": path}, **pipes) as process:
        yield drill


def _serve() -> None:
    """The server: a drill for each line of standard input, an answer on standard output."""
    supervise.end_with_parent(int(sys.argv[1]))
    for line in sys.stdin:
        name, ranks, wrong, cured, folder, patience_s, way = json.loads(line)
        ended = _drill(name, ranks, wrong, cured, Path(folder), patience_s, way)
        print(json.dumps([ended.exit_codes, ended.printed, ended.pids, ended.ended]), flush=True)


def _drill(name: str, ranks: int, wrong: int, cured: bool, folder: Path, patience_s: float, way: Way) -> Drilled:
    """Run the program `name` on new ranks that leave their evidence in `folder`, and wait until all are gone."""
    arguments = [(name, rank, ranks, wrong, cured, folder, patience_s, way) for rank in range(ranks)]
    until = time.monotonic() + timeouts.CHILD_S
    with contextlib.ExitStack() as stack:  # ends the workers of a rank that died as well
        processes = [stack.enter_context(supervise.forked(be_rank, *a)) for a in arguments]
        for p in processes:
            p.join(max(0.0, until - time.monotonic()))
        ended = time.time()
    files = [folder / f"rank{rank}.printed.txt" for rank in range(ranks)]
    printed = "\n".join(f.read_text(errors="replace") for f in files if f.exists())
    return Drilled(tuple(p.exitcode for p in processes), printed, tuple(p.pid for p in processes), ended)


def left_over(pids: tuple[int, ...], wait_s: float = 3.0) -> list[str]:
    """Processes of these sessions that are still there after up to `wait_s`, and their shared memory."""
    until = time.monotonic() + wait_s
    while (found := _alive(pids)) and time.monotonic() < until:
        time.sleep(0.05)
    shared = Path("/dev/shm")
    files = [p.name for p in shared.iterdir()] if shared.is_dir() else []
    return found + [f for f in files if any(re.search(rf"_{pid}_", f) for pid in pids)]


def _alive(pids: tuple[int, ...]) -> list[str]:
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        with contextlib.suppress(ProcessLookupError):
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.info["pid"]) in pids:
                found.append(f"process {process.info['pid']}")
    return found


# Inside of a rank -----------------------------------------------------------------------------------------------------


def be_rank(
    name: str, rank: int, ranks: int, wrong: int, cured: bool, place: Path, patience_s: float, way: Way
) -> None:
    """A rank from its start to its end, which is always `os._exit`: threads of a hung collective would hold it."""
    printed = os.open(place / f"rank{rank}.printed.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.environ[evidence.BUFFER] = "2000"  # before the group is made
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    evidence.arm(place, rank)
    if way == "detail":
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    limit_s = timeouts.CHILD_S if way == "evidence" else LISTEN_S
    store = dist.FileStore(str(place / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=limit_s))
    if way == "monitored":
        monitor_all()
    (place / "began").touch()
    witness = Witness(place, rank, ranks)
    patience_s = patience_s if way == "evidence" else 4 * LISTEN_S  # torch's own checks are to speak first
    threading.Thread(target=watch, args=(witness, patience_s), daemon=True).start()
    try:
        HANGS[name].program(rank, wrong, cured)
        witness.leave(0)
    except BaseException as e:
        witness.leave(1, f"{type(e).__name__}: {e}", traceback.format_exc())


class Witness:
    """Writes a rank's evidence once, and ends it."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self.folder, self.rank, self.ranks = folder, rank, ranks
        self.lock = threading.Lock()  # the one who takes it writes and ends the process, and never gives it back

    def leave(self, exit_code: int | None, error: str = "", trace: str = "") -> None:
        """Write all three files and exit; a rank that hangs (None) waits until the others have written theirs."""
        self.lock.acquire()
        evidence.write_recorder(self.folder, self.rank)
        evidence.write_stacks(self.folder, self.rank)
        evidence.write_end(self.folder, self.rank, exit_code, error=error, traceback=trace)
        if error:
            print(error, file=sys.stderr, flush=True)
        if exit_code in (None, 0):  # my end closes connections: let the others write what they were doing before that
            self.wait_for_others(2.0 if exit_code is None else 0.0)
        os._exit(HUNG if exit_code is None else exit_code)

    def wait_for_others(self, seconds: float) -> None:
        """Until all ranks have written how they end, or `seconds` have gone."""
        until = time.monotonic() + seconds
        ends = [self.folder / f"rank{r}.end.json" for r in range(self.ranks)]
        while not all(end.exists() for end in ends) and time.monotonic() < until:
            time.sleep(0.01)


def watch(witness: Witness, patience_s: float) -> None:
    """If this rank makes no progress for `patience_s`, ask all for their evidence; give mine when anybody asks."""
    asked = witness.folder / "asked"
    seen, since = None, time.monotonic()
    while not asked.exists():
        time.sleep(0.05)
        if (now := progress()) != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > patience_s:
            asked.touch()
    witness.leave(None)


def progress() -> tuple:
    """What changes while a rank works: the lines that its main thread is in, and the number of its collectives."""
    frame, lines = sys._current_frames().get(threading.main_thread().ident or 0), []
    while frame is not None:
        lines.append((frame.f_code.co_name, frame.f_lasti))
        frame = frame.f_back
    return tuple(lines), len(evidence.recorded()["entries"])


def monitor_all() -> None:
    """Put `dist.monitored_barrier` before each of MONITORED that Python calls and before each forward of DDP.

    Not before send and recv: all ranks must come to a barrier, and those calls are of two ranks.
    """

    def checked(function: Callable) -> Callable:
        def with_check(*args: Any, **options: Any) -> Any:
            dist.monitored_barrier(timeout=timedelta(seconds=LISTEN_S))
            return function(*args, **options)

        return with_check

    for name in MONITORED:
        setattr(dist, name, checked(getattr(dist, name)))
    DistributedDataParallel.forward = checked(DistributedDataParallel.forward)
