"""States that exercises of notebook 05 save, and how two of them are compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from labs.kit.check import Mistake, error_text


def a_state(step: int) -> dict[str, Any]:
    """What a training of 12,000 parameters saves at `step`: about 100 kB of tensors, numbers and text."""
    draw = torch.Generator().manual_seed(step)
    weight = torch.randn(96, 128, generator=draw)
    moments = {"step": torch.tensor(float(step)), "exp_avg": weight / 10}
    return {
        "model": {"weight": weight, "bias": torch.randn(96, generator=draw).bfloat16(), "seen": torch.tensor(step)},
        "optimizer": {"state": {0: moments}, "param_groups": [{"lr": 1e-3 / (step + 1), "betas": (0.9, 0.999)}]},
        "random": draw.get_state(),
        "run": {"name": "baseline", "epoch": step // 4, "best_loss": None},
        "step": 4 * step,  # of batches, of which the training makes a step of four
    }


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


def check_same(loaded: Any, step: int, when: str) -> None:
    """Mistake unless `loaded` is (step, a_state(step))."""
    if loaded is None:
        raise Mistake(f"{when} load() gives None", "return (step, state)")
    if not isinstance(loaded, (tuple, list)) or len(loaded) != 2:
        raise Mistake(f"{when} load() gives a {type(loaded).__name__}, not two values", "return (step, state)")
    if loaded[0] != step:
        raise Mistake(f"{when} load() gives {loaded[0]!r:.40} as its step, not {step}", "return (step, state)")
    if path := difference(loaded[1], a_state(step)):
        raise Mistake(f"{when} {path} is not what was saved", "dtypes, tuples and nested dicts come back as they were")
