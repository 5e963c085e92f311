"""Exercise 06.4: one layer of FSDP by hand, tried on two and on three real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear, mse_loss, relu

from labs.kit.answers import on_ranks
from labs.kit.check import Mistake

Function = Callable[..., Any]
ROWS, WIDTHS = 5, (8, 12, 6)  # of a rank; inputs and outputs of the two layers: 12 and 6 rows of weights are shared out
KINDS = {"allreduce": "all_reduce", "all_reduce": "all_reduce", "allgather": "all_gather", "all_gather": "all_gather",
         "reduce_scatter": "reduce_scatter", "broadcast": "broadcast", "alltoall": "all_to_all"}  # fmt: skip
"""By how the methods of a process group begin, in which all functions of torch.distributed end."""


class Seen(NamedTuple):
    """What one rank got."""

    output: Tensor | str
    gradients: list[Tensor | None]
    """Of both shards, and of x."""
    forward: list[str]
    backward: list[str]
    """Collectives by kind."""
    changed: bool


def problem(ranks: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Whole weights, and x and target of each rank; the same on every call."""
    draw = torch.Generator().manual_seed(ranks)
    weights = [torch.randn(b, a, generator=draw) / a**0.5 for a, b in pairwise(WIDTHS)]
    return weights, *([torch.randn(ROWS, n, generator=draw) for _ in range(ranks)] for n in (WIDTHS[0], WIDTHS[-1]))


def reference(ranks: int) -> list[Seen]:
    """One process: each rank's output, its shards of the mean gradient over ranks, and its x's gradient."""
    weights, xs, ys = problem(ranks)
    whole, xs = [w.requires_grad_() for w in weights], [x.requires_grad_() for x in xs]
    outputs = [linear(relu(linear(x, whole[0])), whole[1]) for x in xs]
    for output, y in zip(outputs, ys, strict=True):
        mse_loss(output, y).backward()
    shares = [[w.grad.chunk(ranks)[r] / ranks for w in whole] for r in range(ranks)]
    return [Seen(o.detach(), [*shares[r], xs[r].grad], [], [], False) for r, o in enumerate(outputs)]


def run(f: Function) -> Seen:
    """Forward and backward of two layers on this rank."""
    torch.set_num_threads(1)
    rank, n = dist.get_rank(), dist.get_world_size()
    weights, xs, ys = problem(n)
    shards, x = [w.chunk(n)[rank].clone().requires_grad_() for w in weights], xs[rank].requires_grad_()
    before, calls = [t.detach().clone() for t in (*shards, x)], ([], [])
    with watched(calls[0]):
        hidden = f(x, shards[0])
        if not isinstance(hidden, Tensor) or hidden.shape != (ROWS, WIDTHS[1]):
            shown = tuple(hidden.shape) if isinstance(hidden, Tensor) else f"{hidden!r:.40}"
            return Seen(f"{shown}", [], *calls, False)
        output = f(relu(hidden), shards[1])
    if output.requires_grad:
        with watched(calls[1]):
            mse_loss(output, ys[rank]).backward()
    changed = not all(map(torch.equal, before, (*shards, x)))
    return Seen(output.detach().clone(), [t.grad for t in (*shards, x)], *calls, changed)


@contextmanager
def watched(calls: list[str]) -> Iterator[None]:
    """Within, every collective of this process is added to `calls`; torch's dispatch modes would load slowly."""

    def counted(name: str, kind: str) -> Any:
        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            calls.append(kind)
            return before[name].__get__(group)(*args, **kwargs)

        return call

    kinds = {name: k for name in vars(dist.ProcessGroup) for p, k in KINDS.items() if name.lstrip("_").startswith(p)}
    before = {name: vars(dist.ProcessGroup)[name] for name in kinds}
    try:
        for name, kind in kinds.items():
            setattr(dist.ProcessGroup, name, counted(name, kind))
        yield
    finally:
        for name, method in before.items():
            setattr(dist.ProcessGroup, name, method)


def check_sharded_linear(f: Function) -> None:
    """On two ranks, then on three."""
    for ranks in (2, 3):
        found = on_ranks(run, ranks, f, when="in forward or backward")
        for what, hint in _faults(found, reference(ranks)):
            raise Mistake(what if ranks == 2 else f"right on 2 ranks; on 3 {what}", hint)


GATHER = "parts = [torch.empty_like(shard) for _ in range(n)]; dist.all_gather(parts, shard.detach()); torch.cat(parts)"
FUNCTION = "a torch.autograd.Function: backward gets the gradient of the output, and returns those of x and shard"


def _faults(found: Sequence[Seen], want: Sequence[Seen]) -> Iterator[tuple[str, str]]:
    n = len(found)
    for rank, (got, right) in enumerate(zip(found, want, strict=True)):
        if isinstance(got.output, str):
            yield (f"you return {got.output}, where the output has shape {(ROWS, WIDTHS[1])}",
                   "x @ whole.T: every rank has all outputs, for its own rows")  # fmt: skip
        if got.changed:
            yield "your code changed x or the shard", "give the collectives tensors of their own"
        if not _close(got.output, right.output):
            yield f"the output of rank {rank} is not that of one process", f"the shards in rank order: {GATHER}"
    kinds = set(found[0].forward)
    if "all_reduce" in kinds:
        yield "right, but forward sums: it sends twice as much as it must", "an all-gather of the shards is enough"
    shards = [r.gradients[k] for r in found for k in (0, 1)]
    if all(g is None for g in shards):
        yield "the shards get no gradient: what was gathered has no history", FUNCTION
    if any(g is None for g in shards):
        yield "a shard gets no gradient", FUNCTION
    if any(r.gradients[2] is None for r in found):
        yield "x gets no gradient: the layer before cannot train", "backward returns two gradients, of x and of shard"
    for k, name in ((1, "second"), (0, "first")):
        yield from _of_shard(name, [r.gradients[k] for r in found], [r.gradients[k] for r in want])
    for rank in range(n):
        got, right = found[rank].gradients[2], want[rank].gradients[2]
        if got is None or not _close(got, right):
            yield (f"the gradient of x on rank {rank} is not that of its own loss: the layer before would go astray",
                   "gradient @ whole, for this rank's rows: nothing to send")  # fmt: skip
    backward = found[0].backward
    if "all_gather" not in backward:
        yield ("right, but the whole weight is kept from forward to backward: all layers' weights are then in memory "
               "at once, as with DDP", "save x and shard only, and gather again in backward")  # fmt: skip
    if "all_reduce" in backward:
        yield ("right, but backward sums whole gradients on all ranks, which sends twice as much: a rank needs the sum "
               "of its own rows only", "dist.reduce_scatter(mine, list of the ranks' parts)")  # fmt: skip


def _of_shard(name: str, got: Sequence[Tensor], want: Sequence[Tensor]) -> Iterator[tuple[str, str]]:
    n = len(got)
    if all(map(_close, got, want)):
        return
    if all(_close(g, n * w) for g, w in zip(got, want, strict=True)):
        yield (f"the gradient of the {name} shard is {n} times that of the mean over the ranks: a sum, where DDP and "
               "FSDP take the mean", "divide by the number of ranks")  # fmt: skip
    if all(g.shape == w.shape and _close(g, got[0]) for g, w in zip(got, want, strict=True)):
        yield f"all ranks have the same rows of the {name} layer's gradient", "rank r has the r-th part of the rows"
    yield (f"the gradient of the {name} shard is not this rank's rows of the mean over all ranks: each rank's own rows "
           "of the batch count", "reduce-scatter gradient.T @ x over the ranks, divided by their number")  # fmt: skip


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-6)
