"""Two machines out of one: two addresses of the loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from labs.kit import supervise, timeouts
from labs.kit.rank import Rank, unpinned
from labs.kit.supervise import watched_folder

NODES = (0, 1)
POLL_S = 0.02
OF_THIS_RANK = (
    "TORCHELASTIC_",
    "TORCH_NCCL_",
    "PET_",
    "RANK",
    "LOCAL_",
    "WORLD_SIZE",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "GLOO_",
)


class Torchrun:
    """A torchrun on one machine, started or not yet; its log, its end."""

    def __init__(self, log: Path) -> None:
        self.log, self.started = log, time.time()

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._ended().get("code")

    @property
    def ended_s(self) -> float:
        """Seconds from the request to the end. LookupError while it runs."""
        return max(self._ended()["time"] - self.started, 0.0)

    def _ended(self) -> dict[str, Any]:
        ended = self.log.with_suffix(".ended")
        return json.loads(ended.read_text()) if ended.exists() else {}

    def text(self) -> str:
        """All that torchrun and its ranks have printed."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def signal(self, number: int) -> None:
        """Send torchrun a signal; SIGKILL also ends its ranks, as when the power fails (Linux)."""
        wait_for(self.log.with_suffix(".pid").exists, "a torchrun")
        with suppress(ProcessLookupError):
            os.kill(int(self.log.with_suffix(".pid").read_text()), number)

    def kill(self) -> None:
        """As when the power fails; returns when it is gone."""
        if self.code is None:
            self.signal(signal.SIGKILL)
            wait_for(lambda: self.code is not None, "the end of a torchrun")


class Machines:
    """Two places to start a torchrun on."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root, self.stack = root, stack
        self.servers: list[subprocess.Popen] = []
        self.count = 0
        self.addresses = _loopbacks()
        self.interface = "lo0" if sys.platform == "darwin" else "lo"

    def start(
        self,
        node: int,
        flags: list[str],
        entry: str,
        args: list[str],
        environment: dict[str, str] | None = None,
        clock_off_s: float = 0.0,
    ) -> Torchrun:
        """Start torchrun with `flags` on machine `node`; its ranks call `entry`, "module:function", with `args`."""
        self.count += 1
        log = self.root / f"torchrun-{self.count}-on-{node}.log"
        request = {
            "flags": flags,
            "entry": entry,
            "args": args,
            "environment": environment or {},
            "log": str(log),
            "clock_off_s": clock_off_s,
        }
        found = Torchrun(log)
        server = self.servers[node]
        server.stdin.write(json.dumps(request).encode() + b"\n")
        server.stdin.flush()
        return found

    def new_port(self) -> int:
        """A port on which nobody listens now."""
        with socket.socket() as s:
            s.bind((self.addresses[0], 0))
            return s.getsockname()[1]

    @contextmanager
    def port_taken(self, port: int) -> Iterator[None]:
        """Another program listens on machine 0's port, and never answers."""
        listen = (
            "import socket,sys,time;s=socket.create_server(('',int(sys.argv[1])));print(1,flush=True);time.sleep(99)"
        )
        command = [sys.executable, "-S", "-c", listen, str(port)]
        with supervise.started(command, root=self.root / "run-0", name="other", stdout=subprocess.PIPE) as other:
            other.stdout.readline()
            yield

    def build(self) -> None:
        """Start both servers, each on a core of its own."""
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        for node in NODES:
            server = _server(self.root, node)
            self.servers.append(self.stack.enter_context(server))
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(self.servers[node].pid, {cores[node % len(cores)]})

    def wait_until_ready(self) -> None:
        """Until both servers have loaded torch."""
        for node, server in enumerate(self.servers):
            wait_for(
                lambda n=node, s=server: (self.root / f"node{n}-ready").exists() or s.poll() is not None,
                "import torch on both machines",
                timeouts.IMPORT_S,
            )
            if server.poll() is not None:
                last = (self.root / f"node{node}.log").read_text(errors="replace").splitlines()[-1:]
                raise RuntimeError(f"machine {node} has ended with exit code {server.returncode}: {''.join(last)}")


@contextmanager
def two_machines(rank: Rank) -> Iterator[Machines]:
    """Two machines with torch loaded, for the length of the block."""
    with watched_folder(sockets=True) as root, unpinned(rank):
        (root / "run-0").mkdir()
        with ExitStack() as stack:  # what the servers started ends with them, and by the watcher of the folder
            machines = Machines(root, stack)
            machines.build()
            machines.wait_until_ready()
            yield machines


def wait_for(done: Callable[[], Any], what: str, limit_s: float = timeouts.CHILD_S) -> Any:
    """What `done` returns as soon as that is true. RuntimeError names `what` after `limit_s` seconds."""
    until = time.monotonic() + limit_s
    while not (found := done()):
        if time.monotonic() > until:
            raise RuntimeError(f"{what} took longer than {limit_s:g} s")
        time.sleep(POLL_S)
    return found


@contextmanager
def _server(root: Path, node: int) -> Iterator[subprocess.Popen]:
    """A machine's process, announced in `root`."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith(OF_THIS_RANK)}
    one = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **outside,
        **one,
        supervise.ANNOUNCE: str(root / "run-0"),
        "TMPDIR": str(root),
        "PYTHONUNBUFFERED": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONPATH": os.pathsep.join(p for p in path if p),
    }
    with (root / f"node{node}.log").open("ab") as log:
        server = supervise.started(
            [sys.executable, "-m", "labs.two_nodes.node_server", str(root), f"node{node}"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            root=root / "run-0",
            name=f"node{node}",
        )
        with server as process:
            yield process


def _loopbacks() -> tuple[str, str]:
    """Two addresses of this machine's loopback; where it has but one, that one twice."""
    with socket.socket() as s:
        try:
            s.bind(("127.0.0.2", 0))
        except OSError:
            return "127.0.0.1", "127.0.0.1"
    return "127.0.0.1", "127.0.0.2"
