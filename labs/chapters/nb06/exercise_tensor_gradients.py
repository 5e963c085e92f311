"""Part of the checker of exercise 06.4: the ranks' gradients against one process's, and what makes them differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

Finding = tuple[str, str]
Gradients = Mapping[str, Tensor]
SHARED = ("up.weight", "up.bias", "down.weight")
"""What ranks share out; down.bias is on every rank."""
F_AND_G = "forward: identity at the input, sum at the output; backward: sum at the input, identity at the output"


def gradient_faults(found: Sequence[Gradients], want: Gradients, old_sum: bool) -> Iterator[Finding]:
    """Nothing if the shares add up to one process's gradients, and down.bias and x have theirs on every rank.

    `old_sum`: torch.distributed.nn was used.
    """
    n = len(found)
    ratios = [ratio(sum(r[name] for r in found), want[name]) for name in SHARED]
    if all(near(r, n) for r in ratios):
        tool = "torch.distributed.nn's all_reduce, made for ranks with a loss each," if old_sum else "your sum"
        yield (
            f"the gradients of both layers are {n} times too large: {tool} sums in backward as well",
            "of out = a + b each part has the gradient of out, and every rank has that already: nothing to send",
        )
    if near(ratios[2], 1) and None in ratios[:2]:
        yield ("down.weight has its gradient, and up has not: the ranks sum the gradient of hidden features in "
               "backward, of which each has others", "the sum belongs where every rank has the same: at x")  # fmt: skip
    for name, r in zip(SHARED, ratios, strict=True):
        if not near(r, 1):
            yield f"the gradient of {name}, all ranks' shares together, is {_times(r)} that of one process", F_AND_G
    for rank, own in enumerate(found):
        r = ratio(own["down.bias"], want["down.bias"])
        if not near(r, 1):
            yield (f"on rank {rank} the gradient of down.bias is {_times(r)} that of one process: every rank has all "
                   "of this bias, and has to move it by all of its gradient",
                   "add it on every rank, after the sum")  # fmt: skip
    yield from _of_input([r["x"] for r in found], want["x"])


def _of_input(got: Sequence[Tensor], want: Tensor) -> Iterator[Finding]:
    n = len(got)
    if near(ratio(sum(got), want), 1) and not near(ratio(got[0], want), 1 / n):
        off = ((got[0] - want).norm() / want.norm()).item()
        yield ("each rank has a part of x's gradient, that of its own hidden features (rank 0's is "
               f"{off:.0%} of its size off the whole): the layers before would get other gradients on every rank",
               "all-reduce the gradient at the input: a torch.autograd.Function, in forward the identity, in backward "
               "the sum over the ranks")  # fmt: skip
    for rank, g in enumerate(got):
        r = ratio(g, want)
        if not near(r, 1):
            yield (f"x's gradient on rank {rank} is {_times(r)} that of one process",
                   "the sum over the ranks, once, and not their mean: each has another part of it")  # fmt: skip


def ratio(got: Tensor, want: Tensor) -> float | None:
    """By how much `got` is larger; None if it is no multiple."""
    scale = ((got * want).sum() / want.square().sum()).item()
    return scale if (got - scale * want).norm() <= 1e-4 * want.norm() else None


def near(r: float | None, value: float) -> bool:
    """Whether a ratio is this value."""
    return r is not None and abs(r - value) < 1e-3


def _times(r: float | None) -> str:
    return "not a multiple of" if r is None else f"{r:.3g} times"
