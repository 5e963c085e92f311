"""Small facts about tensors."""

from torch import Tensor


def nbytes(*tensors: Tensor) -> int:
    """Bytes of all elements."""
    return sum(t.numel() * t.element_size() for t in tensors)
