"""Run a program of memory_faults in a process of its own until its memory is used up, and keep what was seen of it.

The process gets a limit that ends it soon: a limit of the kernel on its data (RLIMIT_DATA) or its addresses
(RLIMIT_AS), a small /dev/shm of its own, or a watcher that does what the kernel's out-of-memory killer does, at so many
bytes: SIGKILL to the process that has most. The machine itself never runs short. Linux only.

What the process notes lies in a file that both map, so that it is still there when the process is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, Dataset

from labs.common.memory.recomputation import recompute
from labs.common.models import Workload
from labs.common.oracle import internals
from labs.common.oracle.step import Conditions
from labs.common.oracle.trace import CATEGORIES
from labs.common.oracle.tracker import Block, Tracker
from labs.common.precision import amp
from labs.common.traps import failures
from labs.common.traps.shm import SmallSharedMemory
from labs.kit import _compat, supervise, timeouts
from labs.oom_clinic.memory_faults import Cure, End, run_out

MOST_STEPS, LAYERS, LABELS = 32, 3, 100
POLL_S = 0.02
OLD_HABITS = {"optimizer": "adam", "set_to_none": False}
"""Of the step without a cure. Gradients are filled with zeros, as everybody's were before torch 2.0."""
FACTS = ("steps", "peak", "largest_resident", "started", "anonymous_at_start", "addresses_at_start", "addresses")
HISTORY = (*CATEGORIES, "tensors", "nodes", "trainer", "workers", "shared")


class Block9(nn.Module):
    """(rows, width) -> the same: x + W2 gelu(W1 x). Autograd keeps 9 numbers per row and unit of width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(x)))


def workload(width: int) -> Workload:
    """LAYERS blocks and a head, on random rows of `width` numbers."""
    blocks = nn.ModuleList(Block9(width) for _ in range(LAYERS))
    module = Chain(blocks, nn.Linear(width, LABELS))
    return Workload(module, lambda n: (torch.randn(n, width), torch.randint(LABELS, (n,))), nn.functional.cross_entropy)


class Chain(nn.Module):
    """(rows, width) -> (rows, LABELS)."""

    def __init__(self, blocks: nn.ModuleList, head: nn.Linear) -> None:
        super().__init__()
        self.blocks, self.head = blocks, head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# What is noted -------------------------------------------------------------------------------------------------------


class Board:
    """Numbers in a file that two processes map: what the one wrote, the other reads, also when the first is gone."""

    def __init__(self, path: Path) -> None:
        new = () if path.exists() else (0,) * (len(FACTS) + 2 * len(CATEGORIES) + MOST_STEPS * len(HISTORY))
        if new:
            np.asarray(new, float).tofile(path)
        numbers = np.memmap(path, float, "r+")
        facts, now, peak = len(FACTS), len(CATEGORIES), len(CATEGORIES)
        self.facts = numbers[:facts]
        self.now, self.at_peak = numbers[facts : facts + now], numbers[facts + now : facts + now + peak]
        self.history = numbers[facts + now + peak :].reshape(MOST_STEPS, len(HISTORY))

    def __getitem__(self, fact: str) -> float:
        return float(self.facts[FACTS.index(fact)])

    def __setitem__(self, fact: str, value: float) -> None:
        self.facts[FACTS.index(fact)] = value


class Meter(Tracker):
    """Bytes of tensors by category, on the board at every moment. DataLoader workers are left alone."""

    def __init__(self, board: Board) -> None:
        super().__init__()
        self.board, self.pid, self.updating = board, os.getpid(), False
        self.now = dict.fromkeys(CATEGORIES, 0)
        self.parameters: list[nn.Parameter] = []
        self.hooks = [
            register_optimizer_step_pre_hook(lambda *_: setattr(self, "updating", True)),
            register_optimizer_step_post_hook(lambda *_: setattr(self, "updating", False)),
        ]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Called in place of each operation, with this mode switched off."""
        if os.getpid() != self.pid:
            return func(*args, **(kwargs or {}))
        phase = "backward" if internals.in_backward() else "optimizer" if self.updating else "forward"
        if (was := self.segments[-1].phase) != phase:
            if was == "backward":
                self.hold((p.grad for p in self.parameters if p.grad is not None), "gradients")
            self.begin(phase)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def hold(self, tensors: Iterable[Tensor], category: str) -> None:
        """`tensors` are of `category`."""
        for t in tensors:
            known = self.live.get(_compat.storage_key(t.untyped_storage()))
            if known:
                self._change(known[0], -1)
                known[0].category = category
                self._change(known[0], 1)
            else:
                super().hold([t], category)
                block = self.live[_compat.storage_key(t.untyped_storage())][0]
                block.category = ""
                self._change(block, -1)  # noted under another name a line above
                block.category = category
                self._change(block, 1)

    def _note(self, storage: torch.UntypedStorage) -> None:
        super()._note(storage)
        if storage.is_shared():
            self.live[_compat.storage_key(storage)][0].category = "inputs/buffers"  # a batch that came from a worker
        self._change(self.live[_compat.storage_key(storage)][0], 1)

    def _freed(self, block: Block) -> None:
        if os.getpid() == self.pid:
            super()._freed(block)
            self._change(block, -1)

    def _change(self, block: Block, sign: int) -> None:
        category = block.category or ("activations" if self.segments[block.made_in].runs_model else "temporaries")
        self.now[category] += sign * block.nbytes
        self.board.now[:] = list(self.now.values())
        if (total := sum(self.now.values())) > self.board["peak"]:
            self.board["peak"] = total
            self.board.at_peak[:] = self.board.now


