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
KINDS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
}
"""By how the methods of a process group begin, in which all functions of torch.distributed end."""


class Seen(NamedTuple):
    """What one rank got."""

    output: Tensor | str
    gradients: list[Tensor | None]
    """Of both shards, of x and of the second layer's input."""
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
    """One process: each rank's output, its shards of the mean gradient over ranks, and its inputs' gradients."""
    weights, xs, ys = problem(ranks)
    whole, alone = [w.requires_grad_() for w in weights], []
    for x, y in zip(xs, ys, strict=True):
        output = linear(inner := relu(linear(x.requires_grad_(), whole[0])), whole[1])
        gradients = torch.autograd.grad(mse_loss(output, y), [*whole, x, inner])
        alone.append((output.detach(), gradients))
    means = [_mean([gradients[k] for _, gradients in alone]) for k in (0, 1)]
    return [
        Seen(output, [*(m.chunk(ranks)[r] for m in means), *gradients[2:]], [], [], False)
        for r, (output, gradients) in enumerate(alone)
    ]


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).mean(0)


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
        inner = relu(hidden)
        output = f(inner, shards[1])
    if inner.requires_grad:
        inner.retain_grad()
    if output.requires_grad:
        with watched(calls[1]):
            mse_loss(output, ys[rank]).backward()
    changed = not all(map(torch.equal, before, (*shards, x)))
    gradients = [t.grad for t in (*shards, x, inner)]
    return Seen(output.detach().clone(), gradients, *calls, changed)


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
OF_X = "gradient @ whole, for this rank's rows: nothing to send"
FUNCTION = "a torch.autograd.Function: backward gets the gradient of the output, and returns those of x and shard"


def _faults(found: Sequence[Seen], want: Sequence[Seen]) -> Iterator[tuple[str, str]]:
    for rank, (got, right) in enumerate(zip(found, want, strict=True)):
        if isinstance(got.output, str):
            yield (
                f"you return {got.output}, where the output has shape {(ROWS, WIDTHS[1])}",
                "x @ whole.T: every rank has all outputs, for its own rows",
            )
        if got.changed:
            yield "your code changed x or the shard", "give the collectives tensors of their own"
        if not _close(got.output, right.output):
            yield f"the output of rank {rank} is not that of one process", f"the shards in rank order: {GATHER}"
    shards = [r.gradients[k] for r in found for k in (0, 1)]
    if all(g is None for g in shards):
        yield "the shards get no gradient: what was gathered has no history", FUNCTION
    if any(g is None for r in found for g in r.gradients):
        yield "a shard or an x gets no gradient", FUNCTION
    for layer, k, of_x in ((1, 1, 3), (0, 0, 2)):
        yield from _of_shard(layer, [r.gradients[k] for r in found], [r.gradients[k] for r in want])
        for rank, (got, right) in enumerate(zip(found, want, strict=True)):
            if not _close(got.gradients[of_x], right.gradients[of_x]):
                yield (
                    f"the gradient of x on rank {rank} is not that of its own loss: the layer before would go astray",
                    OF_X,
                )
    forward, backward = found[0].forward, found[0].backward
    if "all_gather" not in backward:
        yield (
            "right, but the whole weight is kept from forward to backward: all layers' weights are then in memory "
            "at once, as with DDP",
            "save x and shard only, and gather again in backward",
        )
    if "all_reduce" in backward:
        yield (
            "right, but backward sums whole gradients on all ranks, which sends twice as much: a rank needs the sum "
            "of its own rows only",
            "dist.reduce_scatter(mine, list of the ranks' parts)",
        )
    gathers = backward.count("all_gather") <= forward.count("all_gather")
    if not gathers or set(forward) != {"all_gather"} or set(backward) != {"all_gather", "reduce_scatter"}:
        yield (
            f"right, but two layers call {', '.join(forward)} in forward and {', '.join(backward)} in backward",
            "for each layer one all-gather in forward, an all-gather and a reduce-scatter in backward",
        )


def _factor(got: Sequence[Tensor], want: Sequence[Tensor]) -> float | None:
    """The number that makes all of `got` from `want`; None if there is none."""
    if any(g.shape != w.shape for g, w in zip(got, want, strict=True)):
        return None
    a, b = (torch.cat([t.flatten() for t in tensors]) for tensors in (got, want))
    factor = (a @ b / (b @ b)).item()
    return factor if _close(a, factor * b) else None


def _of_shard(layer: int, got: Sequence[Tensor], want: Sequence[Tensor]) -> Iterator[tuple[str, str]]:
    n, name = len(got), ("first", "second")[layer]
    if all(map(_close, got, want)):
        return
    factor = _factor(got, want)
    if factor is not None and abs(factor - n) < 1e-3:
        yield (
            f"the gradient of the {name} shard is {n} times that of the mean over the ranks: a sum, where DDP and "
            "FSDP take the mean",
            "divide by the number of ranks",
        )
    yield (
        f"the gradient of the {name} shard is not this rank's rows of the mean over all ranks: each rank's own rows "
        "of the batch count",
        "reduce-scatter gradient.T @ x over the ranks, divided by their number",
    )


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-6)
