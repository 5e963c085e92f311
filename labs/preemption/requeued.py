"""A training run in its own processes that a scheduler ends and restarts, and the phases of each start."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from labs.kit import _compat, supervise
from labs.kit.rank import Rank, unpinned

RECIPE = Path(__file__).parents[1] / "recipes" / "train_ddp_resume.py"
RANKS = 2
STEP = re.compile(r"step (\d+)/\d+  loss (\S+) ")
LONGEST_S = 120.0  # maximum time of a start without output
OF_THIS_RANK = ("TORCHELASTIC_", "RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_")


@dataclass
class Start:
    """One start of the whole job, from its launch to the end of its last process. Wall-clock times, in s."""

    launched: float
    steps: dict[int, float] = field(default_factory=dict)
    """{step: time when it was printed}."""
    losses: dict[int, str] = field(default_factory=dict)
    """{step: its loss, with all printed digits}."""
    signalled: float | None = None
    ended: float = 0.0
    codes: tuple[int, ...] = ()
    """Exit codes by rank; minus the signal number if a signal ended it."""
    events: list[dict[str, Any]] = field(default_factory=list)

    def last(self, event: str) -> float:
        """Return when the last rank first reached this event."""
        first: dict[int, float] = {}
        for row in self.events:
            if row["event"] == event:
                first.setdefault(row["rank"], row["time"])
        return max(first.values())

    def seconds(self, begin: str, end: str) -> list[float]:
        """Return how long rank 0 took from `begin` to `end`, each time."""
        found, since = [], None
        for row in (r for r in self.events if r["rank"] == 0):
            if row["event"] == begin:
                since = row["time"]
            elif row["event"] == end and since is not None:
                found.append(row["time"] - since)
                since = None
        return found


def train(
    root: Path,
    name: str,
    options: dict[str, Any],
    rank: Rank,
    stop_after: int | None = None,
    sent: signal.Signals | None = None,
    handler: bool = True,
    grace_s: float = 30.0,
) -> Start:
    """Start the recipe on two ranks, optionally send them `sent` after a step, and wait for the end.

    RuntimeError, with rank 0's last output, if the run ends in any other way.
    """
    from torch.distributed import TCPStore

    # The ranks meet in this process's store, as in torchrun's, so its port can't be taken in the meantime.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LONGEST_S))
    start = Start(time.time())
    with ExitStack() as stack:
        with unpinned(rank):
            ranks = [stack.enter_context(_rank(root, name, r, store.port, options, handler)) for r in range(RANKS)]
        for line in ranks[0].stdout or ():
            if found := STEP.match(line):
                step = int(found[1])
                start.steps[step], start.losses[step] = time.time(), found[2]
                if step == stop_after and sent is not None:
                    start.signalled = time.time()
                    for process in ranks:
                        process.send_signal(sent)
        for process in ranks:  # as a scheduler does, kill what hasn't ended within the grace period
            try:
                process.wait(timeout=LONGEST_S if start.signalled is None else grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
        start.codes = tuple(process.wait() for process in ranks)
        start.ended = time.time()
    start.events = [
        json.loads(line) for f in sorted(root.glob(f"{name}-*.jsonl")) for line in f.read_text().splitlines()
    ]
    if (start.signalled is None) != (stop_after is None) or (sent is None and any(start.codes)):
        said = (root / f"{name}-0.log").read_text().splitlines() or ["nothing"]
        raise RuntimeError(f"the training ended with exit codes {start.codes}, and said last: {said[-1]}")
    return start


def save_s(folder: Path, size: int) -> float:
    """Return how many seconds the recipe's save() takes for a tensor of `size` bytes; removes the file."""
    import torch

    save = runpy.run_path(str(RECIPE), run_name="recipe")["save"]
    state, path = {"weights": torch.rand(size // 4)}, folder / "large.pt"
    begin = time.perf_counter()
    try:
        save(path, state)
        return time.perf_counter() - begin
    finally:
        for left in folder.glob(f"{path.name}*"):
            left.unlink()


def environment(rank: int, port: int, announced: Path) -> dict[str, str]:
    """Return the environment of one of RANKS as torchrun sets it, with the store on this machine at `port`."""
    announced.mkdir(exist_ok=True)
    outside = {key: value for key, value in os.environ.items() if not key.startswith(OF_THIS_RANK)}
    return outside | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
        supervise.ANNOUNCE: str(announced),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo"),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    }


@contextmanager
def _rank(
    root: Path, name: str, rank: int, port: int, options: dict[str, Any], handler: bool
) -> Iterator[subprocess.Popen]:
    flags = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    command = [
        sys.executable,
        "-P",
        __file__,  # with -m, Python would import the whole experiment
        str(root / f"{name}-{rank}.jsonl"),
        str(int(handler)),
        str(RECIPE),
        *flags,
        "--cpu",
    ]
    with (root / f"{name}-{rank}.log").open("w") as log:
        process = supervise.started(
            command,
            root=root / "run-0",
            env=environment(rank, port, root / "run-0"),
            text=True,
            cwd=root,
            stderr=log,
            stdout=subprocess.PIPE if rank == 0 else log,
        )
        with process as started:
            yield started


# Below: code that runs in a rank's process


def main() -> None:
    """Run a recipe and record when it reaches each event. Arguments: EVENTS HANDLER SCRIPT OPTIONS."""
    events, handler, script, *options = sys.argv[1:]
    supervise.hold(f"requeued-{os.environ['RANK']}")
    with open(events, "a", buffering=1) as file:
        _note_events(file)
        if handler == "0":
            _without_handler()
        sys.argv[:] = [script, *options]
        runpy.run_path(script, run_name="__main__")


def _note_events(file: IO[str]) -> None:
    def note(event: str) -> None:
        file.write(json.dumps({"event": event, "time": time.time(), "rank": int(os.environ["RANK"])}) + "\n")

    import torch

    _compat.preload_dynamo()
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel  # noqa: F401

    note("imported")

    def noted(function: Any, before: str, after: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            note(before)
            result = function(*args, **kwargs)
            note(after)
            return result

        return call

    dist.init_process_group = noted(dist.init_process_group, "ready", "group")
    torch.save = noted(torch.save, "saving", "written")
    os.replace = noted(os.replace, "replacing", "saved")


def _without_handler() -> None:
    """Ignore the recipe's handler for SIGTERM."""
    real = signal.signal

    def all_but_sigterm(number: int, handler: Any) -> Any:
        return None if number == signal.SIGTERM else real(number, handler)

    signal.signal = all_but_sigterm


def phases(before: Start, after: Start) -> Iterator[tuple[str, float]]:
    """Yield (name, seconds) of each part between the signal and the first new step."""
    last = max(before.steps)
    first = min(after.steps)
    marks = [
        ("end", before.ended),
        ("start and import", after.last("imported")),
        ("data and checkpoint", after.last("ready")),
        ("rendezvous", after.last("group")),
        ("model and first step", after.steps[first]),
        ("steps again", after.steps[last + 1]),
    ]
    since = before.signalled or before.ended
    for name, until in marks:
        yield name, max(0.0, until - since)
        since = max(since, until)


if __name__ == "__main__":
    main()
