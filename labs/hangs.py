"""Training hangs or loses a rank: which ranks raise an error, and does labs.watch name the rank, the call and the line?

    python -m labs.hangs --nproc 1
    python -m labs.hangs --nproc 1 --programs early_stop dead_peer --ranks 2 --seed 7

About 15 s on 2 CPU cores. Each program below runs on its own ranks, with gloo on CPU cores, under the watchdog of
labs.watch. In the last step, one rank, drawn at random, does something different from the others. The watchdog
reports; the run continues until its collectives time out.

Records, with the case `program` and `wrong`, the rank that was drawn:
  right      1 if the report names what was planted [what: rank, call, line]
  report_s   seconds from the last collective of any rank until the report [said: its text]
  error_s    seconds from then until a rank raised an error [on: the rank; at_fault: whether it was drawn; message]
"""

from __future__ import annotations

import contextlib
import inspect
import json
import multiprocessing.util
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from annotated_types import Ge, Le
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labs.kit import _compat, cli, supervise, timeouts
from labs.kit.errors import did_you_mean, require
from labs.kit.rank import Rank, unpinned
from labs.kit.record import Record, Records
from labs.watch import evidence
from labs.watch.diagnosis import Diagnosis, diagnose
from labs.watch.watchdog import Watchdog

STEPS = 4
LAST = STEPS - 1
Program = Callable[[int, int], None]
WHAT = ("rank", "call", "line")
SMOKE = {"programs": ("out_of_data", "early_stop")}
AT_ONCE = 8  # programs; their ranks mostly wait


# The programs: `rank` is this rank, `wrong` the one at fault. `<-` marks the line that a report has to name.


def skipped_collective(rank: int, wrong: int) -> None:
    loss, gradient = torch.ones(1), torch.ones(1)
    for step in range(STEPS):
        if rank != wrong or step < LAST:
            dist.all_reduce(loss)  # <- the other ranks' call; rank `wrong` never makes it
        dist.all_reduce(gradient)


def other_order(rank: int, wrong: int) -> None:
    a, b = torch.ones(4), torch.ones(4)
    for step in range(STEPS):
        if rank != wrong or step < LAST:
            dist.all_reduce(a)
            dist.broadcast(b, src=0)
        else:
            dist.broadcast(b, src=0)  # <- the others are in all_reduce
            dist.all_reduce(a)


def wrong_shape(rank: int, wrong: int) -> None:
    for step in range(STEPS):
        scores = torch.ones(3 if rank == wrong and step == LAST else 4)  # its last batch is smaller
        dist.all_reduce(scores)  # <- gloo ends a process: no exception


def out_of_data(rank: int, wrong: int) -> None:
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    for _ in range(STEPS - (rank == wrong)):
        ddp(torch.ones(2, 4)).sum().backward()  # <- one rank has one batch fewer, and has ended


def dead_peer(rank: int, wrong: int) -> None:
    for step in range(STEPS):
        if rank == wrong and step == LAST:
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
        dist.all_reduce(torch.ones(1))  # <- the others wait here


def deadlocked_p2p(rank: int, wrong: int) -> None:
    other = (wrong + 1) % dist.get_world_size()
    pair = {wrong: other, other: wrong}
    if rank in pair:
        theirs = torch.empty(4)
        dist.recv(theirs, pair[rank])  # <- both receive first
        dist.send(torch.ones(4), pair[rank])
    dist.barrier()


def early_stop(rank: int, wrong: int) -> None:
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    for step in range(STEPS):
        if rank == wrong and step == LAST:  # this rank's validation loss got worse
            break
        ddp(torch.ones(2, 4)).sum().backward()
    dist.barrier()  # <- this rank is here while the others are in backward


def validation_on_one_rank(rank: int, wrong: int) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for step in range(STEPS):
        ddp(torch.ones(2, 4)).sum().backward()
        if rank == wrong and step == LAST - 1:
            ddp(torch.ones(2, 4))  # <- DDP's forward broadcasts buffers: a collective
    dist.barrier()


@dataclass(frozen=True)
class Hang:
    """A program, and what a correct report names."""

    program: Program
    calls: tuple[str, ...] = ("all_reduce",)
    """Names of the call in the flight recorder."""
    both: bool = False
    """Whether rank `wrong` and the one after it are equally at fault."""

    @property
    def lines(self) -> list[int]:
        """Numbers of the marked lines in this file."""
        text, first = inspect.getsourcelines(self.program)
        return [first + i for i, line in enumerate(text) if "# <-" in line]

    def ranks(self, wrong: int, ranks: int) -> tuple[int, ...]:
        """Return the ranks at fault."""
        return tuple(sorted({wrong, (wrong + 1) % ranks})) if self.both else (wrong,)


