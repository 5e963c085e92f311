"""Exercise 06.4: one layer of FSDP by hand, tried on two and on three real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise, permutations
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
    hidden: Tensor
    """What the first layer gave."""
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
    alone = [of_rank(ranks, r) for r in range(ranks)]
    return [
        a._replace(
            gradients=[*(_mean([o.gradients[k] for o in alone]).chunk(ranks)[r] for k in (0, 1)), *a.gradients[2:]]
        )
        for r, a in enumerate(alone)
    ]


def of_rank(ranks: int, rank: int) -> Seen:
    """The same of one rank's rows alone, with the whole gradients of both layers."""
    weights, xs, ys = problem(ranks)
    whole, x = [w.requires_grad_() for w in weights], xs[rank].requires_grad_()
    hidden = linear(x, whole[0])
    output = linear(inner := relu(hidden), whole[1])
    gradients = torch.autograd.grad(mse_loss(output, ys[rank]), [*whole, x, inner])
    return Seen(output.detach(), hidden.detach(), list(gradients), [], [], False)


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
            return Seen(f"{shown}", torch.zeros(0), [], *calls, False)
        inner = relu(hidden)
        output = f(inner, shards[1])
    if inner.requires_grad:
        inner.retain_grad()
    if output.requires_grad:
        with watched(calls[1]):
            mse_loss(output, ys[rank]).backward()
    changed = not all(map(torch.equal, before, (*shards, x)))
    gradients = [t.grad for t in (*shards, x, inner)]
    return Seen(output.detach().clone(), hidden.detach().clone(), gradients, *calls, changed)


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
    n = len(found)
    for rank, (got, right) in enumerate(zip(found, want, strict=True)):
        if isinstance(got.output, str):
            yield (
                f"you return {got.output}, where the output has shape {(ROWS, WIDTHS[1])}",
                "x @ whole.T: every rank has all outputs, for its own rows",
            )
        if got.changed:
            yield "your code changed x or the shard", "give the collectives tensors of their own"
        if not _close(got.output, right.output):
            why = _of_hidden(got.hidden, n, rank)
            yield f"the output of rank {rank} is not that of one process{why}", f"the shards in rank order: {GATHER}"
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
    for layer, k, of_x in ((1, 1, 3), (0, 0, 2)):
        yield from _of_shard(layer, [r.gradients[k] for r in found], [r.gradients[k] for r in want])
        yield from _of_x(layer, [r.gradients[of_x] for r in found], [r.gradients[of_x] for r in want])
    forward, backward = found[0].forward, found[0].backward
    if "broadcast" in forward:
        yield f"right, but by {forward.count('broadcast')} broadcasts: one all-gather does the same", GATHER
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
    if backward.count("all_gather") > forward.count("all_gather"):
        yield (
            "right, but backward gathers more than the weights: all ranks' whole gradients, of which a rank needs "
            "its own rows only",
            "dist.reduce_scatter(mine, list of the ranks' parts)",
        )


def _of_hidden(got: Tensor, n: int, rank: int) -> str:
    """Why the first layer's output is wrong, where that is known."""
    weights, xs, _ = problem(n)
    shards, x = weights[0].chunk(n), xs[rank]
    right = x @ weights[0].T
    others_zero = [s if r == rank else torch.zeros_like(s) for r, s in enumerate(shards)]
    known = [
        (right / n, "it is divided by the number of ranks: a mean is taken of gradients only"),
        (x @ torch.cat([shards[rank]] * n).T, "this rank's own shard stands in every place"),
        (x @ torch.cat(others_zero).T, "the shards of the other ranks are zero"),
        (x @ sum(shards).repeat(n, 1).T, "the shards are added up, not put one after the other"),
        (_mean([x @ weights[0].T for x in xs]), "it is the mean over the ranks, and each has rows of its own"),
        (n * _mean([x @ weights[0].T for x in xs]), "it is the sum over the ranks, and each has rows of its own"),
        *(
            (x @ torch.cat([shards[r] for r in order]).T, f"the shards come in the order {list(order)} of the ranks")
            for order in list(permutations(range(n)))[1:]
        ),
        (x @ torch.stack(shards, 1).flatten(0, 1).T, "the ranks' rows take turns: torch.stack in place of torch.cat"),
    ]
    return next((f": {why}" for wrong, why in known if _close(got, wrong)), "")


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
    if factor is not None and abs(factor - 1 / n) < 1e-3:
        yield f"the gradient of the {name} shard is divided by the number of ranks twice", "once"
    yield from _scaled(f"the {name} shard", factor)
    if all(g.shape == w.shape and _close(g, got[0]) for g, w in zip(got, want, strict=True)):
        yield f"all ranks have the same rows of the {name} layer's gradient", "rank r has the r-th part of the rows"
    if all(any(_close(g, w) for w in want) for g in got):
        yield (
            f"the gradient of the {name} shard is that of another rank's rows",
            "the list for dist.reduce_scatter is in rank order: list((gradient.T @ x).chunk(n))",
        )
    own = [of_rank(n, r).gradients[layer].chunk(n)[r] for r in range(n)]
    if all(map(_close, got, own)) or all(_close(g, o / n) for g, o in zip(got, own, strict=True)):
        yield (
            f"the gradient of the {name} shard is not this rank's rows of the mean over all ranks, but of this "
            "rank's own rows of the batch alone",
            "dist.reduce_scatter adds up what the ranks have",
        )
    yield (
        f"the gradient of the {name} shard is not this rank's rows of the mean over all ranks: each rank's own rows "
        "of the batch count",
        "reduce-scatter gradient.T @ x over the ranks, divided by their number",
    )


