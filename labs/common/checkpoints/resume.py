"""What a restart changed, compared with the training that was never stopped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from labs.common.checkpoints.state import restore
from labs.common.checkpoints.training import Forgotten, Training
from labs.kit.errors import BadInput


def without(state: dict[str, Any], forgotten: Forgotten) -> dict[str, Any]:
    """`state` as it is saved by code that forgets a part."""
    if forgotten == "buffers":
        kept = {name: x for name, x in state["model"].items() if "running" not in name and "tracked" not in name}
        return {**state, "model": kept}
    return {name: part for name, part in state.items() if name != forgotten}


def refusal(training: Training, state: dict[str, Any]) -> str:
    """How `restore` refuses `state`, in one line; "none" if it takes it."""
    try:
        restore(state, **training.parts, rank=training.rank.rank)
    except (BadInput, RuntimeError) as e:
        return " ".join(str(e).split())
    return "none"


PARTS = ("losses", "model", "optimizer", "scheduler", "scaler", "data", "random")


@dataclass(frozen=True)
class Comparison:
    """A resumed training beside the one that was never stopped, over all ranks."""

    equal: dict[str, bool]
    """Whether each of PARTS ended the same, bit for bit."""
    equal_losses: int
    """Steps after the restart until the first loss that differs."""
    parameter_difference: float
    """Of rank 0's parameters at the end, as a share of their norm."""
    repeated_samples: int
    """Images read once more in the same epoch."""
    missed_samples: int
    """Images that the uninterrupted training read, and this one never."""


def compare(whole: Training, end: dict[str, Any], resumed: Training, step: int) -> Comparison:
    """`end` is the state of `whole` at its end; `resumed` went on after `step` steps. A collective."""
    rank, losses = whole.rank, whole.losses[step:]
    differing = {re.split(r"[.\[]", name)[0] for name in differences(end, resumed.state())}
    differing |= {"losses"} if resumed.losses != losses else set()
    alike = [a == b for a, b in zip(resumed.losses, losses, strict=True)]
    a, b = (torch.cat([p.detach().flatten() for p in t.model.parameters()]) for t in (resumed, whole))
    return Comparison(
        {part: rank.agree(part not in differing) for part in PARTS},
        [*alike, False].index(False),
        ((a - b).norm() / b.norm()).item(),
        *repeated_and_missed(_all_read(whole), _all_read(resumed), step),
    )


def _all_read(training: Training) -> list[list[tuple[int, int]]]:
    """(epoch, image) of each step, of all ranks."""
    return [list(chain(*ranks)) for ranks in zip(*training.rank.gather(training.read), strict=True)]


def repeated_and_missed(whole: list[list], resumed: list[list], step: int) -> tuple[int, int]:
    """How many images were read once more in the same epoch, and how many never, because of a restart after `step`.

    `whole` and `resumed` hold (epoch, image) of each step, of an uninterrupted training and of the resumed part.
    """
    expected, read = (Counter(chain(*steps)) for steps in (whole, whole[:step] + resumed))
    return sum(n - 1 for n in read.values()), (expected - read).total()


def differences(a: Any, b: Any, name: str = "") -> Iterator[str]:
    """Names of the leaves of two states that are not the same, bit for bit."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        for key in a:
            yield from differences(a[key], b[key], f"{name}.{key}" if name else str(key))
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from differences(x, y, f"{name}[{i}]")
    elif not same(a, b):
        yield name


def same(a: Any, b: Any) -> bool:
    """Whether two leaves are equal bit for bit: NaN equals itself, 0 is not -0 and not 0.0."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = (a.shape, a.dtype) == (b.shape, b.dtype)
        return alike and torch.equal(*(t.detach().cpu().contiguous().flatten().view(torch.uint8) for t in (a, b)))
    return type(a) is type(b) and (repr(a) == repr(b))
