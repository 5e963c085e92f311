"""Part of the checker of exercise 06.4: what a wrong output is, by computing what the usual mistakes would give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, relu

Finding = tuple[str, str]


def output_faults(
    got: Sequence[Tensor], problem: tuple[Tensor, nn.Linear, nn.Linear], sends: bool
) -> Iterator[Finding]:
    """Nothing if all ranks have the whole output; `sends`: forward has a collective."""
    with torch.no_grad():
        x, up, down = problem
        want = down(relu(up(x)))
        if all(_close(g, want) for g in got):
            return
        yield from _bias_on_one_rank(got, want, down.bias)
        yield from _parts(got, want, down.bias, sends)
        for wrong, what, hint in _known(x, up, down, len(got)):
            if all(_close(g, wrong) for g in got):
                yield what, hint
        yield (f"the output is {((got[0] - want).norm() / want.norm()).item():.2g} of its size off that of one process",
               "each rank: relu(linear(x, up.weight[mine], up.bias[mine])), then linear with down.weight[:, mine], "
               "the sum, the bias")  # fmt: skip


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


ONCE = "add it after the sum: linear(hidden, down.weight[:, mine]) without a bias, all-reduce, then + down.bias"


def _bias_on_one_rank(got: Sequence[Tensor], want: Tensor, bias: Tensor) -> Iterator[Finding]:
    right = [rank for rank, g in enumerate(got) if _close(g, want)]
    without = [rank for rank, g in enumerate(got) if _close(g, want - bias)]
    if right and len(right) + len(without) == len(got):
        yield (f"rank {right[0]} adds down.bias to the sum, and rank {without[0]} does not: their outputs differ",
               "on every rank, after the sum")  # fmt: skip


def _parts(got: Sequence[Tensor], want: Tensor, bias: Tensor, sends: bool) -> Iterator[Finding]:
    """The ranks' outputs differ."""
    n = len(got)
    if all(_close(g, got[0]) for g in got):
        return
    if any(_close(g, want) for g in got):
        whole = next(r for r, g in enumerate(got) if _close(g, want))
        yield (f"rank {whole} has the whole output, other ranks have not",
               "dist.reduce gives the sum to one rank; dist.all_reduce gives it to all")  # fmt: skip
    total, k = sum(got), next((k for k in (0, 1, n) if _close(sum(got), want + (k - 1) * bias)), None)
    if not sends and k is not None:
        extra = {0: "down.bias is missing", 1: "", n: f"down.bias is in each, {n} times in the sum"}[k]
        yield (f"every rank returns its part of the output, and nobody adds the {n} parts{'; ' * bool(extra)}{extra}",
               "one all-reduce of the parts, then the bias")  # fmt: skip
    off = ((total - want).norm() / want.norm()).item()
    yield (f"the ranks return different outputs; their sum is {off:.2g} of its size off that of one process",
           "every rank returns the same: the sum of all parts, plus the bias")  # fmt: skip


def _known(x: Tensor, up: nn.Linear, down: nn.Linear, n: int) -> Iterator[tuple[Tensor, str, str]]:
    """What typical mistakes would make of the output, on all ranks."""
    product = linear(relu(up(x)), down.weight)
    yield (product + n * down.bias, f"every rank adds down.bias to its part, so that it is {n} times in the sum", ONCE)
    yield product, "down.bias is missing", ONCE
    mean = "the parts are summands: hidden features 0 to k on one rank, the others elsewhere; add, do not average"
    yield product / n + down.bias, f"you divide the sum of the parts by {n}, as for DDP's gradients", mean
    yield (product + down.bias) / n, f"you divide the sum of the parts, and the bias, by {n}", mean
    yield product / n + down.bias / n, f"you average over the {n} ranks", mean
    yield from _inputs_cut(x, up, down, n)
    yield (down(relu(linear(x, up.weight))), "up.bias is missing", "up.bias[mine]")
    yield (down(up(x)), "there is no ReLU between the layers", "relu(linear(x, up.weight[mine], up.bias[mine]))")
    yield (down(relu(up(n * x))), f"the ranks add up x, which is the same on all: {n} x", "x needs no collective in "
           "forward; its gradient needs one in backward")  # fmt: skip
    yield relu(product) + down.bias, "a second ReLU comes after the sum", "only one, between the layers"
    yield from _by_shares(x, up, down, n)


def _by_shares(x: Tensor, up: nn.Linear, down: nn.Linear, n: int) -> Iterator[tuple[Tensor, str, str]]:
    size = up.out_features // n
    own = [slice(rank * size, (rank + 1) * size) for rank in range(n)]
    parts = [linear(relu(linear(x, up.weight[o], up.bias[o])), down.weight[:, o]) for o in own]
    for o, part in zip(own, parts, strict=True):
        yield (n * part + down.bias, f"all ranks compute the same hidden features, {o.start} to {o.stop - 1}",
               "mine = slice(rank * size, (rank + 1) * size)")  # fmt: skip
    yield sum(map(relu, parts)) + down.bias, "a second ReLU comes before the sum", "only one, between the layers"


def _inputs_cut(x: Tensor, up: nn.Linear, down: nn.Linear, n: int) -> Iterator[tuple[Tensor, str, str]]:
    """The first layer cut by rows: each rank has some inputs of every hidden feature."""
    size = up.in_features // n
    own = [slice(r * size, (r + 1) * size) for r in range(n)]
    before = [linear(x[:, o], up.weight[:, o]) for o in own]
    what = ("you cut the first layer by its inputs: each rank then has a part of every hidden feature's sum, and "
            "relu(a) + relu(b) is not relu(a + b)")  # fmt: skip
    hint = "cut it by its outputs: rows of up.weight, whole hidden features; then ReLU needs nobody else"
    for biases in (n, 1):
        hidden = [relu(b + (up.bias if biases == n or r == 0 else 0.0)) for r, b in enumerate(before)]
        summed = linear(sum(hidden), down.weight)
        yield summed + down.bias, what, hint
        yield summed + n * down.bias, what, hint
