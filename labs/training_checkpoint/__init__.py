"""Does a resumed training end as one that was never stopped, and what does a checkpoint have to survive?

    python -m labs.training_checkpoint --nproc 1
    python -m labs.training_checkpoint --nproc 1 --trials save_time kills --folder /mnt/my_disk
    torchrun --nproc-per-node 2 -m labs.training_checkpoint --trials resume
    python -m labs.checkpoints FOLDER

About 12 s on 2 CPU cores. Rank 0 writes. The last line is no lab: it lists the checkpoints of a folder, each with
its verdict. A power cut, which fsync is for, cannot be tried here: a killed process leaves the page cache intact.
"""

import contextlib
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from labs.common.checkpoints import load_latest, save
from labs.common.checkpoints.resume import Comparison, compare, refusal, without
from labs.common.checkpoints.training import Forgotten, Training, states
from labs.common.data import fashion
from labs.kit import measure
from labs.kit.errors import BadInput, require
from labs.kit.rank import Rank, same_bits_every_time, unpinned
from labs.kit.record import Record, Records
from labs.kit.supervise import watched_folder
from labs.training_checkpoint import corruption, drills, writers
from labs.training_checkpoint.writers import WAYS

Trial = Literal["resume", "save_time", "kills", "corruptions"]
LEAST_KILLS, MOST_KILLS = 30, 100  # the interval of 0 of 30 ends at 11 %, of 0 of 100 at 4 %
SMOKE = {
    "forgotten": ("data",),
    "steps": 24,
    "interrupted_at": 12,
    "samples": 512,
    "kills": 3,
    "corruptions": 20,
    "large_bytes": 2**22,
}  # with --smoke in a shell


@dataclass(frozen=True)
class Config:
    """What is trained, and how much is tried on files."""

    trials: tuple[Trial, ...] = Trial.__args__
    """resume: with each part forgotten; the others: what happens to files."""
    forgotten: tuple[Forgotten, ...] = Forgotten.__args__
    """Parts that resume forgets, one at a time."""
    steps: int = 160
    """Optimizer steps of the whole training."""
    interrupted_at: int = 90
    """Step at which a checkpoint is taken, in the middle of an epoch."""
    samples: int = 2048
    """Images of an epoch."""
    batch_size: int = 32
    """Images per rank and step."""
    seeds: int = 4
    """Uninterrupted trainings with other seeds: what a difference is to be compared with."""
    kills: int | None = None
    """Writers killed, for each of the ways in place, rename and full; by default 30 to 100, as there is time."""
    kill_bytes: int = 2**18
    """Size of the checkpoints of kills."""
    corruptions: int = 200
    """Damaged files."""
    seconds: float = 10.0
    """Time for all saves of save_time, and again for all kills, in s. A slower machine has fewer: wider intervals."""
    rounds: int | None = None
    """Saves of save_time; by default as many as fit into `seconds`, at least 6."""
    large_bytes: int = 2**25
    """Size of the state of save_time: 2**25 is that of 2.8 million parameters with AdamW."""
    folder: str = ""
    """A folder on the disk to try; empty is the system's folder for temporary files."""
    seed: int = 0
    """Seed of the training, the kills and the damages."""
    smoke: bool = False
    """Few kills, rounds, seeds and parts forgotten."""

    def __post_init__(self) -> None:
        require(len(self.trials) > 0, f"trials must hold some of {', '.join(Trial.__args__)}")
        require(len(self.forgotten) > 0, f"forgotten must hold some of {', '.join(Forgotten.__args__)}")
        require(1 <= self.samples <= 10_000, f"samples must be from 1 to 10000, not {self.samples}")
        require(self.batch_size >= 2, f"batch_size must be at least 2 (BatchNorm), not {self.batch_size}")
        between = 1 <= self.interrupted_at < self.steps
        require(between, f"interrupted_at must be from 1 to steps - 1 ({self.steps - 1}), not {self.interrupted_at}")
        for name in ("kills", "corruptions"):
            count = getattr(self, name)
            require(count is None or 1 <= count <= 10_000, f"{name} must be from 1 to 10000, not {count}")
        measure.require_budget(self.seconds, self.rounds)
        require(0 <= self.seed < 2**31, f"seed must be from 0 to 2147483647, not {self.seed}")
        require(0 <= self.seeds <= 100, f"seeds must be from 0 to 100, not {self.seeds}")
        for name in ("kill_bytes", "large_bytes"):
            require(2**12 <= getattr(self, name) <= 2**32, f"{name} must be from 4 KiB to 4 GiB")
        require(not self.folder or Path(self.folder).is_dir(), f"{self.folder} is not a folder: make it first")


