"""Checker of exercise 06.4: a perceptron shared by real ranks, against the same one computed by a single process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from labs.chapters.nb06.exercise_tensor_gradients import F_AND_G, SHARED, gradient_faults, near, ratio
from labs.chapters.nb06.exercise_tensor_outputs import output_faults
from labs.chapters.nb06.exercise_tensor_traffic import Call, watched
from labs.kit.answers import on_ranks
from labs.kit.check import Mistake
from labs.kit.failure import RankFailed

Function = Callable[..., Any]
Finding = tuple[str, str]
ROWS, WIDTH, HIDDEN = 16, 6, 24
PARAMETERS = ("up.weight", "up.bias", "down.weight", "down.bias")


def problem() -> tuple[Tensor, nn.Linear, nn.Linear, Tensor]:
    """x (16, 6), two layers 6 -> 24 -> 6, and the gradient (16, 6) of the output; the same on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        return torch.randn(ROWS, WIDTH).requires_grad_(), up, down, torch.randn(ROWS, WIDTH)


@dataclass
class Seen:
    """What one rank, or one process, made of the problem."""

    output: Any = None
    has_history: bool = True
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    """By name, also "x"."""
    forward: list[Call] = field(default_factory=list)
    backward: list[Call] = field(default_factory=list)
    old_sum: bool = False
    """Whether torch warned of torch.distributed.nn."""
    changed: bool = False
    """Whether x or a parameter has other numbers now."""


def unsplit(x: Tensor, up: nn.Linear, down: nn.Linear) -> Tensor:
    """What the ranks together have to compute."""
    return down(relu(up(x)))


def run(f: Function, residual: bool) -> Seen:
    """Forward and backward on this rank. `residual`: x is also added to the output, as in a transformer's block."""
    x, up, down, gradient = problem()
    tensors = dict(zip(("x", *PARAMETERS), (x, up.weight, up.bias, down.weight, down.bias), strict=True))
    before, seen = [t.detach().clone() for t in tensors.values()], Seen()
    with warnings.catch_warnings(record=True) as warned:  # the check tells what they mean
        warnings.simplefilter("always")
        with watched(seen.forward):
            output = f(x, up, down)
        seen.output = output.detach().clone() if isinstance(output, Tensor) else output
        seen.has_history = isinstance(output, Tensor) and output.requires_grad
        if seen.has_history and output.shape == gradient.shape:
            with watched(seen.backward):
                (output + x if residual else output).backward(gradient)
    seen.old_sum = any("torch.distributed.nn" in str(w.message) for w in warned)
    seen.gradients = {name: t.grad for name, t in tensors.items()}
    seen.changed = not all(map(torch.equal, before, tensors.values()))
    return seen


def _both(f: Function) -> tuple[Seen, Seen]:
    torch.set_num_threads(1)
    return run(f, False), run(f, True)


def check_parallel_mlp(f: Function) -> None:
    """Output, gradients and traffic on two ranks, without and with a connection around it; then on three ranks."""
    want = [run(unsplit, residual) for residual in (False, True)]
    for ranks in (2, 3):
        found = _on_ranks(f, ranks)
        for what, hint in _faults([r[0] for r in found], want[0]):
            raise Mistake(what if ranks == 2 else f"right on 2 ranks; on 3 {what}", hint)
        for what, hint in _residual([r[1] for r in found], want[1]):
            raise Mistake(what, hint)


def _on_ranks(f: Function, ranks: int) -> list[tuple[Seen, Seen]]:
    try:
        return on_ranks(_both, ranks, f, when="in forward or backward")
    except RankFailed as e:
        if "shapes cannot be multiplied" in str(e) and f"{ROWS}x{WIDTH // ranks} and {WIDTH}x" in str(e):
            raise Mistake("you cut the features of x, while up.weight[mine] takes all of them",
                          SHARES) from e  # fmt: skip
        raise


SHARES = "each rank has rows of up.weight and up.bias, and the same columns of down.weight: its hidden features"


def _faults(found: Sequence[Seen], want: Seen) -> Iterator[Finding]:
    yield from _shape(found, want)
    yield from output_faults([r.output for r in found], problem()[:3], bool(found[0].forward))
    yield from _history(found)
    yield from _forward_traffic(found)
    yield from _shares(found)
    yield from gradient_faults([r.gradients for r in found], want.gradients, found[0].old_sum)
    yield from _backward_traffic(found)


def _shape(found: Sequence[Seen], want: Seen) -> Iterator[Finding]:
    got = found[0].output
    if not isinstance(got, Tensor):
        yield f"you return {got!r:.60}, not a tensor", "return the output, equal on all ranks"
    elif got.shape != want.output.shape:
        yield (f"your output has shape {tuple(got.shape)}, not {tuple(want.output.shape)}",
               "every rank returns the whole output")  # fmt: skip
    if any(r.changed for r in found):
        yield "your code changed x or a parameter", "all_reduce works in place: give it a tensor of its own"


