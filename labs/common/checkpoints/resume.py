"""Compare two training states bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def differences(a: Any, b: Any, name: str = "") -> Iterator[str]:
    """Yield the names of the leaves that differ between two states, bit for bit."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        for key in a:
            yield from differences(a[key], b[key], f"{name}.{key}" if name else str(key))
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from differences(x, y, f"{name}[{i}]")
    elif not same(a, b):
        yield name


def same(a: Any, b: Any) -> bool:
    """Return whether two leaves are equal bit for bit: NaN equals itself, but 0.0 equals neither -0.0 nor 0."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = (a.shape, a.dtype) == (b.shape, b.dtype)
        return alike and torch.equal(*(t.detach().cpu().contiguous().flatten().view(torch.uint8) for t in (a, b)))
    return type(a) is type(b) and (repr(a) == repr(b))
