"""The editable round of notebook 03: which images did the ranks read, and in which order?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labs.common.data import fashion_mnist


def images(count: int = 256) -> tuple[Tensor, Tensor]:
    """The first images of Fashion-MNIST, (count, 784) float32 in [0, 1], and their labels, (count,) int64."""
    data = fashion_mnist()
    x, y = torch.from_numpy(data.x_train[:count]), torch.from_numpy(data.y_train[:count])
    return x.flatten(1).float().div(255), y.long()


def tell_orders(read_by_rank: Sequence[Sequence[Sequence[int]]], count: int) -> None:
    """Print how the ranks shared `count` images in each epoch, and how many epochs had an order of their own.

    `read_by_rank[rank][epoch]` are the images that a rank read, in order.
    """
    epochs = list(zip(*read_by_rank, strict=True))  # [epoch][rank]
    for number, ranks in enumerate(epochs):
        read = [i for rows in ranks for i in rows]
        shares = " + ".join(str(len(rows)) for rows in ranks)
        print(
            f"epoch {number}: {shares} images read, {len(set(read))} of {count} different; "
            f"rank 0 begins with {', '.join(map(str, ranks[0][:5]))}"
        )
    orders = len({str(ranks) for ranks in epochs})
    if orders == len(epochs):
        print(f"{orders} orders in {len(epochs)} epochs: every epoch is shuffled anew.")
    else:
        print(
            f"{orders} order{'s' if orders > 1 else ''} in {len(epochs)} epochs: "
            "the model meets the same batches again, in the same order."
        )
