"""A training loop that resumes after restarts: what it saves, when, and how it restores that."""

from __future__ import annotations

import dataclasses
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DistributedSampler

from labs.common import models
from labs.common.checkpoints import load_latest, random_state, restore, save, training_state
from labs.common.data import fashion_mnist
from labs.common.elastic.faults import Fault
from labs.common.elastic.journal import Journal
from labs.kit import _compat, measure
from labs.kit.errors import require
from labs.kit.failure import LOST_PEER
from labs.kit.hardware import place
from labs.kit.rank import Rank, process_group, same_bits_every_time

_compat.preload_dynamo()


@dataclasses.dataclass
class Position:
    """Position in the data: the next step, and its epoch."""

    epoch: int = 0
    step: int = 0

    def advance(self, steps_per_epoch: int) -> None:
        """Move on by one step."""
        self.epoch, self.step = divmod(self.epoch * steps_per_epoch + self.step + 1, steps_per_epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the position as a checkpoint stores it."""
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume from a stored position."""
        self.epoch, self.step = state["epoch"], state["step"]


class Settings(dict):
    """Settings that a resumed run must not change: all except those in FREE, such as its length."""

    FREE = ("folder", "epochs", "save_every", "device", "kill_rank", "kill_at_step", "kill_while")

    def __init__(self, config: Any, world_size: int) -> None:
        values = {k: v for k, v in dataclasses.asdict(config).items() if k not in self.FREE}
        super().__init__(values, world_size=world_size)

    def state_dict(self) -> dict:
        """Return the settings as a checkpoint stores them."""
        return dict(self)

    def load_state_dict(self, state: dict) -> None:
        """Change nothing. BadInput if the checkpoint's settings differ."""
        for name, value in state.items():
            require(
                self[name] == value,
                f"the checkpoint is from a run with {name} {value}, not {self[name]}: "
                f"choose another --folder, or the same {name}",
            )


class Training:
    """Everything that a checkpoint stores, on one rank."""

    def __init__(self, config: Any, rank: Rank, steps_per_epoch: int) -> None:
        self.rank, self.folder = rank, config.folder
        torch.manual_seed(config.seed)
        module = nn.Sequential(nn.Dropout(0.1), models.ConvNet(channels=1, width=16)).to(rank.device)
        self.model = DistributedDataParallel(module)
        self.optimizer = SGD(self.model.parameters(), lr=config.lr, momentum=0.9)
        self.parts = {
            "scheduler": CosineAnnealingLR(self.optimizer, T_max=10 * steps_per_epoch),
            "data": Position(),
            "settings": Settings(config, rank.world_size),
        }
        self.position, self.scheduler = self.parts["data"], self.parts["scheduler"]
        seed = config.seed + 1 + rank.rank  # dropout differs between ranks
        for sow in (torch.manual_seed, np.random.seed, random.seed):  # all that a checkpoint stores
            sow(seed)

    def save(self, step: int) -> Path | None:
        """Save on rank 0 and return the path there; None on other ranks. Collective: gathers the random states."""
        randoms = self.rank.gather(random_state())
        if self.rank.rank != 0:
            return None
        return save(self.folder, step, training_state(self.model, self.optimizer, **self.parts, random=randoms))

    def resume(self) -> int:
        """Load the last good checkpoint on every rank; return its step, or 0 if there is none."""
        if (found := load_latest(self.folder)) is None:
            return 0
        restore(found[1], self.model, self.optimizer, **self.parts, rank=self.rank.rank)
        return found[0]


def train(config: Any, journal: Journal) -> None:
    """Join the process group, resume, train to the end. If a peer is lost, exit: the agent restarts all ranks."""
    placement = place(int(os.environ["LOCAL_WORLD_SIZE"]), config.device)
    with process_group(placement[int(os.environ["LOCAL_RANK"])]) as rank:
        same_bits_every_time(rank.device)  # restarted and uninterrupted runs must end equal
        journal("group")
        try:
            train_on(rank, config, journal)
        except RuntimeError as e:
            if not LOST_PEER.search(str(e)):
                raise
            journal("lost peer")
            _say(f"[rank {rank.rank}] another rank is gone")
            os._exit(1)  # destroying the process group would wait for that rank
        except OSError as e:  # usually a full disk; earlier checkpoints are intact
            _say(f"[rank {rank.rank}] stopped: {e}: make room, or choose another --folder")
            os._exit(1)


def train_on(rank: Rank, config: Any, journal: Journal) -> None:
    """Resume from the folder's last good checkpoint and train to the end, saving every `save_every` steps."""
    images, labels = _data(config.samples, rank.device)
    sampler = DistributedSampler(images, rank.world_size, rank.rank, seed=config.seed, drop_last=True)
    per_epoch = len(sampler) // config.batch_size
    require(per_epoch >= 1, f"samples must be at least {config.batch_size * rank.world_size} (batch_size x ranks)")
    training = Training(config, rank, per_epoch)
    journal("built")
    step = training.resume()
    journal("loaded", step=step)
    _say(f"[rank {rank.rank}] pid {os.getpid()}, start {journal.restart + 1}, from step {step}")
    fault, position = Fault(config.kill_rank, config.kill_at_step, config.kill_while, journal), training.position
    while (epoch := position.epoch) < config.epochs:
        sampler.set_epoch(epoch)
        order = list(sampler)  # depends only on seed and epoch, so a resumed run can skip what is done
        for first in range(position.step * config.batch_size, per_epoch * config.batch_size, config.batch_size):
            fault.before_step(step + 1)
            rows = order[first : first + config.batch_size]
            loss, seconds = _step(training, images[rows], labels[rows])
            step += 1
            position.advance(per_epoch)
            journal("step", step=step, loss=loss, seconds=seconds)
            if step % config.save_every == 0:
                _save(training, step, fault, journal)
        if rank.rank == 0:
            _say(f"epoch {epoch + 1} of {config.epochs}, step {step}: loss {loss:.4f}")
    _save(training, step, fault, journal)
    journal("finished", step=step)


def _say(line: str) -> None:
    print(line + "\n", end="", flush=True)  # a single write, because other ranks also print


def _step(training: Training, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Take one step; return the loss on this rank's batch and the step's seconds."""
    losses = []

    def step() -> None:
        training.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(training.model(x), y)
        loss.backward()
        training.optimizer.step()
        training.scheduler.step()
        losses.append(loss.item())

    seconds = measure.time_steps(step, 1, training.rank.device)[0]
    return losses[0], seconds


def _save(training: Training, step: int, fault: Fault, journal: Journal) -> None:
    with fault.saving(step):
        seconds = measure.time_steps(lambda: training.save(step), 1, training.rank.device)[0]
    journal("saved", step=step, seconds=seconds)


def _data(samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return images (N, 1, 28, 28) float32, roughly standardised, and labels (N,) int64."""
    data = fashion_mnist()
    images = torch.from_numpy(data.x_train[:samples]).float().div(255).sub(0.286).div(0.353).unsqueeze(1)
    return images.to(device), torch.from_numpy(data.y_train[:samples]).long().to(device)