HANGS = {
    "skipped_collective": Hang(skipped_collective),
    "other_order": Hang(other_order, ("all_reduce", "broadcast")),
    "wrong_shape": Hang(wrong_shape),
    "out_of_data": Hang(out_of_data),
    "dead_peer": Hang(dead_peer),
    "deadlocked_p2p": Hang(deadlocked_p2p, ("recv",), both=True),
    "early_stop": Hang(early_stop, ("barrier",)),
    "validation_on_one_rank": Hang(validation_on_one_rank, ("broadcast",)),
}


@dataclass(frozen=True)
class Config:
    """Which programs, on how many ranks."""

    programs: tuple[str, ...] = tuple(HANGS)
    """Programs to run, each with another way to hang or die."""
    ranks: Annotated[int, Ge(2), Le(4)] = 3
    """Ranks of a program; they mostly wait, so they can share cores."""
    seed: Annotated[int, Ge(0)] = 1
    """Draws each program's rank at fault."""
    patience_s: Annotated[float, Ge(1), Le(30)] = 1.5
    """Seconds without progress until the watchdog reports. In real runs: minutes."""
    wait_s: Annotated[float, Ge(2), Le(60)] = 5.0
    """Timeout of each collective. gloo's default is 1,800 s."""
    smoke: bool = False
    """Run only two programs."""

    def __post_init__(self) -> None:
        require(len(self.programs) > 0, f"programs must name some of {', '.join(HANGS)}")
        for name in self.programs:
            hint = did_you_mean(name, HANGS)
            require(name in HANGS, f"programs: there is no {name!r}: {hint}there are {', '.join(HANGS)}")
        require(self.patience_s < self.wait_s, "patience_s must be less than wait_s, or nothing is left to watch")

    def wrong(self, name: str) -> int:
        """Return the rank at fault in a program."""
        return random.Random(f"{self.seed} {name}").randrange(self.ranks)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Run the programs from rank 0, in another process, and yield records of their reports; other ranks wait."""
    if rank.rank == 0:
        cases = [(name, config.wrong(name)) for name in config.programs]
        with unpinned(rank), tempfile.TemporaryDirectory(dir=multiprocessing.util.get_temp_dir()) as folder:
            drill(config, cases, Path(folder))
            for name, wrong in cases:
                yield from judged(config, rank, name, wrong, Path(folder) / name)
        rank.progress(1, 1, f"{len(cases)} programs")
    rank.barrier()


def judged(config: Config, rank: Rank, name: str, wrong: int, folder: Path) -> Iterator[Record]:
    """Yield records that compare one program's report and errors with what was planted."""
    hang, case = HANGS[name], {"program": name, "wrong": wrong}
    report = json.loads((folder / "report.json").read_text())
    calls = [c.created_s for e in evidence.read(folder) for c in e.calls or ()]
    moved = max([*calls, (folder / "began").stat().st_mtime])  # when the last rank last made progress
    right = {
        "rank": report["sure"] and tuple(report["ranks"]) == hang.ranks(wrong, config.ranks),
        "call": report["collective"] in hang.calls,
        "line": report["line"] in hang.lines,
    }
    for what in WHAT:
        yield rank.record("right", "1", float(right[what]), rank=0, what=what, **case)
    yield rank.record("report_s", "s", max(0.0, report["at"] - moved), rank=0, said=report["said"], **case)
    for path in sorted(folder.glob("raised*.json")):
        found = json.loads(path.read_text())
        on = {"on": found["rank"], "at_fault": found["rank"] in hang.ranks(wrong, config.ranks)}
        yield rank.record("error_s", "s", max(0.0, found["at"] - moved), rank=0, message=found["error"], **on, **case)


def drill(config: Config, cases: Sequence[tuple[str, int]], folder: Path) -> None:
    """Run the programs in a separate interpreter, which forks their ranks: this one has a process group and threads."""
    task = {"cases": cases, "folder": str(folder)} | {n: getattr(config, n) for n in ("ranks", "patience_s", "wait_s")}
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", "from labs.hangs import serve; serve()", json.dumps(task)]
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    env |= {"RES_OPTIONS": "timeout:1 attempts:1"}  # connecting to a store looks up its name: 5 s if no DNS answers
    done = supervise.run(command, 3 * timeouts.CHILD_S, env=env)
    missing = [name for name, _ in cases if not (folder / name / "report.json").exists()]
    if done.returncode != 0 or missing:
        raise RuntimeError(f"no report about {', '.join(missing) or 'any program'}: {done.stderr[-1500:]}")


# In the interpreter that forks the ranks


