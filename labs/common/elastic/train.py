"""Train a small CNN on n ranks; save every few steps; go on from there when a rank was killed.

    torchrun --nproc-per-node 2 --max-restarts 2 -m labs.elastic_train --folder runs/x --epochs 2
    kill -9 PID                      # of any rank: torchrun ends the others and starts all of them again

Started again with the same folder, it goes on where its last good checkpoint was taken. Ctrl-C stops all ranks.
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
    """Checkpoints and journals go here; made if it is not there."""
    epochs: int = 2
    """Passes over the images."""
    samples: int = 1024
    """Fashion-MNIST images that are used, the first ones."""
    batch_size: int = 32
    """Images per rank and step."""
    lr: float = 0.05
    """Learning rate at the start of SGD with momentum 0.9; it falls as a cosine."""
    save_every: int = 5
    """Steps between two saves."""
    seed: int = 0
    """Seed of the model, of the order of the images and of the dropout."""
    device: Literal["auto", "cpu", "cuda", "cuda-shared"] = "auto"
    """Where ranks run: GPUs if there are enough, otherwise CPU cores."""
    kill_rank: int = -1
    """Rank that kills itself, once, to try out what happens; -1: none does."""
    kill_at_step: int = 0
    """Step of the whole training before which it does."""
    kill_while: Literal["training", "saving", "machine"] = "training"
    """Or in the middle of the first save from that step on; then the rank must be 0, which saves. Machine: like
    training, but the torchrun that started the rank is killed with it."""

    def check(self) -> None:
        """BadInput for what cannot work. Not in __post_init__, whose errors tyro would print in a box of many lines."""
        require(self.epochs >= 1, f"epochs must be at least 1, not {self.epochs}")
        require(1 <= self.samples <= 10_000, f"samples must be between 1 and 10000, not {self.samples}")
        require(self.batch_size >= 1, f"batch_size must be at least 1, not {self.batch_size}")
        require(self.lr > 0, f"lr must be positive, not {self.lr}")
        require(0 <= self.seed < 2**31, f"seed must be from 0 to 2147483647, not {self.seed}")
        require(self.save_every >= 1, f"save_every must be at least 1, not {self.save_every}")
        require(self.kill_while != "saving" or self.kill_rank <= 0, "only rank 0 saves: give --kill-rank 0")


def parse(args: list[str] | None = None) -> Config:
    """The command line. Bad input is told once, not by every rank at every start; exit code 2."""
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
    """Whether this is rank 0, or none, of the first start."""
    return os.environ.get("RANK", "0") == "0" and not was_restarted()


def main(args: list[str] | None = None) -> None:
    """One rank of a job that torchrun, or another elastic agent, has started."""
    started = time.time()
    config = parse(args)
    require("RANK" in os.environ, "start it with torchrun --nproc-per-node 2 --max-restarts 2 -m labs.elastic_train")
    supervise.hold(os.environ["RANK"])
    try:
        journal = Journal(config.folder, int(os.environ["RANK"]), started)
    except OSError as e:
        raise BadInput(f"cannot write to {config.folder} ({e.strerror or e}): choose another --folder") from None
    from labs.common.elastic import loop  # imports torch: most of the time of a restart

    journal("imported")
    loop.train(config, journal)


def entry(args: list[str] | None = None) -> None:
    """`main`, with bad input as one line and exit code 2."""
    try:
        main(args)
    except BadInput as e:
        if is_spokesman():
            print(f"{PROG}: {e}", file=sys.stderr)
        else:
            time.sleep(10)  # until torchrun ends this rank, which it does when the one that printed is gone
        raise SystemExit(2) from None
