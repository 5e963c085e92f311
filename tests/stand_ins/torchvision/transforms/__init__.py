"""Transformations of one image, a uint8 tensor of channels x height x width."""

import math

import torch


class Compose:
    """One after the other."""

    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, image):
        for transform in self.transforms:
            image = transform(image)
        return image


class ToTensor:
    """From 0-255 to 0-1."""

    def __call__(self, image):
        return image.float() / 255


class Normalize:
    """By mean and standard deviation of each channel."""

    def __init__(self, mean, std):
        self.mean, self.std = (torch.tensor(v).view(-1, 1, 1) for v in (mean, std))

    def __call__(self, image):
        return (image - self.mean) / self.std


class Resize:
    """To a square, by the nearest pixel."""

    def __init__(self, size):
        self.size = size

    def __call__(self, image):
        return torch.nn.functional.interpolate(image[None], size=(self.size, self.size))[0]


class RandomCrop:
    """Of an image with a black border."""

    def __init__(self, size, padding=0):
        self.size, self.padding = size, padding

    def __call__(self, image):
        image = torch.nn.functional.pad(image, [self.padding] * 4)
        top, left = (int(torch.randint(n - self.size + 1, ())) for n in image.shape[1:])
        return image[:, top : top + self.size, left : left + self.size]


class RandomHorizontalFlip:
    """Each second image."""

    def __call__(self, image):
        return image.flip(-1) if torch.rand(()) < 0.5 else image


class RandomRotation:
    """By up to so many degrees."""

    def __init__(self, degrees):
        self.degrees = degrees

    def __call__(self, image):
        angle = math.radians(float(torch.empty(()).uniform_(-self.degrees, self.degrees)))
        turn = torch.tensor([[math.cos(angle), -math.sin(angle), 0], [math.sin(angle), math.cos(angle), 0]])
        grid = torch.nn.functional.affine_grid(turn[None], [1, *image.shape], align_corners=False)
        turned = torch.nn.functional.grid_sample(image[None].float(), grid, align_corners=False)[0]
        return turned.to(image.dtype)
