"""Where training is in its data: the epoch, and the samples of it that were trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from labs.kit.errors import require


class ResumableLoader:
    """Shuffled batches for each rank that go on where a checkpoint was taken, in the middle of an epoch, too.

    The order depends on `seed` and the epoch only, so that two numbers are the whole position. They count samples
    of all ranks: another number of ranks goes on at the same place. What does not fill a batch on every rank is
    left out. With DataLoader workers, a dataset that draws random numbers must draw them by item: its workers begin
    anew.
    """

    def __init__(
        self, dataset: Dataset, batch_size: int, *, seed: int = 0, rank: int = 0, world_size: int = 1, **options: Any
    ) -> None:
        """`batch_size` is that of one rank; `options` are DataLoader's own, as `num_workers`."""
        self.dataset, self.batch_size, self.options = dataset, batch_size, options
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.epoch = self.samples = 0
        require(len(self) >= 1, f"{len(dataset)} samples do not fill one batch of {batch_size} on {world_size} ranks")

    def __len__(self) -> int:
        """Batches of a whole epoch, per rank."""
        return len(self.dataset) // (self.batch_size * self.world_size)

    def __iter__(self) -> Iterator[Any]:
        """The rest of this epoch; the next call is the next epoch."""
        # DataLoader draws a seed for its workers. From torch's global state, a resumed run would draw once more.
        own = torch.Generator().manual_seed(self.seed + self.epoch)
        for batch in DataLoader(self.dataset, batch_sampler=self.rows(), generator=own, **self.options):
            # Counted when it is handed over: workers read ahead of what is trained on.
            self.samples += self.batch_size * self.world_size
            yield batch
        self.epoch, self.samples = self.epoch + 1, 0

    def rows(self) -> list[list[int]]:
        """This rank's items of each batch that is left of this epoch."""
        order = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(self.seed + self.epoch))
        rest, step = order[self.samples :].tolist(), self.batch_size * self.world_size
        return [rest[i + self.rank : i + step : self.world_size] for i in range(0, len(rest) - step + 1, step)]

    def state_dict(self) -> dict[str, int]:
        """The position: a batch that was handed over counts as trained on."""
        return {"epoch": self.epoch, "samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a position; a new iterator is needed."""
        self.epoch, self.samples = state["epoch"], state["samples"]
