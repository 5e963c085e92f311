"""Runs Python programs as forks of a process that has imported torch, for tests that are not about how they start.

A fresh interpreter spends 3 s of a core on `import torch`, torchrun as many and each of its ranks again: more than a
recipe computes. Forks have the same packages, the arguments, environment and folder they are given, and nothing of the
tests. What a fork cannot show (torchrun, signals, restarts, the first import) is tested with fresh interpreters.
"""

import atexit
import contextlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from processes import free_port

IMPORTED = (
    "numpy",
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    "torch.profiler",
    "torch.utils.checkpoint",
    "torch.utils.data",
)


class Forks:
    """A server of forks. Use it in a with statement: in the end its whole process group is killed."""

    def __init__(self, env: dict[str, str]) -> None:
        """`env`: of the server; OMP_NUM_THREADS, PYTHONPATH and whatever else is read by imports belong here."""
        self.env = env

    def __enter__(self) -> "Forks":
        self.server = subprocess.Popen(
            [sys.executable, "-B", __file__],
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.server.pid, signal.SIGKILL)
        self.server.wait()
        for pipe in (self.server.stdin, self.server.stdout):
            pipe.close()

    def run(
        self, argv: list[str], ranks: int, env: dict[str, str], cwd: Path, timeout_s: float
    ) -> tuple[int, str, str]:
        """(exit code, output, errors) of the script argv[0] with its arguments: by itself for ranks=0, else on as many
        ranks as that, as torchrun starts them: the first that fails ends the others, and makes the code 1."""
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            asked = {"argv": argv, "ranks": ranks, "env": env, "cwd": str(cwd), "out": str(out), "err": str(err)}
            self.server.stdin.write(json.dumps(asked) + "\n")
            self.server.stdin.flush()
            ended, _, _ = select.select([self.server.stdout], [], [], timeout_s)
            if not ended:
                self.__exit__()
                self.__enter__()
                told = out.read_text()[-2000:] + err.read_text()[-2000:]
                raise AssertionError(f"not at its end after {timeout_s} s: {told}")
            return int(self.server.stdout.readline()), out.read_text(), err.read_text()


def _serve() -> None:
    for name in IMPORTED:
        __import__(name)
    for line in sys.stdin:
        asked = json.loads(line)
        pids = {_fork(asked, place) for place in _places(asked["ranks"])}
        code = 0
        while pids:
            pid, status = os.wait()
            pids.discard(pid)
            if ended := os.waitstatus_to_exitcode(status):
                code = code or (1 if asked["ranks"] else ended)
                for other in pids:
                    os.kill(other, signal.SIGTERM)
        print(code, flush=True)


def _places(ranks: int) -> list[dict[str, str]]:
    """What torchrun tells each rank on one machine; nothing to a script that runs by itself."""
    job = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    return [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)] or [{}]


def _fork(asked: dict, place: dict[str, str]) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        code = _become(asked, place)
    finally:
        atexit._run_exitfuncs()  # workers of loaders are ended
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _become(asked: dict, place: dict[str, str]) -> int:
    """Run the script as `python script` does; its exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, asked["out"]), (2, asked["err"])):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"], **place)
    sys.argv = asked["argv"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    _serve()
