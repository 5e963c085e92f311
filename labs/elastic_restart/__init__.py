"""A rank is killed in the middle of an epoch: what is lost, when does training resume, is the result the same?

    python -m labs.elastic_restart --nproc 1
    python -m labs.elastic_restart --nproc 1 --kill-at-step 100 --epochs 8 --save-every 20

About 20 s on 2 CPU cores. The lab itself is one process; it starts the two ranks of labs/common/elastic/train.py, which
you can also start, and kill, by hand:

    torchrun --nproc-per-node 2 --max-restarts 2 -m labs.elastic_train --folder runs/x
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from annotated_types import Ge, Le, Lt

from labs.common.checkpoints import load_latest
from labs.common.checkpoints.resume import differences
from labs.common.elastic.journal import History
from labs.elastic_restart.agent import Agent, elastic_agent
from labs.kit.errors import require
from labs.kit.hardware import require_shareable
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

RANKS = 2


class Run(NamedTuple):
    """One training run: what happens to it, and how its ranks are started."""

    run: str
    start: str
    kill_rank: int = -1
    kill_while: str = "training"


RUNS = {
    "uninterrupted": Run("uninterrupted", "fork server"),
    "killed": Run("killed", "fork server", 1),
    "killed while saving": Run("killed while saving", "fork server", 0, "saving"),
    "killed under torchrun": Run("killed", "torchrun", 1),  # its ranks are fresh interpreters, as on a cluster
}


@dataclass(frozen=True)
class Config:
    """The training run, and when a rank dies."""

    runs: tuple[str, ...] = tuple(RUNS)
    """What to run; the uninterrupted run comes first, and the others are compared with it."""
    epochs: int = 2
    """Passes over the images."""
    samples: Annotated[int, Le(10_000)] = 1024
    """How many Fashion-MNIST images to use."""
    batch_size: int = 32
    """Images per rank and step."""
    save_every: int = 5
    """Steps between checkpoints."""
    kill_at_step: int = 23
    """Rank 1 is killed before this step; rank 0 during the first save at or after it."""
    seed: Annotated[int, Ge(0), Lt(2**31)] = 0
    """Seed of the training run."""
    smoke: bool = False
    """Skip the run with fresh interpreters, which takes most of the time."""

    def __post_init__(self) -> None:
        require(set(self.runs) <= set(RUNS), f"runs must be of {', '.join(RUNS)}")
        for name in ("epochs", "batch_size", "save_every"):  # before `steps` divides by them
            require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}")
        require(self.runs[:1] == ("uninterrupted",), "runs must begin with uninterrupted")
        steps = self.steps
        require(steps >= 1, f"samples must be at least {RANKS * self.batch_size} (batch_size x {RANKS} ranks)")
        require(1 <= self.kill_at_step <= steps, f"kill_at_step must be between 1 and {steps}, not {self.kill_at_step}")

    @property
    def steps(self) -> int:
        """Optimizer steps in the whole run."""
        return self.epochs * (self.samples // RANKS // self.batch_size)


def predict(config: Config, while_: str = "training") -> dict[str, int]:
    """Predict the step that training resumes from, and how many steps are repeated."""
    done, every = config.kill_at_step - 1, config.save_every
    if while_ == "saving":  # every `save_every` steps, and at the end
        done = min(math.ceil(config.kill_at_step / every) * every, config.steps)
    resumed = (done - 1 if while_ == "saving" else done) // every * every
    return {"resumed_at_step": resumed, "steps_redone": done - resumed}


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield the records of each run in turn, then how many processes and folders are left."""
    if rank.rank != 0:
        return
    if rank.device.type == "cuda":  # this process also uses that GPU
        require_shareable({rank.device.index})
    histories, states = [], []
    short = config.smoke and config.runs == tuple(RUNS)
    runs = [RUNS[name] for name in config.runs if not (short and RUNS[name].start == "torchrun")]
    with elastic_agent(rank) as agent:
        for done, which in enumerate(runs, start=1):
            name = f"{which.run}, {which.start}".replace(" ", "-").replace(",", "")
            histories.append(
                agent.train(name, _arguments(which, config, rank), forked=which.start != "torchrun", ranks=RANKS)
            )
            states.append(_last_state(agent, name))
            yield from _outcome(which, histories[-1], not [*differences(states[-1], states[0])], rank)
            if which.kill_rank >= 0:
                yield from _restart(which, histories[-1], rank)
            rank.progress(done, len(runs), name)
    alive = [pid for history in histories for pid in history.pids if _is_alive(pid)]
    yield rank.record("leftovers", "1", len(alive), rank=0, what="processes")
    yield rank.record("leftovers", "1", float(agent.root.exists()), rank=0, what="folders")


