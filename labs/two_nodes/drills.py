"""The process that plays both machines. It forks two torchruns, each in its own process group.

    python -m labs.two_nodes.drills FOLDER CONFIG        # labs.two_nodes starts it; it prints a row of JSON per result

It loads torch once, so a torchrun and its rank start immediately. A machine is a torchrun and its rank, which get
SIGKILL or SIGSTOP together.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import elastic_launch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from labs.common.data import fashion_mnist
from labs.kit import _compat, supervise
from labs.two_nodes import settings

INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
NOTICED = "noticed.json"
Row = dict[str, Any]
STILL_USED: list[nn.Module] = []
"""Kept until the rank's process ends: in a forked rank, destroying DDP and its group sometimes hangs."""


# What a rank does


def meet(folder: str) -> None:
    """Join the process group, add up rank + 1 over all ranks, and write the sum to a file."""
    supervise.end_with_parent()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=6))
    total = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(total)  # a collective proves more than a printed rank
    write(Path(folder) / f"met-{os.getpid()}.json", {"sum": total.item(), "ranks": dist.get_world_size()})
    dist.destroy_process_group()


def train(folder: str, steps: int, save_every: int, timeout_s: float, fate: str, at_step: int) -> None:
    """Train with DDP, resuming from the last checkpoint. Machine 1 meets its `fate` once, after `at_step` steps."""
    supervise.end_with_parent()
    place = Path(folder)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = 0
    if (place / "last.pt").exists():
        state = torch.load(place / "last.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    ddp = DistributedDataParallel(model)
    data = fashion_mnist()
    images, labels = torch.tensor(data.x_train[:2048]) / 255, torch.tensor(data.y_train[:2048]).long()
    journal = (place / f"steps-{rank}").open("a", buffering=1)
    try:
        while step < steps:
            if fate and rank == 1 and step == at_step and not (place / "fate.json").exists():
                meet_fate(place, fate)
            rows = slice(64 * step + 32 * rank, 64 * step + 32 * rank + 32)
            loss = cross_entropy(ddp(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            journal.write(f"{step} {time.time()} {loss.item()!r}\n")
            if rank == 0 and (step % save_every == 0 or step == steps):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                save(state, place / "last.pt")
    except RuntimeError as e:  # the other rank is gone
        line = " ".join(str(e).replace("\n", " ").split())
        write(place / NOTICED, {"time": time.time(), "line": settings.first_error(f"RuntimeError: {line}")})
        os._exit(1)
    STILL_USED.append(ddp)


def meet_fate(place: Path, fate: str) -> None:
    """Stop this machine, torchrun and rank, as if it had been killed or had frozen."""
    write(place / "fate.json", {"time": time.time()})
    os.killpg(0, signal.SIGKILL if fate == "killed" else signal.SIGSTOP)


def save(state: Row, path: Path) -> None:
    """Save a checkpoint atomically."""
    torch.save(state, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def write(path: Path, row: Row) -> None:
    """Write a JSON file atomically."""
    path.with_suffix(".new").write_text(json.dumps(row))
    os.replace(path.with_suffix(".new"), path)


# A machine


class Torchrun:
    """A forked torchrun with one rank, which calls `function(*args)`; with its log, exit code and run time."""

    def __init__(
        self,
        root: Path,
        flags: dict[str, str],
        function: Callable[..., None],
        *args: Any,
        environment: dict[str, str] | None = None,
        clock_off_s: float = 0.0,
    ) -> None:
        self.started, self.code, self.ended_s = time.monotonic(), None, 0.0
        self.log = root / f"torchrun-{time.monotonic_ns()}.log"
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.environ.update({"GLOO_SOCKET_IFNAME": INTERFACE, **(environment or {})})
                code = self._agent(flags, function, args, clock_off_s)
            finally:
                os._exit(code)  # without unwinding the parent's frames

    def _agent(self, flags: dict[str, str], function: Callable[..., None], args: tuple, clock_off_s: float) -> int:
        supervise.hold("torchrun")
        out = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        logging.basicConfig()
        logging.getLogger("torch.distributed.elastic.agent.server.api").setLevel(logging.INFO)  # logs when it waits
        if clock_off_s:
            shift_clock(clock_off_s)
        try:
            words = [word for pair in flags.items() for word in pair]
            config, _, _ = torchrun.config_from_args(torchrun.parse_args([*words, "script.py"]))
            config.start_method = "fork"
            elastic_launch(config, function)(*args)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            return 1
        return 0

    def running(self) -> bool:
        """Return whether it still runs; if not, `code` and `ended_s` (s after its start) say how and when it ended."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code, self.ended_s = os.waitstatus_to_exitcode(status), time.monotonic() - self.started
        return self.code is None

    def kill(self) -> None:
        """Kill torchrun and its rank, and wait until they are gone."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        wait_for(lambda: not self.running(), "the end of a torchrun")

    def text(self) -> str:
        """Return everything that torchrun and its rank have printed."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def shift_clock(seconds: float) -> None:
    """Shift the clock that this process's rendezvous reads; Linux has no namespace for the time of day."""

    class Shifted(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return datetime.datetime.now(tz) + datetime.timedelta(seconds=seconds)

    dynamic_rendezvous.datetime = Shifted


def wait_for(done: Callable[[], Any], what: str, limit_s: float = 60.0) -> None:
    """Return as soon as `done()` is true. RuntimeError names `what` after `limit_s` seconds."""
    until = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > until:
            raise RuntimeError(f"{what} took longer than {limit_s:g} s")
        time.sleep(0.02)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# Wrong settings


def try_setting(root: Path, wrong: settings.Wrong) -> Row:
    """Run a job with this wrong setting. Return each machine's message, seconds to errors, and ranks that computed."""
    (folder := root / wrong.name.replace(" ", "-")).mkdir()
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) if wrong.port_taken else nullcontext():
        jobs: list[Torchrun] = []
        for node in (0, 1):
            flags = settings.options(node, port, settings.SHORT)
            flags |= {k: v.format(port=port) for k, v in wrong.options.get(node, {}).items()}
            if node == 1 and wrong.later:
                wait_for(lambda: "Rendezvous'ing worker group" in jobs[0].text(), "a torchrun that waits")
                time.sleep(0.5)
            off = wrong.clock_off_s if node == 1 else 0.0
            environment = wrong.environment.get(node)
            jobs.append(Torchrun(root, flags, meet, str(folder), environment=environment, clock_off_s=off))
        until, failed = time.monotonic() + 20.0, False
        while any([job.running() for job in jobs]) and time.monotonic() < until:
            if not failed and any(job.code for job in jobs):
                until, failed = time.monotonic() + 1.0, True  # one more second for the other machine's message
            time.sleep(0.02)
    waiting = [job.running() for job in jobs]
    for job in jobs:
        job.kill()
    met = [json.loads(path.read_text()) for path in folder.glob("met-*.json")]
    return {
        "setting": wrong.name,
        "machines": [
            "still waits" if waits else settings.first_error(job.text()) if job.code else "no error"
            for job, waits in zip(jobs, waiting, strict=True)
        ],
        "error_s": [job.ended_s for job, waits in zip(jobs, waiting, strict=True) if job.code and not waits],
        "computed": len(met),
        "of": max((m["ranks"] for m in met), default=0),
    }


# A machine dies


PATIENT = {"keep_alive_interval": 1, "keep_alive_max_attempt": 2, "read_timeout": 20, "join_timeout": 60}
"""Here a machine counts as gone after 2 s of silence; with torch's defaults (5 s, 3 times), after 15 s."""


def train_through(root: Path, fate: str, config: Row) -> Row:
    """Run training whose second machine meets `fate` ("" for none) and restarts with the same command."""
    (folder := root / f"run-of-{fate or 'none'}").mkdir()
    port = free_port()
    args = [config["steps"], config["save_every"], config["group_timeout_s"], fate, config["at_step"]]

    def start(node: int) -> Torchrun:
        flags = settings.options(node, port, PATIENT) | {"--max-restarts": "3"}
        # a restarted rank must not read what its predecessor left in the store
        return Torchrun(root, flags, train, str(folder), *args, environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})

    jobs = [start(0), start(1)]
    row: Row = {"fate": fate}
    if fate:
        wait_for((folder / NOTICED).exists, "an error on rank 0", 60 + config["group_timeout_s"])
        jobs[1].kill()  # as a scheduler does: end what is left, run the same command again
        restarted = time.time()
        jobs[1] = start(1)
    wait_for(lambda: not any([job.running() for job in jobs]), "a training run", 90)
    if any(job.code for job in jobs):
        raise RuntimeError(next(settings.first_error(job.text()) or job.text()[-300:] for job in jobs if job.code))
    lines = [line.split() for line in (folder / "steps-0").read_text().splitlines()]
    if fate:
        begun, noticed = (json.loads((folder / name).read_text()) for name in ("fate.json", NOTICED))
        first = next(float(at) for _, at, _ in lines if float(at) > noticed["time"])
        row |= {"noticed_s": noticed["time"] - begun["time"], "error": noticed["line"], "back_s": first - restarted}
        row |= {"redone": len(lines) - config["steps"]}
    last = {int(step): loss for step, _, loss in lines}  # the second loss of a step that was done twice
    return row | {"losses": [float(last[step]) for step in sorted(last)], "weights": digest(folder / "last.pt")}


def digest(path: Path) -> str:
    """Return a checksum of all weights in a checkpoint."""
    state = torch.load(path, weights_only=True)["model"]
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in state.values())).hexdigest()


def main() -> None:
    """Run what the configuration asks for, and print a row of JSON for each result."""
    root, config = Path(sys.argv[1]), json.loads(sys.argv[2])
    supervise.hold("drills")
    torch.set_num_threads(1)
    _compat.preload_dynamo()  # otherwise each rank loads it, at its first step or error
    fashion_mnist()
    for wrong in settings.WRONG[: config["settings"]]:
        print(json.dumps(try_setting(root, wrong)), flush=True)
    for fate in ("", *config["fates"]) if config["fates"] else ():
        print(json.dumps(train_through(root, fate, config)), flush=True)


if __name__ == "__main__":
    main()