def check_layout(config: Config, world_size: int) -> None:
    """BadInput if the images do not fill a batch on every rank."""
    needed = config.batch_size * world_size
    require(config.samples >= needed, f"samples must be at least {needed} (batch_size x ranks), not {config.samples}")


def predict(config: Config, ranks: int) -> dict[str, float]:
    """In closed form: samples read twice where the position is forgotten, and kills that do harm.

    A kill during a save in place is always too late for
    the old file and too early for the new one.
    """
    epoch = config.samples // (config.batch_size * ranks)
    return {
        "repeated_samples": config.interrupted_at % epoch * config.batch_size * ranks,
        "lost_share": 1.0,
    }


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Trial by trial; only rank 0 touches files."""
    same_bits_every_time(rank.device)
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(watched_folder(Path(config.folder) if config.folder else None))
        except OSError as e:
            raise BadInput(
                f"cannot write to {config.folder or tempfile.gettempdir()} ({e.strerror}): choose another --folder"
            ) from None
        for done, trial in enumerate(config.trials, start=1):
            (place := folder / trial).mkdir()
            if trial == "resume":
                yield from resume(config, rank, place)
            elif rank.rank == 0:
                with unpinned(rank):  # or a writer would share one core with who kills it
                    yield from TRIALS[trial](config, rank, place)
            rank.barrier()
            rank.progress(done, len(config.trials), trial)


def resume(config: Config, rank: Rank, folder: Path) -> Iterator[Record]:
    """The same training uninterrupted, resumed, and resumed with one part forgotten."""
    images = fashion.vectors(config.samples, rank.device)
    new = partial(Training, images, config.steps, config.batch_size, rank=rank)
    whole = new(config.seed)
    whole.train(config.interrupted_at)
    state = whole.state()
    if rank.rank == 0:
        save(folder, config.interrupted_at, state)
    whole.train(config.steps - config.interrupted_at)
    yield from _curve(whole, config.interrupted_at, run="uninterrupted", forgotten="nothing")
    end = whole.state()
    for forgotten in config.forgotten[:3] if config.smoke else config.forgotten:
        # Rank 0 reads for all: its disk need not be that of the others.
        step, state = rank.gather(load_latest(folder) if rank.rank == 0 else None)[0]
        resumed = new(config.seed)  # as a new process makes it
        said = refusal(resumed, without(state, forgotten))
        yield rank.record("refused", "1", said != "none", forgotten=forgotten, words=said[:300])
        resumed.resume(state, forgotten)
        yield rank.record("test_loss", "nats", resumed.test_loss(), run="resumed", forgotten=forgotten, at="resume")
        resumed.train(config.steps - step)
        yield from _curve(resumed, 0, run="resumed", forgotten=forgotten)
        yield from _compared(compare(whole, end, resumed, step), rank, forgotten)
    repeated = predict(config, rank.world_size)["repeated_samples"]
    yield rank.record("predicted_repeated_samples", "samples", repeated, kind="modelled", forgotten="data")
    for seed in range(config.seed + 1, config.seed + 1 + (1 if config.smoke else config.seeds)):
        other = new(seed)
        other.train(config.steps)
        yield from _curve(other, config.interrupted_at, run="other seed", forgotten="nothing", seed=seed)


def _curve(training: Training, step: int, **case: Any) -> Iterator[Record]:
    """Losses from `step` on, steps that the scaler left out, and the test loss at the end."""
    rank = training.rank
    yield rank.record("loss", "nats", training.losses[step:], **case)
    yield rank.record("skipped_steps", "steps", sum(s >= step for s in training.skipped), **case)
    yield rank.record("test_loss", "nats", training.test_loss(), **case, at="end")


def _compared(found: Comparison, rank: Rank, forgotten: Forgotten) -> Iterator[Record]:
    for part, equal in found.equal.items():
        yield rank.record("bitwise_equal", "1", equal, forgotten=forgotten, part=part)
    yield rank.record("equal_losses", "steps", found.equal_losses, forgotten=forgotten)
    yield rank.record("parameter_difference", "1", found.parameter_difference, forgotten=forgotten)
    yield rank.record("repeated_samples", "samples", found.repeated_samples, forgotten=forgotten)
    yield rank.record("missed_samples", "samples", found.missed_samples, forgotten=forgotten)


def save_time(config: Config, rank: Rank, folder: Path) -> Iterator[Record]:
    """Seconds of a save of a large state, and its size."""
    state = drills.marked(1, config.large_bytes // 8 if config.smoke else config.large_bytes)
    case = {"state": "large", "way": "full"}
    yield rank.record("save_s", "s", writers.save_seconds(folder, state, measure.rounds_of(config)), rank=0, **case)
    yield rank.record("checkpoint_bytes", "B", writers.newest_bytes(folder), rank=0, **case)


def kills(config: Config, rank: Rank, folder: Path) -> Iterator[Record]:
    """Writers killed while they save, for each way: what the next process finds. One sample per kill.

    `killed_while_saving` is 0 where the save had returned before its kill came.
    """
    for way in ("in place", "rename", "full"):
        place = folder / way
        place.mkdir()
        killed = drills.kills(WAYS[way], place, config.kills or MOST_KILLS, config.kill_bytes, config.seed)
        time = measure.Budget(config.seconds / 3, least=LEAST_KILLS, most=MOST_KILLS)
        found = list(measure.within(killed, 5 if config.smoke else config.kills or time))
        WAYS[way].write(place, 10**6, drills.marked(10**6, config.kill_bytes))
        case = {"way": way, "leftovers_after_next_save": len(drills.leftovers(place))}
        yield rank.record("kill_moment", "save times", [k.moment for k in found], rank=0, way=way)
        yield rank.record("killed_while_saving", "1", [k.saving for k in found], rank=0, way=way)
        yield rank.record("loadable", "1", [k.found is not None for k in found], rank=0, way=way)
        yield rank.record("lost", "1", [k.lost for k in found], rank=0, way=way)
        yield rank.record("leftovers", "files", [k.leftovers for k in found], rank=0, **case)
        share = predict(config, rank.world_size)["lost_share"] * (way == "in place")
        yield rank.record("predicted_lost_share", "1", share, kind="modelled", rank=0, way=way)


def corruptions(config: Config, rank: Rank, folder: Path) -> Iterator[Record]:
    """Damaged files by kind: how many each reader notices, takes without harm, or takes with a wrong state."""
    for step, state in enumerate(itertools.islice(states(config.seed), 2)):
        save(folder, step, state)
    found = list(corruption.trials(folder, config.corruptions, config.seed))
    counts = Counter((t.kind, reader, t.verdicts[reader]) for t in found for reader in corruption.READERS)
    for kind, reader, verdict in itertools.product(corruption.KINDS, corruption.READERS, corruption.VERDICTS):
        case = {"damage": kind, "reader": reader, "verdict": verdict}
        yield rank.record("files", "files", counts[kind, reader, verdict], rank=0, **case)
    for kind in corruption.KINDS:
        messages = sorted({t.message for t in found if t.kind == kind})
        fallback = [t.fallback == 0 for t in found if t.kind == kind]
        if fallback:
            yield rank.record("previous_used", "1", fallback, rank=0, damage=kind, messages=messages)


TRIALS: dict[str, Callable[[Config, Rank, Path], Iterator[Record]]] = {
    "save_time": save_time,
    "kills": kills,
    "corruptions": corruptions,
}


def answer(run: Records) -> Iterator[str]:
    """Is the resumed training the same, what a save takes, what a kill and damage lose: in sentences."""
    parts = run.where("bitwise_equal", forgotten="nothing")
    if parts:
        unequal = [r.case["part"] for r in parts if not r.value]
        ends = f"still DIFFERS in: {', '.join(unequal)}" if unequal else "is equal bit for bit"
        yield f"Against a training that was never stopped, one resumed with everything {ends}."
        silent = [r.case["forgotten"] for r in run.where("equal_losses") if r.case["forgotten"] != "nothing"]
        if silent:
            yield f"Without {' or without '.join(silent)} it goes on with another result, and no error."
    for r in run.where("checkpoint_bytes", state="large", way="full"):
        seconds = run.one("save_s", state="large", way="full").samples
        yield f"A checkpoint of {r.value / 1e6:.3g} MB takes {measure.estimate(seconds, 's')} to save durably."
    for way, name in (("in place", "onto the old file"), ("full", "as labs.checkpoints does")):
        if run.where("lost", way=way):
            yield (
                f"Given a kill during a save {name}, the last good checkpoint is gone in {lost_in(run, way)} "
                f"of the cases."
            )
    if files := run.where("files", verdict="silent"):
        n = {k: int(sum(r.value for r in files if r.case["reader"] == k)) for k in ("torch.load", "load")}
        tried = int(sum(r.value for r in run.where("files", reader="load")))
        yield (f"Of {tried} damaged files torch.load takes {n['torch.load']} for good, labs.checkpoints {n['load']}.")


def lost_in(run: Records, way: str) -> measure.Estimate:
    """Share, in %, of the kills during a save in this `way` after which the last good checkpoint is gone."""
    saving, lost = (run.one(m, way=way).samples for m in ("killed_while_saving", "lost"))
    found = [gone for gone, during in zip(lost, saving, strict=True) if during]
    if not found:
        return measure.Estimate(0.0, 0.0, 100.0, 0, "%")  # none came in time: nothing can be told
    return measure.proportion(round(sum(found)), len(found)).scaled(100, "%")
