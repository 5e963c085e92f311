"""Stands in for torchvision where it is not installed: what public training scripts call of it, on made-up images."""

from torchvision import datasets, models, transforms, utils

__all__ = ["datasets", "models", "transforms", "utils"]