FUNCTION = "a torch.autograd.Function: forward sums part.clone() over the ranks, backward passes the gradient on"


def _history(found: Sequence[Seen]) -> Iterator[Finding]:
    if not all(r.has_history for r in found):
        yield "the output is right, but it has no history: backward() cannot start there", FUNCTION
    if all(found[0].gradients[name] is None for name in SHARED):
        yield ("the output is right, but your sum over the ranks has no history: only down.bias, which comes after it, "
               "gets a gradient", FUNCTION)  # fmt: skip
    for name in PARAMETERS:
        for rank, r in enumerate(found):
            if r.gradients[name] is None:
                yield _no_gradient(name, rank)
    if any(r.gradients["x"] is None for r in found):
        yield "x has no gradient: the layers before cannot train", F_AND_G


def _no_gradient(name: str, rank: int) -> Finding:
    if name == "down.bias":
        return (f"down.bias gets no gradient on rank {rank}: the ranks' copies of it will differ after one step",
                "add it on every rank, after the sum")  # fmt: skip
    return (f"{name} gets no gradient on rank {rank}",
            "slice it, up.weight[mine], rather than copy it: then its gradient lands in up.weight.grad")  # fmt: skip


def _owners(found: Sequence[Seen]) -> list[list[int]]:
    """Ranks that computed each hidden feature, by what has a gradient."""
    uses = [r.gradients["up.weight"].abs().sum(1) > 0 for r in found]
    return [[rank for rank, used in enumerate(uses) if used[i]] for i in range(HIDDEN)]


def _shares(found: Sequence[Seen]) -> Iterator[Finding]:
    n, owners = len(found), _owners(found)
    if all(len(o) == n for o in owners) and any(c.bytes > ONE_TENSOR for c in found[0].backward):
        yield ("the gradients of the weights are summed over the ranks, as in DDP; but here each rank has hidden "
               "features of its own, and no other rank needs their gradients", F_AND_G)  # fmt: skip
    if all(len(o) == n for o in owners):
        yield (f"right, but each of the {n} ranks computes all {HIDDEN} hidden features: nothing is split", SHARES)
    for i, ranks in enumerate(owners):
        if len(ranks) != 1:
            who = f"ranks {ranks[0]} and {ranks[1]} both compute" if ranks else "no rank computes"
            yield f"{who} hidden feature {i}", SHARES
    most = max(sum(o == [rank] for o in owners) for rank in range(n))
    if most > HIDDEN // n:
        yield f"one of {n} ranks computes {most} of {HIDDEN} hidden features", "share them equally"


ONE_TENSOR = ROWS * WIDTH * 4
"""Bytes of the output, and of x."""


def _forward_traffic(found: Sequence[Seen]) -> Iterator[Finding]:
    calls = found[0].forward
    size = sum(c.bytes for c in calls)
    if any(c.kind == "all_gather" for c in calls):
        yield (f"right, but you gather the hidden activations: {max(c.bytes for c in calls)} bytes, where the sum of "
               f"the outputs has {ONE_TENSOR}, and then every rank computes the whole second layer",
               "a rank needs its own hidden features only: down.weight[:, mine] takes them, and one all-reduce adds "
               "the outputs")  # fmt: skip
    if len(calls) > 1 or size > ONE_TENSOR:
        listed = ", ".join(f"{c.kind} of {c.bytes} bytes" for c in calls)
        yield (f"right, but forward has {len(calls)} collectives ({listed}); one all-reduce of {ONE_TENSOR} bytes is "
               "enough", "each rank's part of down's output is what has to be added, nothing else")  # fmt: skip


def _backward_traffic(found: Sequence[Seen]) -> Iterator[Finding]:
    calls = found[0].backward
    if len(calls) > 1 or sum(c.bytes for c in calls) > ONE_TENSOR:
        listed = ", ".join(f"{c.kind} of {c.bytes} bytes" for c in calls)
        yield (f"right, but backward has {len(calls)} collectives ({listed}); one all-reduce of {ONE_TENSOR} bytes is "
               "enough", "only the gradient of x has to be added")  # fmt: skip


def _residual(found: Sequence[Seen], want: Seen) -> Iterator[Finding]:
    got, n = found[0].gradients["x"], len(found)
    if got is not None and near(ratio(got, want.gradients["x"]), 1):
        return
    yield (f"x + parallel_mlp(x, up, down), as in a transformer's block: x's gradient is wrong there, since your sum "
           f"over {n} ranks takes in what came around the layers and is whole on every rank",
           "sum what comes out of the layers only: a torch.autograd.Function on the way in, no hook on x")  # fmt: skip
