"""Does a checkpoint survive if its writer is killed while it saves?

    python -m labs.training_checkpoint
    python -m labs.training_checkpoint --ways "onto the old file" "beside it" --kills 60 --folder /mnt/my_disk

About 8 s on 2 CPU cores. Forked processes save again and again, and get SIGKILL at a random moment of a save. Then the
file is read as a restarted job would read it. `fsync` protects against power cuts, which this can't test: a killed
process leaves the operating system's page cache intact.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import multiprocessing
import os
import random
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from labs.common.checkpoints.files import Damaged, load_latest, save
from labs.kit import cli, measure, supervise, timeouts
from labs.kit.errors import BadInput, require
from labs.kit.rank import Rank, unpinned
from labs.kit.record import Record, Records
from labs.kit.supervise import watched_folder

NAME = "checkpoint.pt"
LEAST_KILLS, MOST_KILLS = 30, 100  # the interval of 0 of 30 ends at 11 %, of 0 of 100 at 4 %
SMOKE = {"kills": 3}


def onto_the_old_file(folder: Path, step: int, state: Any) -> None:
    """Overwrite the file, as most scripts do. The old checkpoint is gone before the new one is complete."""
    torch.save(state, folder / NAME)


def beside_it(folder: Path, step: int, state: Any) -> None:
    """Write a temporary file, flush it to the disk, rename it."""
    partial = folder / f"{NAME}.partial"
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / NAME)


def find(folder: Path) -> Any:
    """Return the state in the file, or None if it can't be loaded."""
    try:
        return torch.load(folder / NAME, weights_only=True)
    except Exception:  # torch has no specific exception for this
        return None


def find_latest(folder: Path) -> Any:
    """Return the last good state of labs.common.checkpoints, or None."""
    try:
        found = load_latest(folder, on_damaged=lambda e: None)
    except Damaged:
        return None
    return found[1] if found else None


class Way(NamedTuple):
    """How to write a checkpoint and how to read it back."""

    write: Callable[[Path, int, Any], None]
    find: Callable[[Path], Any]


WAYS = {
    "onto the old file": Way(onto_the_old_file, find),
    "beside it": Way(beside_it, find),
    "labs.common.checkpoints": Way(lambda folder, step, state: save(folder, step, state), find_latest),
}


@dataclass(frozen=True)
class Config:
    """How to save, and how often to kill."""

    ways: tuple[str, ...] = ("onto the old file", "beside it")
    """onto the old file, beside it (then renamed), or labs.common.checkpoints (which adds a checksum)."""
    kills: int | None = None
    """Writers to kill for each way. Default: 30 to 100, as time allows."""
    size_bytes: Annotated[int, Ge(2**12)] = 2**18
    """Size of a checkpoint."""
    time_s: Annotated[float, Gt(0)] = 7.0
    """Time for all kills, in s."""
    folder: str = ""
    """A folder on the disk to test. Default: the system's temporary folder."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the kill times."""
    smoke: bool = False
    """Kill three writers."""

    def __post_init__(self) -> None:
        require(self.kills is None or self.kills >= 1, f"kills must be at least 1, not {self.kills}")
        require(len(self.ways) > 0 and set(self.ways) <= set(WAYS), f"ways must be of {', '.join(WAYS)}")
        require(not self.folder or Path(self.folder).is_dir(), f"{self.folder} is not a folder: make it first")


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield one sample per kill, for each way. A kill that came after its save had returned doesn't count."""
    if rank.rank:
        return
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(watched_folder(Path(config.folder) if config.folder else None))
        except OSError as e:
            where = config.folder or tempfile.gettempdir()
            raise BadInput(f"cannot write to {where} ({e.strerror}): choose another --folder") from None
        stack.enter_context(unpinned(rank))  # otherwise a writer would share one core with the process that kills it
        for done, way in enumerate(config.ways):
            rank.progress(done, len(config.ways), way)
            (place := folder / str(done)).mkdir()
            killed = kills(WAYS[way], place, config.kills or MOST_KILLS, config.size_bytes, config.seed)
            time_left = measure.Budget(config.time_s / len(config.ways), least=LEAST_KILLS, most=MOST_KILLS)
            found = [k for k in measure.within(killed, config.kills or time_left) if k.saving]
            yield rank.record("kill_moment", "save times", [k.moment for k in found] or [0.0], rank=0, way=way)
            yield rank.record("lost", "1", [float(k.lost) for k in found] or [0.0], rank=0, way=way)
            yield rank.record("leftovers", "files", [k.leftovers for k in found] or [0], rank=0, way=way)
            yield rank.record("kills", "1", len(found), rank=0, way=way)