def serve() -> None:
    """Run the programs that the command line names, AT_ONCE at a time; they write their files to the folder.

    On a busy machine, ranks may not even meet within their timeout. Such a program runs once more, alone.
    """
    _compat.preload_dynamo()
    task = json.loads(sys.argv[1])
    for at_once in (AT_ONCE, 1):
        cases = [case for case in task["cases"] if not (Path(task["folder"]) / case[0] / "began").exists()]
        for i in range(0, len(cases), at_once):
            run_programs(cases[i : i + at_once], task)


def run_programs(cases: Sequence[tuple[str, int]], task: dict[str, Any]) -> None:
    """Fork all ranks of these programs, and wait until they have ended."""
    with contextlib.ExitStack() as stack:
        ranks = []
        for name, wrong in cases:
            folder = Path(task["folder"]) / name
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            stack.enter_context(supervise.forked(hold_store, folder, task["ranks"]))
            for r in range(task["ranks"]):
                args = (name, r, task["ranks"], wrong, folder, task["patience_s"], task["wait_s"])
                ranks.append(stack.enter_context(supervise.forked(be_rank, *args)))
        until = time.monotonic() + 2 * timeouts.CHILD_S
        for process in ranks:
            process.join(max(0.0, until - time.monotonic()))


def hold_store(folder: Path, ranks: int) -> None:
    """Hold the store through which ranks meet, as torchrun's agent does, until this process is killed."""
    # libuv's server looks up the name of each rank that connects, and answers no other rank meanwhile
    store = dist.TCPStore("localhost", 0, ranks, is_master=True, wait_for_workers=False, use_libuv=False)
    (folder / "port.new").write_text(str(store.port))
    (folder / "port.new").rename(folder / "port")
    time.sleep(3 * timeouts.CHILD_S)


def be_rank(name: str, rank: int, ranks: int, wrong: int, folder: Path, patience_s: float, wait_s: float) -> None:
    """Run a program as a rank that torchrun would start, under labs.watch's watchdog, and end the process."""
    while not (folder / "port").exists():
        time.sleep(0.01)
    printed = os.open(folder / f"rank{rank}.printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {key: str(value) for key, value in numbers.items()}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": (folder / "port").read_text()}
    os.environ |= {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    torch.set_num_threads(1)
    watchdog = Watchdog(folder, patience_s, note, "labs.watch")
    watchdog.start()
    (folder / f"ready{rank}").touch()
    while not all((folder / f"ready{r}").exists() for r in range(ranks)):  # start the timeout only once every rank runs
        time.sleep(0.01)
    code, error = 0, ""
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=wait_s))
        dist.barrier()
        (folder / "began").touch()
        HANGS[name].program(rank, wrong)
    except Exception as e:
        code, error = 1, f"{type(e).__name__}: {e}"
        raised = {"rank": rank, "at": time.time(), "error": error}
        (folder / f"raised{rank}.json").write_text(json.dumps(raised))
    watchdog.end(code, error)
    watchdog.report(f"has failed ({error})" if error else "has ended")
    watchdog.stop()
    os._exit(code)  # because threads of a hung collective would block a normal exit


def note(folder: Path) -> Iterator[str]:
    """Yield the watchdog's report, and save the first one for `judged`."""
    found: Diagnosis = diagnose(evidence.read(folder))
    own = found.line is not None and found.line.file == __file__
    values: dict[str, Any] = {
        "at": time.time(),
        "sure": found.sure,
        "ranks": found.ranks,
        "collective": found.collective,
        "line": found.line.line if own else None,
        "said": str(found),
    }
    if (folder / "began").exists():
        with contextlib.suppress(FileExistsError), (folder / "report.json").open("x") as file:
            json.dump(values, file)
    yield str(found)


# What came out


def category(records: Records) -> str:
    """Say whether most errors come from ranks that are not at fault."""
    errors = records.where("error_s")
    return "most not at fault" if 2 * sum(r.case["at_fault"] for r in errors) < len(errors) else "most at fault"


def named(records: Records) -> list[str]:
    """Return the programs whose report names the right rank, call and line."""
    programs = dict.fromkeys(r.case["program"] for r in records.where("right"))
    return [p for p in programs if all(r.value for r in records.where("right", program=p))]


def answer(records: Records) -> Iterator[str]:
    """Yield which ranks raised errors, what labs.watch named, and how soon."""
    errors, programs = records.where("error_s"), {r.case["program"] for r in records.where("right")}
    innocent = sum(not r.case["at_fault"] for r in errors)
    yield f"{len(errors)} ranks raised an error, {innocent} of them because of what another rank did."
    yield f"labs.watch named rank, call and line in {len(named(records))} of {len(programs)} programs."
    if missed := sorted(programs - set(named(records))):
        yield f"Not in {', '.join(missed)}."
    seconds = [r.value for r in records.where("report_s")]
    yield f"It reported {statistics.median(seconds):.1f} s after the last progress, at most {max(seconds):.1f} s."


if __name__ == "__main__":
    cli.main()