def _arguments(which: Run, config: Config, rank: Rank) -> list[str]:
    values = {
        "epochs": config.epochs,
        "samples": config.samples,
        "batch-size": config.batch_size,
        "seed": config.seed,
        "save-every": config.save_every,
        "kill-rank": which.kill_rank,
        "kill-at-step": config.kill_at_step,
        "kill-while": which.kill_while,
        "device": "cpu" if rank.device.type == "cpu" else "auto",
    }
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def _last_state(agent: Agent, name: str) -> dict[str, Any]:
    found = load_latest(agent.folder(name))
    assert found is not None, "a training that ended without an error has saved"
    return found[1]


def _outcome(which: Run, history: History, equal: bool, rank: Rank) -> Iterator[Record]:
    case = {"run": which.run, "start": which.start}
    losses = history.losses()
    yield rank.record("loss", "nats", losses, rank=0, **case)
    yield rank.record("final_loss", "nats", losses[-1], rank=0, **case)
    yield rank.record("state_equal", "1", float(equal), rank=0, **case)
    yield rank.record("restarts", "1", history.restarts, rank=0, **case)
    yield rank.record("processes", "1", len(history.pids), rank=0, **case)
    yield rank.record("step_s", "s", [e["seconds"] for e in history.of("step", rank=0)], rank=0, **case)
    yield rank.record("save_s", "s", [e["seconds"] for e in history.of("saved", rank=0)], rank=0, **case)


def _restart(which: Run, history: History, rank: Rank) -> Iterator[Record]:
    case = {"run": which.run, "start": which.start}
    killed, resumed = history.of("killed")[0]["step"], history.of("loaded", restart=1)[0]["step"]
    yield rank.record("killed_at_step", "steps", killed, rank=0, **case)
    yield rank.record("resumed_at_step", "steps", resumed, rank=0, **case)
    yield rank.record("steps_redone", "steps", history.steps_redone(), rank=0, **case)
    phases = history.phases()
    yield rank.record("restart_s", "s", sum(phases.values()), rank=0, **case)
    for phase, seconds in phases.items():
        yield rank.record("phase_s", "s", seconds, rank=0, phase=phase, **case)
    yield rank.record("redo_s", "s", history.redo_s(), rank=0, **case)


def category(records: Records) -> str:
    """Return the longest phase of a restart under torchrun."""
    return max(records.where("phase_s", start="torchrun"), key=lambda r: r.value).case["phase"]


def answer(run: Records) -> Iterator[str]:
    """Yield a sentence per restart (duration, repeated steps, is the result the same), then one on leftovers."""
    for whole in run.where("restart_s"):
        case = {k: whole.case[k] for k in ("run", "start")}
        redone, killed = (int(run.one(m, **case).value) for m in ("steps_redone", "killed_at_step"))
        end = "equal bit for bit to" if run.one("state_equal", **case).value else "DIFFERENT from"
        slow = max(run.where("phase_s", **case), key=lambda r: r.value)
        yield (
            f"{case['run'].capitalize()} at step {killed} ({case['start']}): {whole.value:.2f} s from the "
            f"kill to the next "
            f"step, most of it for: {slow.case['phase']} ({slow.value:.2f} s); {redone} step(s) done twice; "
            f"model and "
            f"optimizer at the end are {end} those of the uninterrupted run."
        )
    left = sum(r.value for r in run.where("leftovers"))
    yield "One restart each: an order of magnitude. " + (
        f"{left:.0f} processes or folders are LEFT." if left else "No process and no folder is left."
    )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # it has ended, or its pid is now another user's
        return False
    return True
