"""The editable round of notebook 02: do workers and ranks draw the same random numbers?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from labs.common.loading.feed import any_number_of_workers
from labs.kit.launch import run_on_ranks


def compare_draws(epoch: Callable[[], list[float]], ranks: int) -> None:
    """Run `epoch` on `ranks` ranks, each with DataLoader workers of its own, and tell what `tell_draws` tells."""
    tell_draws(run_on_ranks(_draws, ranks, epoch))


def _draws(epoch: Callable[[], list[float]]) -> list[float]:
    with any_number_of_workers():
        return epoch()


def tell_draws(draws_by_rank: Sequence[Sequence[float]]) -> None:
    """Print how many of the numbers that the ranks' workers drew come more than once, in a rank and across ranks."""
    for rank, draws in enumerate(draws_by_rank):
        print(f"rank {rank}: {len(draws)} random numbers, {_again(draws)} of them drawn before on this rank")
    everything = list(chain(*draws_by_rank))
    across = _again(everything) - sum(map(_again, draws_by_rank))
    print(f"all ranks: {across} drawn by another rank, too")
    if again := _again(everything):
        share = 100 * again / len(everything)
        print(f"So {share:.0f} % of the augmentation is wasted: the same numbers again, for other images.")
    else:
        print("So no two images are changed by the same number.")


def _again(draws: Sequence[float]) -> int:
    return len(draws) - len(set(draws))
