"""How states that exercises of notebook 05 save are compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from labs.kit.check import error_text


def leaves(value: Any, path: str = "state") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of all that is no dict, list or tuple."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from leaves(item, f"{path}[{i}]")
    else:
        yield path, value


def same(a: Any, b: Any) -> bool:
    """True if both hold the same, bit for bit."""
    return difference(a, b) is None


def difference(a: Any, b: Any) -> str | None:
    """The path of the first leaf of b that a does not have, or has with another value; None if there is none."""
    own, wanted = dict(leaves(a)), dict(leaves(b))
    return next(
        (path for path in wanted if path not in own or not _equal(own[path], wanted[path])),
        next((path for path in own if path not in wanted), None),
    )


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:
        return False


@contextmanager
def one_thread() -> Iterator[None]:
    """Small operations run no faster on many threads, and a forked process must not wait for threads it has not got."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def described(error: BaseException) -> str:
    """The error in a few words."""
    first = next(iter(error_text(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}"[:160].rstrip(":. ")
