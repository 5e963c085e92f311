"""Training scripts that take steps in turn, each in processes of its own: which is faster, and in which part of a step.

A script is not changed. Its process becomes it (labs/kit/as_main.py) with the doctor's hooks, and after each block of
steps it waits until it is its turn again. What slows the machine for a while hits all scripts alike.

python -m labs.doctor_trial.in_turn PIPES BLOCK -- train.py [its arguments]      # one process; `take_turns` starts it
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from labs.kit import _compat, as_main, measure, supervise, timeouts

WARM_UP = 12
"""Steps before the first block; more while torch.compile goes on compiling."""
MOST_WARM_UP = 60
IDLE_S, LONGEST_IDLE_S = 0.02, 2.0
"""A script's workers may fill their queues before another one's turn: looked at this often, waited for at most."""
ROOT = Path(__file__).parents[2]


class ScriptFailed(RuntimeError):
    """A script ended, or took no steps, before its last turn."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.name, self.why = name, why


@dataclass(frozen=True)
class Script:
    """What is run, on how many ranks. `argv`: its path, then its own arguments."""

    argv: tuple[str, ...]
    ranks: int = 1


@dataclass
class Block:
    """Steps of one turn."""

    step_s: float
    """Mean over the block; with several ranks, of the slowest one."""
    spans_s: dict[str, float]
    """Mean by kind (labs/doctor/facts.py), of rank 0."""
    samples: float
    """Per step and rank."""


def take_turns(
    scripts: Mapping[str, Script], block: int, rounds: int | measure.Budget, folder: Path
) -> dict[str, list[Block]]:
    """A block of `block` steps of each script, round after round: `{name: [one per round]}`.

    Scripts run in folders below `folder`. ScriptFailed if one does not come to its end; none is left behind.
    """
    taken: dict[str, list[Block]] = {name: [] for name in scripts}
    with ExitStack() as stack:
        running = {}
        for name, script in scripts.items():
            own = folder / name
            own.mkdir(parents=True, exist_ok=True)
            running[name] = stack.enter_context(_started(name, script, block, own))
        for one in running.values():
            one.wait()  # all are warm
        for order in measure.within(measure.orders(tuple(scripts), 10_000), rounds):
            for name in order:
                taken[name].append(running[name].turn())
    return taken


class _Running:
    """The processes of one script, one for each rank, and pipes to and from them."""

    def __init__(
        self, name: str, processes: list[subprocess.Popen], asks: list[int], answers: list[Any], errors: Path
    ) -> None:
        self.name, self.processes, self.asks, self.answers, self.errors = name, processes, asks, answers, errors

    def turn(self) -> Block:
        for pipe in self.asks:
            with suppress(BrokenPipeError):  # it has ended: `wait` says so
                os.write(pipe, b"g")
        of_ranks = self.wait()
        slowest = max(row["step_s"] for row in of_ranks)
        return Block(slowest, of_ranks[0]["spans_s"], of_ranks[0]["samples"])

    def wait(self) -> list[dict[str, Any]]:
        """What each rank says at the end of its block."""
        ends = time.monotonic() + timeouts.BLOCK_S
        return [self._heard(answer, ends) for answer in self.answers]

    def _heard(self, answer: Any, ends: float) -> dict[str, Any]:
        # Not only until the pipe is closed: workers of a script that has ended may still hold it
        while not select.select([answer], [], [], 0.2)[0] and all(p.poll() is None for p in self.processes):
            if time.monotonic() > ends:
                raise ScriptFailed(self.name, f"no block of steps was done in {timeouts.BLOCK_S:g} s")
        if select.select([answer], [], [], 0)[0] and (line := answer.readline()):
            return json.loads(line)
        for process in self.processes:  # what was said comes before the end
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeouts.STOP_S)
        code = next((p.returncode for p in self.processes if p.returncode), 0)
        said = self.errors.read_text(errors="replace").strip().splitlines()[-1:]
        how = f"it failed with exit code {code}" if code else "it ended before enough steps were taken"
        raise ScriptFailed(self.name, ": ".join([how, *said]) if code else how)