def _scaled(name: str, factor: float | None) -> Iterator[tuple[str, str]]:
    if factor is not None and abs(factor) < 1e-6:
        yield f"the gradient of {name} is zero", FUNCTION
    if factor is not None and abs(factor + 1) < 1e-3:
        yield f"the gradient of {name} has the wrong sign", "the gradient itself: the optimizer subtracts it"
    if factor is not None:
        yield f"the gradient of {name} is {factor:.3g} times the right one", FUNCTION


def _of_x(layer: int, got: Sequence[Tensor], want: Sequence[Tensor]) -> Iterator[tuple[str, str]]:
    """`got` and `want`: of each rank, the gradient of what the layer was given."""
    n = len(got)
    if all(map(_close, got, want)):
        return
    factor = _factor(got, want)
    of_own = "it is that of this rank's own rows and loss; only the weight's is a mean over the ranks"
    for power, word in ((-1, "divided"), (1, "multiplied"), (-2, "divided twice"), (2, "multiplied twice")):
        if factor is not None and abs(factor - n**power) < 1e-3:
            yield f"the gradient of x is {word} by the number of ranks: {of_own}", "gradient @ whole, as it is"
    yield from _scaled("x", factor)
    known = [(_factor(got, wrong), what, how) for wrong, what, how in _wrong_gradients_of_x(layer, want)]
    for times, also in ((1, ""), (1 / n, ", divided by the number of ranks"), (n, ", times the number of ranks")):
        for factor, what, how in known:
            if factor is not None and abs(factor - times) < 1e-3:
                yield f"the gradient of x {what}{also}", how
    rank = next(r for r, (g, w) in enumerate(zip(got, want, strict=True)) if not _close(g, w))
    yield f"the gradient of x on rank {rank} is not that of its own loss: the layer before would go astray", OF_X


def _wrong_gradients_of_x(layer: int, want: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], str, str]]:
    """Of each mistake: what every rank gets, what it is, and a hint."""
    n = len(want)
    gradients, (weights, _, _) = [_of_outputs(n, r)[layer] for r in range(n)], problem(n)
    shards = weights[layer].chunk(n)
    rows = [g.chunk(n, 1) for g in gradients]  # of the output, as the ranks' shards have made it
    own = [rows[r][r] @ shards[r] for r in range(n)]
    gather = f"the whole weight, as in forward: {GATHER}"
    yield own, "comes from this rank's own shard alone: the other ranks' rows of the weight have a part in it", gather
    yield (
        [_mean(own) * n] * n,
        "is a sum over the ranks of what each makes with its own shard: each has rows of its "
        "own, with a gradient of their own",
        gather,
    )
    yield (
        [g @ torch.cat([s] * n) for g, s in zip(gradients, shards, strict=True)],
        "is made with this rank's own shard in every place",
        gather,
    )
    yield [g @ sum(shards).repeat(n, 1) for g in gradients], "is made with the shards added up", gather
    for order in list(permutations(range(n)))[1:]:
        whole = torch.cat([shards[r] for r in order])
        yield [g @ whole for g in gradients], f"is made with the shards in the order {list(order)} of the ranks", gather
    taking_turns = torch.stack(shards, 1).flatten(0, 1)
    yield (
        [g @ taking_turns for g in gradients],
        "is made with a weight in which the ranks' rows take turns: torch.stack in place of torch.cat",
        gather,
    )
    yield [_mean(want)] * n, "is the mean over the ranks, and each has rows of its own", OF_X
    yield [_mean(want) * n] * n, "is the sum over the ranks, and each has rows of its own", OF_X
    for r in range(n):
        yield [want[r]] * n, f"is that of rank {r} on every rank, and each has rows of its own", OF_X
        moved = [want[(k + r) % n] for k in range(n)]
        yield moved, "is that of another rank's rows", OF_X
    mean = [w.mean(0, keepdim=True).expand_as(w) for w in want]
    yield mean, "is the same in all rows: it is a mean over this rank's rows, and each has its own", OF_X


def _of_outputs(ranks: int, rank: int) -> list[Tensor]:
    """Gradients of both layers' outputs, of one rank's rows."""
    (first, second), xs, ys = problem(ranks)
    hidden = linear(xs[rank], first).requires_grad_()
    output = linear(relu(hidden), second)
    return list(torch.autograd.grad(mse_loss(output, ys[rank]), [hidden, output]))


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-6)
