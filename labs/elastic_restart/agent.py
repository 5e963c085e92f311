"""Run training scripts whose ranks may die, under PyTorch's elastic agent. No process outlives this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from labs.common.elastic import journal
from labs.kit import supervise, timeouts
from labs.kit.rank import Rank, unpinned
from labs.kit.supervise import watched_folder

POLL_S = 0.02
OF_THIS_RANK = ("TORCHELASTIC_", "RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_")  # not for other ranks


class Agent:
    """The agent's process, and the folder for its training runs."""

    def __init__(self, root: Path, process: subprocess.Popen) -> None:
        self.root, self.process = root, process

    def train(
        self,
        name: str,
        args: list[str],
        *,
        forked: bool = True,
        ranks: int = 2,
        max_restarts: int = 2,
        timeout_s: float = timeouts.CHILD_S,
    ) -> journal.History:
        """Run labs.elastic_train with `args`, restarted up to `max_restarts` times, and return its history.

        `forked`: ranks come from a fork server that has loaded torch; otherwise they are fresh interpreters, as with
        torchrun. RuntimeError, with the last line on stderr, if the run fails or takes too long.
        """
        folder = self.folder(name)
        flags = [
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "127.0.0.1:0",
            "--rdzv-id",
            name,
            "--nnodes",
            "1",
            "--nproc-per-node",
            str(ranks),
            "--max-restarts",
            str(max_restarts),
            "--local-addr",
            "127.0.0.1",
            "--log-dir",
            str(folder / "log"),
            "--redirects",
            "3",
            "--master-port",
            "0",
        ]
        request = {"folder": str(folder), "forked": forked, "torchrun": flags, "args": ["--folder", str(folder), *args]}
        with suppress(BrokenPipeError):  # the agent has ended: `_wait` says so
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        self._wait(folder, time.monotonic() + timeout_s)
        return journal.History(journal.read(folder))

    def folder(self, name: str) -> Path:
        """Return the folder for the checkpoints, journal and output of the run `name`."""
        return self.root / "trainings" / name

    def _wait(self, folder: Path, deadline: float) -> None:
        while not (folder / "ended").exists():
            if self.process.poll() is not None:
                raise RuntimeError(f"the elastic agent has ended with exit code {self.process.returncode}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the run {folder.name!r} took too long: {_last_words(folder)}")
            time.sleep(POLL_S)
        if error := json.loads((folder / "ended").read_text())["error"]:
            raise RuntimeError(f"the run {folder.name!r} failed: {_last_words(folder) or error}")


def _last_words(folder: Path) -> str:
    """Return the last line that any rank wrote to stderr; "" if there is none."""
    written = [path for path in folder.glob("log/**/stderr.log") if path.stat().st_size]
    newest = max(written, key=lambda path: path.stat().st_mtime, default=None)
    return newest.read_text(errors="replace").splitlines()[-1] if newest else ""


@contextmanager
def elastic_agent(rank: Rank) -> Iterator[Agent]:
    """Start an agent on all cores of the job. When the block or this process ends, all its processes are killed."""
    with watched_folder(sockets=True) as root, ExitStack() as stack:
        (announced := root / "run-0").mkdir()
        outside = {name: value for name, value in os.environ.items() if not name.startswith(OF_THIS_RANK)}
        environment = {
            **outside,
            supervise.ANNOUNCE: str(announced),
            "TMPDIR": str(root),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo"),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
        }
        with unpinned(rank), (root / "agent.log").open("wb") as log:
            agent = supervise.started(
                [sys.executable, "-m", "labs.common.elastic.agent_process", str(root)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
            process = stack.enter_context(agent)  # stopped before its ranks, which it would restart
        yield Agent(root, process)
