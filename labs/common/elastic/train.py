"""Train a small CNN on n ranks. Save every few steps, and resume from there if a rank is killed.

    torchrun --nproc-per-node 2 --max-restarts 2 -m labs.elastic_train --folder runs/x --epochs 2
    kill -9 PID                      # any rank: torchrun stops the others and restarts all of them

If you start it again with the same folder, it resumes from the last good checkpoint. Ctrl-C stops all ranks.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from labs.common.elastic.journal import Journal
from labs.kit import supervise
from labs.kit.errors import BadInput, require
from labs.kit.restart import was_restarted

PROG = "python -m labs.elastic_train"


@dataclass(frozen=True)
class Config:
    """What to train, and where to save it."""

    folder: Path
    """Folder for checkpoints and journals; made if it doesn't exist."""
    epochs: int = 2
    """Passes over the images."""
    samples: int = 1024
    """How many Fashion-MNIST images to use, counted from the first."""
    batch_size: int = 32
    """Images per rank and step."""
    lr: float = 0.05
    """Initial learning rate of SGD with momentum 0.9; it follows a cosine schedule."""
    save_every: int = 5
    """Steps between checkpoints."""
    seed: int = 0
    """Seed of the model, the order of the images, and dropout."""
    device: Literal["auto", "cpu", "cuda", "cuda-shared"] = "auto"
    """Where ranks run: GPUs if there are enough, otherwise CPU cores."""
    kill_rank: int = -1
    """Rank that kills itself once, to test a restart; -1: none."""
    kill_at_step: int = 0
    """Step, counted over all epochs, before which it does so."""
    kill_while: Literal["training", "saving", "machine"] = "training"
    """training: before that step. saving: during the first save at or after it; needs rank 0, which saves. machine:
    like training, but the torchrun that started the rank is also killed."""

    def check(self) -> None:
        """Raise BadInput for bad values. Not in __post_init__, whose errors tyro prints in a box of many lines."""
        require(self.epochs >= 1, f"epochs must be at least 1, not {self.epochs}")
        require(1 <= self.samples <= 10_000, f"samples must be between 1 and 10000, not {self.samples}")
        require(self.batch_size >= 1, f"batch_size must be at least 1, not {self.batch_size}")
        require(self.lr > 0, f"lr must be positive, not {self.lr}")
        require(0 <= self.seed < 2**31, f"seed must be from 0 to 2147483647, not {self.seed}")
        require(self.save_every >= 1, f"save_every must be at least 1, not {self.save_every}")
        require(self.kill_while != "saving" or self.kill_rank <= 0, "only rank 0 saves: give --kill-rank 0")


def parse(args: list[str] | None = None) -> Config:
    """Parse the command line. Only one rank reports bad input, at the first start; exit code 2."""
    import tyro

    config = tyro.cli(
        Config,
        args=args,
        prog=PROG,
        description=__doc__,
        config=(tyro.conf.FlagCreatePairsOff,),
        console_outputs=is_spokesman(),
    )
    config.check()
    return config


def is_spokesman() -> bool:
    """Return whether this is the first start's rank 0, or not a rank at all."""
    return os.environ.get("RANK", "0") == "0" and not was_restarted()


def main(args: list[str] | None = None) -> None:
    """Run one rank of a job that torchrun, or another elastic agent, has started."""
    started = time.time()
    config = parse(args)
    require("RANK" in os.environ, "start it with torchrun --nproc-per-node 2 --max-restarts 2 -m labs.elastic_train")
    supervise.hold(os.environ["RANK"])
    try:
        journal = Journal(config.folder, int(os.environ["RANK"]), started)
    except OSError as e:
        raise BadInput(f"cannot write to {config.folder} ({e.strerror or e}): choose another --folder") from None
    from labs.common.elastic import loop  # imports torch, which takes most of a restart

    journal("imported")
    loop.train(config, journal)


def entry(args: list[str] | None = None) -> None:
    """Run `main`, but report bad input in one line, with exit code 2."""
    try:
        main(args)
    except BadInput as e:
        if is_spokesman():
            print(f"{PROG}: {e}", file=sys.stderr)
        else:
            time.sleep(10)  # torchrun stops this rank once the one that printed has exited
        raise SystemExit(2) from None
