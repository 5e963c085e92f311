"""Random crop, flip and colour jitter: for one image with Pillow, as a worker does it, and for a batch with torch.

All draws come from torch's global generator, which a DataLoader seeds anew in every worker and epoch.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageEnhance
from torch import Tensor
from torch.utils.data import Dataset

JITTER = 0.4  # brightness, contrast and saturation are changed by a factor from 0.6 to 1.4


def uniform(low: float, high: float) -> float:
    """One number from `low` to `high`."""
    return low + (high - low) * torch.rand(()).item()


def read(path: Path | str) -> Image.Image:
    """Open and decode: an RGB image of the file's own size."""
    with Image.open(path) as image:
        return image.convert("RGB")


def random_crop(image: Image.Image, side: int = 224) -> Image.Image:
    """A random part of the image, from 35 % of its area up to all of it, resized to (side, side)."""
    scale = uniform(0.35, 1.0) ** 0.5
    width, height = scale * image.width, scale * image.height
    x, y = uniform(0, image.width - width), uniform(0, image.height - height)
    return image.resize((side, side), Image.Resampling.BILINEAR, box=(x, y, x + width, y + height))


def random_flip(image: Image.Image) -> Image.Image:
    """Left and right exchanged, half of the time."""
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if uniform(0, 1) < 0.5 else image


def colour_jitter(image: Image.Image) -> Image.Image:
    """Brightness, contrast and saturation, each times a random factor. Every step is a pass over all pixels."""
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        image = enhance(image).enhance(uniform(1 - JITTER, 1 + JITTER))
    return image


def to_tensor(image: Image.Image) -> Tensor:
    """(3, height, width) uint8."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


STAGES = {
    "decode": read,
    "crop and resize": random_crop,
    "flip": random_flip,
    "colour jitter": colour_jitter,
    "to a tensor": to_tensor,
}
"""What happens to one image, in this order; each takes what the one before returns."""


def jitter_batch(images: Tensor) -> Tensor:
    """Flip and colour jitter for a whole batch, on its own device: (n, 3, h, w) uint8 -> float32 from 0 to 1."""
    n, like = len(images), {"device": images.device}
    brightness, contrast, saturation = 1 + JITTER * (2 * torch.rand(3, n, 1, 1, 1, **like) - 1)
    x = torch.where(torch.rand(n, 1, 1, 1, **like) < 0.5, images.flip(3), images) / 255 * brightness
    mean = x.mean((1, 2, 3), keepdim=True)
    x = mean + contrast * (x - mean)
    grey = x.mean(1, keepdim=True)  # unweighted; Pillow weighs green most
    return (grey + saturation * (x - grey)).clamp(0, 1)


class AugmentedJpegs(Dataset):
    """JPEG files, decoded and augmented: (3, 224, 224) uint8, label."""

    def __init__(self, paths, labels) -> None:
        # arrays, not lists: workers copy no Python object when they read
        self.paths, self.labels = np.array([os.fspath(p) for p in paths]), np.asarray(labels)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = random_flip(random_crop(read(self.paths[index])))
        return to_tensor(colour_jitter(image)), int(self.labels[index])
