"""A data loader that resumes in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from labs.kit.errors import require


class ResumableLoader:
    """Loads shuffled batches for one rank, and resumes where a checkpoint was taken, even in mid-epoch.

    The order depends only on `seed` and the epoch, so the position is two numbers: the epoch, and how many of its
    samples all ranks together have used. So a different number of ranks can resume there. Samples that don't fill a
    batch on every rank are dropped. If a dataset draws random numbers in DataLoader workers, it must derive them from
    the item's index, because a resumed run starts new workers.
    """

    def __init__(
        self, dataset: Dataset, batch_size: int, *, seed: int = 0, rank: int = 0, world_size: int = 1, **options: Any
    ) -> None:
        """Take `batch_size` per rank; `options` go to DataLoader, such as `num_workers`."""
        self.dataset, self.batch_size, self.options = dataset, batch_size, options
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.epoch = self.samples = 0
        require(len(self) >= 1, f"{len(dataset)} samples do not fill one batch of {batch_size} on {world_size} ranks")

    def __len__(self) -> int:
        """Return the number of batches per rank in a whole epoch."""
        return len(self.dataset) // (self.batch_size * self.world_size)

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of this epoch; the next call yields the next epoch."""
        # DataLoader draws a seed for its workers. From torch's global generator, a resumed run would draw once more.
        own = torch.Generator().manual_seed(self.seed + self.epoch)
        for batch in DataLoader(self.dataset, batch_sampler=self.rows(), generator=own, **self.options):
            # Count batches as they are yielded, because workers prefetch.
            self.samples += self.batch_size * self.world_size
            yield batch
        self.epoch, self.samples = self.epoch + 1, 0

    def rows(self) -> list[list[int]]:
        """Return this rank's sample indices in each batch that is left of this epoch."""
        order = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(self.seed + self.epoch))
        rest, step = order[self.samples :].tolist(), self.batch_size * self.world_size
        return [rest[i + self.rank : i + step : self.world_size] for i in range(0, len(rest) - step + 1, step)]

    def state_dict(self) -> dict[str, int]:
        """Return the position; a batch that was yielded counts as trained on."""
        return {"epoch": self.epoch, "samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume from a position; takes effect with the next iterator."""
        self.epoch, self.samples = state["epoch"], state["samples"]