@contextmanager
def _started(name: str, script: Script, block: int, folder: Path) -> Iterator[_Running]:
    processes, asks, answers, port = [], [], [], str(free_port())
    errors = folder / "stderr.txt"
    with supervise.watched_folder() as root, ExitStack() as stack:
        for rank in range(script.ranks):
            (child_in, ask), (answer, child_out) = os.pipe(), os.pipe()
            argv = [sys.executable, __file__, f"{child_in},{child_out}", str(block), "--"]
            options = {"cwd": folder, "stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
            with errors.open("ab") as err:
                process = stack.enter_context(
                    supervise.started(
                        [*argv, *script.argv],
                        root=root,
                        pass_fds=(child_in, child_out),
                        stderr=err,
                        env=environment(rank, script.ranks, port),
                        **options,
                    )
                )
            os.close(child_in), os.close(child_out)
            processes.append(process), asks.append(ask)
            answers.append(stack.enter_context(os.fdopen(answer)))
            stack.callback(os.close, ask)  # first: a process that waits for its turn ends at this
        yield _Running(name, processes, asks, answers, errors)


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(rank: int, ranks: int, port: str) -> dict[str, str]:
    """Of one rank, as torchrun would make it; nothing of a job that this process may be part of."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    mine = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        and not k.startswith("TORCHELASTIC")
    }
    mine |= {"PYTHONPATH": path}
    if ranks > 1:
        mine |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
    return mine


def doctor_command(script: Script, options: Sequence[str]) -> list[str]:
    """What starts the doctor on all ranks of a script."""
    start = [sys.executable, "-m"]
    if script.ranks > 1:
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(script.ranks), "-m"]
    return [*start, "labs.doctor", *options, *script.argv]


def run_alone(command: Sequence[str], folder: Path, limit_s: float) -> tuple[int | None, str]:
    """Exit code and standard error of a command; None after `limit_s`. Nothing of its session is left then.

    A command that is ended gets SIGTERM first, and some seconds to end what it has started elsewhere.
    """
    done = supervise.run(command, limit_s, timeouts.STOP_S, cwd=folder, env=environment(0, 1, "0"))
    return done.returncode, done.stderr


# In the process that becomes the script


class Paced:
    """Counts steps, and waits at the end of each block until it is asked for the next one."""

    def __init__(self, asked: int, answers: int, block: int) -> None:
        self.asked, self.answers, self.block = asked, answers, block
        self.warm, self.settle, self.graphs = 0, 0, 0
        self.rows: list[dict[str, float]] = []
        self.samples = 0.0
        self.hooks: Any = None

    def stepped(self, spans: dict[str, float]) -> None:
        """At the end of each step, within the script."""
        if self.warm >= 0:
            self.warm += 1
            graphs = _compat.compiled_graphs()
            if self.warm >= MOST_WARM_UP or (self.warm >= WARM_UP and graphs == self.graphs):
                self.warm = -1
                self._pause({})
            self.graphs = graphs
        elif self.settle:
            self.settle -= 1
        else:
            self.rows.append(dict(spans))
            self.samples += self.hooks.samples / self.block
            if len(self.rows) == self.block:
                means = {kind: sum(row[kind] for row in self.rows) / self.block for kind in spans}
                self._pause({"step_s": sum(means.values()), "spans_s": means, "samples": self.samples})
                self.rows, self.samples = [], 0.0

    def _pause(self, told: dict[str, Any]) -> None:
        self._wait_for_workers()
        os.write(self.answers, json.dumps(told).encode() + b"\n")
        if not os.read(self.asked, 1):
            os._exit(0)  # nobody is there who would ask again
        loader = self.hooks.loader
        # Batches that were made before this turn are used up first
        self.settle = 1 + (loader.num_workers * (loader.prefetch_factor or 0) if loader is not None else 0)

    @staticmethod
    def _wait_for_workers() -> None:
        ends, before = time.monotonic() + LONGEST_IDLE_S, -1.0
        me = psutil.Process()
        while (now := _cpu_s(me.children(recursive=True))) != before and time.monotonic() < ends:
            before = now
            time.sleep(IDLE_S)


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with suppress(psutil.Error):
            total += sum(process.cpu_times()[:2])
    return total


def main() -> None:
    """Become the script, paced."""
    pipes, block, _, *argv = sys.argv[1:]
    asked, answers = map(int, pipes.split(","))
    from labs.doctor.hooks import Hooks

    paced = Paced(asked, answers, int(block))
    paced.hooks = Hooks(os.path.dirname(os.path.realpath(argv[0])), paced.stepped)
    paced.hooks.install()
    as_main.run(argv)


if __name__ == "__main__":
    main()
