"""Tensor utilities."""

from torch import Tensor


def nbytes(*tensors: Tensor) -> int:
    """Return the bytes of all elements."""
    return sum(t.numel() * t.element_size() for t in tensors)