def marked(step: int, size_bytes: int) -> dict[str, Tensor]:
    """Return about `size_bytes` in 8 tensors filled with `step`, so that a mixture of two steps is visible."""
    return {str(i): torch.full((max(1, size_bytes // 32),), float(step)) for i in range(8)}


def step_in(state: Any) -> int | None:
    """Return the step of a `marked` state; None if it isn't one, or mixes several steps."""
    if not isinstance(state, dict) or not state:
        return None
    steps = {x for tensor in state.values() for x in tensor.unique().tolist()}
    return int(steps.pop()) if len(steps) == 1 else None


@dataclass(frozen=True)
class Kill:
    """One writer killed by SIGKILL."""

    moment: float
    """Time since a save started, as a share of a save's usual duration."""
    saving: bool
    """Whether that save had not returned yet."""
    before: int
    """Step of the last save that had returned."""
    found: int | None
    """Step that the next process finds; None if it can load nothing."""
    leftovers: int
    """Number of temporary files left behind."""

    @property
    def lost(self) -> bool:
        """Whether the next process finds less than was saved."""
        return self.found is None or self.found < self.before


def kills(way: Way, folder: Path, count: int, size_bytes: int, seed: int) -> Iterator[Kill]:
    """Start `count` writers one after the other, and kill each at a random moment of its first save.

    The moments span a save's usual duration. A faster save may return before its kill: see `Kill.saving`.
    """
    draw, saved = random.Random(seed), 0
    save_s = _save_s(way, folder, size_bytes)
    for _ in range(count):
        moment = draw.uniform(0, 1)
        with _Progress() as progress:
            arguments = (_save_on, way, folder, saved + 1, size_bytes, progress)
            with supervise.forked(_alone, *arguments) as writer:
                progress.wait_for(saved + 1, writer)
                time.sleep(moment * save_s)
                writer.kill()
                writer.join()
                started, finished = progress.read()
        saved = max(saved, finished)
        found = step_in(way.find(folder))
        kill = Kill(moment, started > finished, saved, found, len(leftovers(folder)))
        yield kill
        saved = started if kill.lost else found  # numbers only rise, so a later file can't pass for an earlier one
        if kill.lost:
            way.write(folder, saved, marked(saved, size_bytes))


def leftovers(folder: Path) -> list[str]:
    """Return the names of files in `folder` that a killed writer left."""
    return [name for name in os.listdir(folder) if name.endswith(".partial")]


def _save_s(way: Way, folder: Path, size_bytes: int) -> float:
    """Return the median time of 5 writers' first saves, which are slow because a forked process copies its pages."""
    receive, send = multiprocessing.get_context("fork").Pipe(duplex=False)
    seconds = []
    for _ in range(5):
        with supervise.forked(_alone, _time_save, way, folder, size_bytes, send) as writer:
            wait([receive, writer.sentinel], timeouts.CHILD_S)
            if not receive.poll():
                raise RuntimeError(f"a writer didn't answer within {timeouts.CHILD_S:g} s: code {writer.exitcode}")
            seconds.append(receive.recv())
    return statistics.median(seconds)


def _time_save(way: Way, folder: Path, size_bytes: int, send: Any) -> None:
    state, start = marked(0, size_bytes), time.perf_counter()
    way.write(folder, 0, state)
    send.send(time.perf_counter() - start)


def _save_on(way: Way, folder: Path, step: int, size_bytes: int, progress: _Progress) -> None:
    for s in itertools.islice(itertools.count(step), 20):  # more than there is time for
        state = marked(s, size_bytes)
        progress.start(s)
        way.write(folder, s, state)
        progress.finish(s)


class _Progress:
    """Last steps whose save was started and finished, in memory shared with forked processes."""

    def __enter__(self) -> _Progress:
        self.memory = mmap.mmap(-1, 16)
        return self

    def __exit__(self, *_: object) -> None:
        self.memory.close()

    def start(self, step: int) -> None:
        self.memory[:8] = struct.pack("q", step)

    def finish(self, step: int) -> None:
        self.memory[8:] = struct.pack("q", step)

    def read(self) -> tuple[int, int]:
        return struct.unpack("qq", self.memory[:])

    def wait_for(self, step: int, writer: multiprocessing.Process) -> None:
        """Wait until the save of `step` has begun. RuntimeError if the writer ended or takes too long."""
        end = time.monotonic() + timeouts.CHILD_S
        while self.read()[0] < step:
            if not writer.is_alive() or time.monotonic() > end:
                raise RuntimeError(f"the writer didn't get to step {step}: exit code {writer.exitcode}")
            time.sleep(0.0002)


def _alone(function: Callable[..., None], *args: Any) -> None:
    torch.set_num_threads(1)  # forking drops threads: OpenMP would wait for them forever
    function(*args)


def lost_in(records: Records, way: str) -> measure.Estimate:
    """Return the share, in %, of kills during a save after which the last good checkpoint is gone."""
    n = int(records.one("kills", way=way).value)
    if not n:
        return measure.Estimate(0.0, 0.0, 100.0, 0, "%")  # no kill hit a save
    return measure.proportion(round(sum(records.one("lost", way=way).samples)), n).scaled(100, "%")


def category(records: Records) -> str:
    """Say whether overwriting loses checkpoints more often than renaming."""
    old, new = (lost_in(records, way) for way in ("onto the old file", "beside it"))
    return "renaming is safer" if new.high < old.low else "inconclusive"


def answer(records: Records) -> Iterator[str]:
    """Yield what a kill during a save loses."""
    for r in records.where("kills"):
        way = r.case["way"]
        yield f"Saved {way}: {lost_in(records, way)} of {r.value:.0f} kills during a save lose the last checkpoint."


if __name__ == "__main__":
    cli.main()