def private_bytes(pid: int) -> int:
    """Memory that only this process has, without shared memory: what copying on write adds is in it, too.

    0 for a process that is gone.
    """
    found = dict.fromkeys(("Private_Clean:", "Private_Dirty:", "Pss_Shmem:"), 0)
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            name, _, rest = line.partition(" ")
            if name in found:
                found[name] = 1024 * int(rest.split()[0])
    return max(0, found["Private_Clean:"] + found["Private_Dirty:"] - found["Pss_Shmem:"])


def workers_of(pid: int) -> list[int]:
    """Its children."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def shared_bytes(root: str = "/") -> int:
    """Bytes in /dev/shm as the process sees it whose root this is; 0 if that cannot be seen."""
    try:
        found = os.statvfs(Path(root, "dev/shm"))
    except OSError:
        return 0
    return (found.f_blocks - found.f_bfree) * found.f_frsize


# The process that runs out -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """What is run, and what ends it."""

    cause: str
    """Of memory_faults.PROGRAMS, or "healthy"."""
    end: End = "none"
    limit_bytes: int = 0
    """More than the process has when it starts; for "shm" the size of /dev/shm."""
    size: float = 1.0
    steps: int = 6
    seed: int = 0
    cure: Cure = field(default_factory=Cure)

    def __post_init__(self) -> None:
        assert 1 <= self.steps <= MOST_STEPS and (self.end == "none") == (self.limit_bytes == 0), self


class Job:
    """What a program is given: see memory_faults.Job."""

    def __init__(self, trial: Trial, folder: Path, meter: Meter) -> None:
        self.trial, self.folder, self.meter, self.size = trial, folder, meter, trial.size
        self.conditions = Conditions(**{**OLD_HABITS, **trial.cure.conditions})

    def build(self, width: int) -> None:
        """A model of this width, and AdamW for it."""
        made = workload(width)
        self.module, self.loss, self._make = recompute(made.module, self.conditions.policy), made.loss, made.make_batch
        self.meter.parameters = list(self.module.parameters())
        self.meter.hold(self.meter.parameters, "parameters")
        self.optimizer = self.conditions.make_optimizer(self.module)
        self.scaler = amp.scaler(self.conditions.precision, torch.device("cpu"))

    def model(self, x: Tensor) -> Tensor:
        """Forward, in the format of the cure."""
        with amp.precision(self.conditions.precision, x.device):
            return self.module(x)

    def batches(self, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A fresh batch for each step."""
        for _ in range(self.trial.steps):
            x, y = self._make(max(4, round(rows * self.trial.cure.rows)))
            self.meter.hold((x, y), "inputs/buffers")
            yield x, y
            del x, y  # or it would still be there while the next one is made

    def load(self, dataset: Dataset, batch_size: int | None, workers: int, prefetch: int) -> Iterator[Any]:
        """From a DataLoader whose workers end with this process."""
        changed = {"workers": workers, "prefetch": prefetch, **self.trial.cure.loader}
        size = batch_size and max(1, round(batch_size * self.trial.cure.rows))
        return iter(
            DataLoader(
                dataset,
                size,
                num_workers=changed["workers"],
                prefetch_factor=changed["prefetch"],
                worker_init_fn=partial(_end_with, os.getpid()),
                multiprocessing_context="fork",
            )
        )

    def train(self, x: Tensor, y: Tensor) -> None:
        """One training step under the conditions of the cure."""
        c = self.conditions
        amp.train_step(self.module, self.loss, c.parts(x, y), self.optimizer, c.precision, self.scaler)
        states = (t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, Tensor))
        self.meter.hold(states, "optimizer")


