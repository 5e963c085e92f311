"""Fashion-MNIST as short vectors, for labs that train hundreds of small MLPs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labs.common.data import fashion_mnist


def vectors(samples: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the first `samples` training images and labels, and all test images and labels, on `device`.

    Images: means of 2 x 2 pixels, roughly standardised, shape (N, 196) float32; labels: (N,) int64, 0-9.
    """
    arrays, tensors = fashion_mnist(), []
    for images, labels in ((arrays.x_train, arrays.y_train), (arrays.x_test, arrays.y_test)):
        x = torch.from_numpy(images).float().div(255).sub(0.286).div(0.353).unsqueeze(1)
        tensors += [nn.functional.avg_pool2d(x, 2).flatten(1), torch.from_numpy(labels).long()]
    x, y, x_test, y_test = (t.to(device) for t in tensors)
    return x[:samples], y[:samples], x_test, y_test