def _end_with(trainer: int, worker: int) -> None:
    supervise.end_with_parent(trainer)


def _run(trial: Trial, folder: Path) -> None:
    """In the child: all steps, or the error that ends them, and then out without any tidying up."""
    printed = os.open(folder / "printed", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    board = Board(folder / "board")
    gc.freeze()  # a collection would copy the pages of all that was there before the fork
    _exact_memory()
    torch.manual_seed(trial.seed)
    torch.set_num_threads(1)
    code = 0
    try:
        if trial.end == "shm" or trial.cause in ("prefetch", "shared_memory"):
            SmallSharedMemory(trial.limit_bytes if trial.end == "shm" else 2**30, folder / "printed")(0)
        warm_up(folder, trial.cure)  # pages of libraries and of Python's objects that the first step touches
        _limit(trial)
        meter = Meter(board)
        job = Job(trial, folder, meter)
        board["anonymous_at_start"] = _status("RssAnon:")
        board["addresses_at_start"] = _status("VmSize:")
        board["started"] = _status("VmRSS:")
        with meter:
            for step in run_out(trial.cause, trial.cure)(job):
                _after_step(job, board, step)
    except BaseException as e:  # MemoryError among them
        code = 1
        e.__traceback__ = None  # its frames hold what filled the memory
        said, kind = failures.words(e), type(e).__name__
        (folder / "message").write_text(said if said.startswith(kind) else f"{kind}: {said}")
    _peaks(board)
    os._exit(code)


def _peaks(board: Board) -> None:
    """What the kernel has counted since the start of the process."""
    board["largest_resident"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    board["addresses"] = _status("VmPeak:")


def _status(name: str, pid: int | str = "self") -> int:
    """Bytes of a line of /proc/PID/status; 0 for a process that has ended.

    RssAnon: memory that is resident and belongs to no file and no /dev/shm. Of a fork it holds from the start all that
    it shares with its parent, so that what it has more is new.
    """
    with contextlib.suppress(OSError, ValueError):
        words = Path(f"/proc/{pid}/status").read_text().split()
        return 1024 * int(words[words.index(name) + 1])
    return 0


def _after_step(job: Job, board: Board, _: None) -> None:
    if job.trial.cure.trim:
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
    n, me = int(board["steps"]), os.getpid()
    workers = sum(map(private_bytes, workers_of(me)))
    trainer = _status("RssAnon:") - board["anonymous_at_start"]
    if n < MOST_STEPS:
        shared = shared_bytes() if _own_shm(job.trial) else 0
        board.history[n] = [*job.meter.now.values(), len(job.meter.live), graph_nodes(), trainer, workers, shared]
    _peaks(board)
    board["steps"] = n + 1


def graph_nodes() -> int:
    """Autograd nodes that tensors which are Python objects lead to. After a step that keeps nothing there are none."""
    todo = {t.grad_fn for t in gc.get_objects() if type(t) is Tensor and t.grad_fn is not None}
    seen = set(todo)
    while todo:
        todo = {f for node in todo for f, _ in node.next_functions if f is not None} - seen
        seen |= todo
    return len(seen)


def _own_shm(trial: Trial) -> bool:
    return trial.end == "shm" or trial.cause in ("prefetch", "shared_memory")


def _exact_memory() -> None:
    """Have glibc give freed memory back at once, so that resident memory is what is in use."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-1, 0)  # M_TRIM_THRESHOLD of malloc.h, in bytes
        libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD


def _limit(trial: Trial) -> None:
    """Limits of the kernel, on what this process may have more than now."""
    which, used = {"data": (resource.RLIMIT_DATA, "VmData:"), "addresses": (resource.RLIMIT_AS, "VmSize:")}.get(
        trial.end, (None, "")
    )
    if which is not None:
        most = _status(used) + trial.limit_bytes
        resource.setrlimit(which, (most, most))


# Who watches it ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Signs:
    """What is known of a program that has ended."""

    message: str
    """The error's kind and text; "" if there was none."""
    exit_code: int
    """0: it came to its end; below 0: the signal that ended it."""
    steps: int
    live: dict[str, float]
    """Bytes of tensors by category when they were the most."""
    live_growth: dict[str, float]
    """Bytes by category that a step leaves behind; 0 where too few steps were done to tell."""
    tensors_left: float
    """Tensors that a step leaves behind."""
    nodes_left: float
    """Autograd nodes that a step leaves behind."""
    trainer: float
    """Most bytes that the trainer had, above its start; without shared memory."""
    trainer_growth: float
    """Per step."""
    workers: float
    """Most bytes that all its workers had for themselves."""
    worker_growth: float
    """Per step."""
    shared: float
    """Most bytes in /dev/shm."""
    limit_bytes: float
    """What it might have had above its start; 0: no limit."""
    resident_peak: float
    """Most bytes resident in the trainer, above its start; from the kernel, not sampled."""
    addresses: float
    """Most bytes of addresses of the trainer, above its start: what RLIMIT_AS and `ulimit -v` count."""

    @property
    def tensors(self) -> float:
        """Bytes of tensors when they were the most."""
        return sum(self.live.values())

    @property
    def states(self) -> float:
        """Bytes of parameters, gradients and the optimizer's state."""
        return sum(self.live[c] for c in ("parameters", "gradients", "optimizer"))

    @property
    def activations(self) -> float:
        """Bytes of what a forward pass made."""
        return self.live["activations"]


def run_until_end(trials: Sequence[Trial], at_once: int = 1, method: str = "fork") -> Iterator[Signs]:
    """Each trial in a child, in their order, up to `at_once` at the same time. TimeoutError if one does not end.

    Children are started and watched in this thread: to the kernel, the end of the thread that forked is the end of the
    parent. Nothing of a trial is left when its signs are there, nor of any when this is closed.
    """
    if method == "forkserver":
        multiprocessing.set_forkserver_preload([__name__, _compat.DYNAMO])  # or every child would import them
    with contextlib.ExitStack() as all_of_them:
        waiting, running = list(trials), []
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(all_of_them.enter_context(Running(waiting.pop(0), method)))
            time.sleep(POLL_S)
            for one in running:
                one.look()
            while running and not running[0].child.is_alive():
                yield running.pop(0).signs()


class Running:
    """A trial in its child."""

    def __init__(self, trial: Trial, method: str) -> None:
        self.trial, self.until = trial, time.monotonic() + timeouts.CHILD_S
        self.most = {"trainer": 0.0, "workers": 0.0, "shared": 0.0}
        self.killed: set[int] = set()
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        self.board = Board(self.folder / "board")
        self.forked = supervise.forked(_run, trial, self.folder, method=method)

    def __enter__(self) -> Running:
        self.child = self.forked.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.forked.__exit__(*(error or (None, None, None)))
        self._folder.cleanup()

    def look(self) -> None:
        """Note how much its processes have; as the killer, end one for it."""
        if time.monotonic() > self.until:
            raise TimeoutError(f"{self.trial.cause} has not ended after {timeouts.CHILD_S:g} s")
        if not self.board["started"] or not self.child.is_alive() or self.trial.end not in ("killer", "shm"):
            return
        pid = self.child.pid
        workers = {worker: private_bytes(worker) for worker in workers_of(pid)}
        trainer = max(0.0, _status("RssAnon:", pid) - self.board["anonymous_at_start"])
        shared = shared_bytes(f"/proc/{pid}/root") if _own_shm(self.trial) else 0
        now = {"trainer": trainer, "workers": sum(workers.values()), "shared": shared}
        self.most = {name: max(self.most[name], n) for name, n in now.items()}
        if self.trial.end == "killer" and sum(now.values()) > self.trial.limit_bytes:
            largest = max({pid: trainer, **workers}.items(), key=lambda item: item[1])[0]
            if largest not in self.killed:
                self.killed.add(largest)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(largest, signal.SIGKILL)

    def signs(self) -> Signs:
        """What was seen, once it has ended."""
        message = self.folder / "message"
        said = message.read_text() if message.exists() else ""
        found = _seen(self.trial, self.board, said, self.child.exitcode, self.most)
        self.__exit__()
        return found


def _slope(values: np.ndarray) -> float:
    """Per step, from the second step on: the first one makes the optimizer's state. 0 for fewer than three steps."""
    return float(values[-1] - values[1]) / (len(values) - 2) if len(values) >= 3 else 0.0


def _rise(values: np.ndarray) -> float:
    """Per step, up to the step with the most: a worker that is killed leaves less than there was. 0 as for _slope."""
    return _slope(values[: int(values.argmax()) + 1]) if len(values) else 0.0


def _seen(trial: Trial, board: Board, said: str, code: int, watched: dict[str, float]) -> Signs:
    steps = min(int(board["steps"]), MOST_STEPS)
    history = {name: board.history[:steps, i] for i, name in enumerate(HISTORY)}
    most = {name: max(float(history[name].max(initial=0)), found) for name, found in watched.items()}
    resident = max(0.0, board["largest_resident"] - board["started"])
    return Signs(
        message=said,
        exit_code=code,
        steps=steps,
        live=dict(zip(CATEGORIES, map(float, board.at_peak), strict=True)),
        live_growth={c: _slope(history[c]) for c in CATEGORIES},
        tensors_left=_slope(history["tensors"]),
        nodes_left=_slope(history["nodes"]),
        trainer=max(most["trainer"], resident),
        trainer_growth=_slope(history["trainer"]),
        workers=most["workers"],
        worker_growth=_rise(history["workers"]),
        shared=most["shared"],
        limit_bytes=float(trial.limit_bytes),
        resident_peak=resident,
        addresses=max(0.0, board["addresses"] - board["addresses_at_start"]),
    )


def warm_up(folder: Path, *cures: Cure) -> None:
    """What the first step of a process costs once: it belongs to no program."""
    for cure in cures or WARM:
        job = Job(Trial("healthy", steps=1, cure=cure), folder, Meter(Board(folder / "warm")))
        with job.meter:
            for _ in run_out("healthy")(job):
                pass


WARM = (Cure(), Cure({"precision": "bf16"}), Cure({"policy": "block"}), Cure({"optimizer": "sgd"}))
LINUX = sys.platform.startswith("linux")
