"""Exercise 06.4: tensor parallelism by hand, tried on two and on three real ranks.

Each rank runs forward and backward; outputs, gradients and collectives are then held against what one process computes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear, relu

from labs.kit.answers import on_ranks
from labs.kit.check import Mistake
from labs.kit.failure import RankFailed

Function = Callable[..., Any]
Finding = tuple[str, str]
"""What was done, and a hint."""

# -- the task: a perceptron, an input, and the gradient of its output

ROWS, WIDTH, HIDDEN = 16, 6, 24
PARAMETERS = ("up.weight", "up.bias", "down.weight", "down.bias")
SHARED = PARAMETERS[:3]
"""What ranks share out; down.bias is on every rank."""
ONE_TENSOR = ROWS * WIDTH * 4
"""Bytes of the output, and of x."""


def problem() -> tuple[Tensor, nn.Linear, nn.Linear, Tensor]:
    """x (16, 6), two layers 6 -> 24 -> 6, and the gradient (16, 6) of the output; the same on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        return torch.randn(ROWS, WIDTH).requires_grad_(), up, down, torch.randn(ROWS, WIDTH)


def unsplit(x: Tensor, up: nn.Linear, down: nn.Linear) -> Tensor:
    """What the ranks together have to compute."""
    return down(relu(up(x)))


# -- the run: on every rank, and in one process as the reference


@dataclass(frozen=True)
class Call:
    """One collective, with the bytes of its largest buffer: of what is gathered, the whole."""

    kind: str
    bytes: int


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


def run(f: Function, residual: bool) -> Seen:
    """Forward and backward on this rank. `residual`: x is also added to the output, as in a transformer's block."""
    x, up, down, gradient = problem()
    tensors = dict(zip(("x", *PARAMETERS), (x, up.weight, up.bias, down.weight, down.bias), strict=True))
    before, seen = [t.detach().clone() for t in tensors.values()], Seen()
    with warnings.catch_warnings(record=True) as warned:  # the check tells what they mean
        warnings.simplefilter("always")
        with watched(seen.forward):
            output = f(x, up, down)
        seen.output = output.detach().clone() if isinstance(output, Tensor) else f"{output!r:.60}"
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


KINDS = {
    "allreduce": "all_reduce", "allgather": "all_gather", "all_gather": "all_gather", "reduce_scatter":
    "reduce_scatter", "reduce": "reduce", "alltoall": "all_to_all", "all_to_all": "all_to_all", "broadcast":
    "broadcast", "gather": "gather", "scatter": "scatter", "send": "send", "recv": "recv",
}  # fmt: skip
"""By how the methods of a process group begin, in which all functions of torch.distributed end."""


@contextmanager
def watched(calls: list[Call]) -> Iterator[None]:
    """Within, every collective of this process is added to `calls`.

    Without torch's dispatch modes: to enter one imports 800 modules in every new rank, which takes a second or two.
    """

    def kind(method: str) -> str:
        return next((k for prefix, k in KINDS.items() if method.lstrip("_").startswith(prefix)), "")

    def counted(name: str) -> Any:
        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            calls.append(Call(kind(name), max(map(_bytes, args), default=0)))
            return before[name].__get__(group)(*args, **kwargs)

        return call

    before = {name: m for name, m in vars(dist.ProcessGroup).items() if kind(name)}
    try:
        for name in before:
            setattr(dist.ProcessGroup, name, counted(name))
        yield
    finally:
        for name, method in before.items():
            setattr(dist.ProcessGroup, name, method)


def _bytes(argument: Any) -> int:
    if isinstance(argument, Tensor):
        return argument.nbytes
    return sum(map(_bytes, argument)) if isinstance(argument, list | tuple) else 0


# -- the checks, in order: output, history, traffic of forward, shares, gradients, traffic of backward


def check_parallel_mlp(f: Function) -> None:
    """On two ranks, without and with a connection around the layers; then on three."""
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
            raise Mistake("you cut the features of x, while up.weight[mine] takes all of them", SHARES) from e
        raise


SHARES = "each rank has rows of up.weight and up.bias, and the same columns of down.weight: its hidden features"
FUNCTION = "a torch.autograd.Function: forward sums part.clone() over the ranks, backward passes the gradient on"
F_AND_G = "forward: identity at the input, sum at the output; backward: sum at the input, identity at the output"
ONCE = "add it after the sum: linear(hidden, down.weight[:, mine]) without a bias, all-reduce, then + down.bias"


def _faults(found: Sequence[Seen], want: Seen) -> Iterator[Finding]:
    yield from _shape(found, want)
    yield from _output([r.output for r in found], bool(found[0].forward))
    yield from _history(found)
    yield from _forward_traffic(found[0].forward)
    yield from _shares(found)
    yield from _gradients([r.gradients for r in found], want.gradients, found[0].old_sum)
    yield from _too_much("backward", found[0].backward, "only the gradient of x has to be added")


def _shape(found: Sequence[Seen], want: Seen) -> Iterator[Finding]:
    got = found[0].output
    if not isinstance(got, Tensor):
        yield f"you return {got}, not a tensor", "return the output, equal on all ranks"
    elif got.shape != want.output.shape:
        yield (f"your output has shape {tuple(got.shape)}, not {tuple(want.output.shape)}",
               "every rank returns the whole output")  # fmt: skip
    if any(r.changed for r in found):
        yield "your code changed x or a parameter", "all_reduce works in place: give it a tensor of its own"


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def _output(got: Sequence[Tensor], sends: bool) -> Iterator[Finding]:
    """Nothing if all ranks have the whole output; `sends`: forward has a collective."""
    x, up, down, _ = problem()
    want = unsplit(x, up, down)
    right = [rank for rank, g in enumerate(got) if _close(g, want)]
    if len(right) == len(got):
        return
    without_bias = [rank for rank, g in enumerate(got) if _close(g, want - down.bias)]
    if right and len(right) + len(without_bias) == len(got):
        yield (f"rank {right[0]} adds down.bias to the sum, and rank {without_bias[0]} does not: their outputs differ",
               "on every rank, after the sum")  # fmt: skip
    if right:
        yield (f"rank {right[0]} has the whole output, other ranks have not",
               "dist.reduce gives the sum to one rank; dist.all_reduce gives it to all")  # fmt: skip
    if not all(_close(g, got[0]) for g in got):
        yield _parts(sum(got), want, down.bias, len(got), sends)
    for wrong, what, hint in _known(x, up, down, len(got)):
        if _close(got[0], wrong):
            yield what, hint
    yield (f"the output is {((got[0] - want).norm() / want.norm()).item():.2g} of its size off that of one process",
           "each rank: relu(linear(x, up.weight[mine], up.bias[mine])), then linear with down.weight[:, mine], "
           "the sum, the bias")  # fmt: skip


def _parts(total: Tensor, want: Tensor, bias: Tensor, n: int, sends: bool) -> Finding:
    """The ranks' outputs, whose sum is `total`, differ."""
    for k, extra in ((1, ""), (0, "; down.bias is missing"), (n, f"; down.bias is in each, {n} times in the sum")):
        if not sends and _close(total, want + (k - 1) * bias):
            return (f"every rank returns its part of the output, and nobody adds the {n} parts{extra}",
                    "one all-reduce of the parts, then the bias")  # fmt: skip
    off = ((total - want).norm() / want.norm()).item()
    return (f"the ranks return different outputs; their sum is {off:.2g} of its size off that of one process",
            "every rank returns the same: the sum of all parts, plus the bias")  # fmt: skip


def _known(x: Tensor, up: nn.Linear, down: nn.Linear, n: int) -> Iterator[tuple[Tensor, str, str]]:
    """What typical mistakes would make of the output, on all ranks."""
    product = linear(relu(up(x)), down.weight)
    yield (product + n * down.bias, f"every rank adds down.bias to its part, so that it is {n} times in the sum", ONCE)
    yield product, "down.bias is missing", ONCE
    for wrong in (product / n + down.bias, (product + down.bias) / n):
        yield (wrong, f"you divide the sum of the parts by {n}, as for DDP's gradients", "the parts are summands: "
               "hidden features 0 to k on one rank, the others elsewhere; add, do not average")  # fmt: skip
    yield linear(relu(linear(x, up.weight)), down.weight, down.bias), "up.bias is missing", "up.bias[mine]"
    yield (down(up(x)), "there is no ReLU between the layers", "relu(linear(x, up.weight[mine], up.bias[mine]))")
    yield (unsplit(n * x, up, down), f"the ranks add up x, which is the same on all: {n} x", "x needs no collective in "
           "forward; its gradient needs one in backward")  # fmt: skip
    of_inputs = [linear(a, w) for a, w in zip(x.chunk(n, 1), up.weight.chunk(n, 1), strict=True)]
    for hidden in (
        [relu(h + up.bias) for h in of_inputs],
        [relu(h + up.bias * (h is of_inputs[0])) for h in of_inputs],
    ):
        for bias in (down.bias, n * down.bias):
            yield (linear(sum(hidden), down.weight) + bias, "you cut the first layer by its inputs: each rank then has "
                   "a part of every hidden feature's sum, and relu(a) + relu(b) is not relu(a + b)",
                   "cut it by its outputs: rows of up.weight, whole hidden features; ReLU then needs no "
                   "other rank")  # fmt: skip
    chunks = (relu(up(x)).chunk(n, 1), down.weight.chunk(n, 1))
    parts, size = [linear(h, w) for h, w in zip(*chunks, strict=True)], HIDDEN // n
    for rank, part in enumerate(parts):
        yield (n * part + down.bias, f"all ranks compute the same hidden features, {rank * size} to "
               f"{(rank + 1) * size - 1}", "mine = slice(rank * size, (rank + 1) * size)")  # fmt: skip
    for wrong in (sum(map(relu, parts)) + down.bias, relu(product) + down.bias):
        yield wrong, "a second ReLU comes before or after the sum", "only one, between the layers"


def _history(found: Sequence[Seen]) -> Iterator[Finding]:
    if not all(r.has_history for r in found):
        yield "the output is right, but it has no history: backward() cannot start there", FUNCTION
    if all(found[0].gradients[name] is None for name in SHARED):
        yield ("the output is right, but your sum over the ranks has no history: only down.bias, which comes after it, "
               "gets a gradient", FUNCTION)  # fmt: skip
    for rank, r in enumerate(found):
        if r.gradients["down.bias"] is None:
            yield (f"down.bias gets no gradient on rank {rank}: the ranks' copies of it will differ after one step",
                   "add it on every rank, after the sum")  # fmt: skip
        for name in (name for name in SHARED if r.gradients[name] is None):
            yield (f"{name} gets no gradient on rank {rank}",
                   "slice it, up.weight[mine], rather than copy it: its gradient then lands in "
                   "up.weight.grad")  # fmt: skip
    if any(r.gradients["x"] is None for r in found):
        yield "x has no gradient: the layers before cannot train", F_AND_G


def _forward_traffic(calls: Sequence[Call]) -> Iterator[Finding]:
    if any(c.kind == "all_gather" for c in calls):
        yield (f"right, but you gather the hidden activations: {max(c.bytes for c in calls)} bytes, where the sum of "
               f"the outputs has {ONE_TENSOR}, and then every rank computes the whole second layer",
               "a rank needs its own hidden features only: down.weight[:, mine] takes them, and one all-reduce adds "
               "the outputs")  # fmt: skip
    yield from _too_much("forward", calls, "each rank's part of down's output is what has to be added, nothing else")


def _too_much(which: str, calls: Sequence[Call], hint: str) -> Iterator[Finding]:
    if len(calls) > 1 or sum(c.bytes for c in calls) > ONE_TENSOR:
        listed = ", ".join(f"{c.kind} of {c.bytes} bytes" for c in calls)
        yield (f"right, but {which} has {len(calls)} collectives ({listed}); one all-reduce of {ONE_TENSOR} bytes is "
               "enough", hint)  # fmt: skip


def _shares(found: Sequence[Seen]) -> Iterator[Finding]:
    """Which ranks computed each hidden feature, by what has a gradient."""
    n, uses = len(found), [r.gradients["up.weight"].abs().sum(1) > 0 for r in found]
    owners = [[rank for rank, used in enumerate(uses) if used[i]] for i in range(HIDDEN)]
    everybody = all(len(o) == n for o in owners)
    if everybody and any(c.bytes > ONE_TENSOR for c in found[0].backward):
        yield ("the gradients of the weights are summed over the ranks, as in DDP; but here each rank has hidden "
               "features of its own, and no other rank needs their gradients", F_AND_G)  # fmt: skip
    if everybody:
        yield f"right, but each of the {n} ranks computes all {HIDDEN} hidden features: nothing is split", SHARES
    for i, ranks in enumerate(owners):
        if len(ranks) != 1:
            who = f"ranks {ranks[0]} and {ranks[1]} both compute" if ranks else "no rank computes"
            yield f"{who} hidden feature {i}", SHARES
    most = max(sum(o == [rank] for o in owners) for rank in range(n))
    if most > HIDDEN // n:
        yield f"one of {n} ranks computes {most} of {HIDDEN} hidden features", "share them equally"


def _gradients(found: Sequence[Mapping[str, Tensor]], want: Mapping[str, Tensor], old_sum: bool) -> Iterator[Finding]:
    """Nothing if the shares add up to one process's gradients, and down.bias and x have theirs on every rank."""
    n = len(found)
    ratios = [_ratio(sum(r[name] for r in found), want[name]) for name in SHARED]
    if all(_near(r, n) for r in ratios):
        tool = "torch.distributed.nn's all_reduce, made for ranks with a loss each," if old_sum else "your sum"
        yield (f"the gradients of both layers are {n} times too large: {tool} sums in backward as well",
               "of out = a + b each part has the gradient of out, and every rank has that already: nothing to "
               "send")  # fmt: skip
    if _near(ratios[2], 1) and None in ratios[:2]:
        yield ("down.weight has its gradient, and up has not: the ranks sum the gradient of hidden features in "
               "backward, of which each has others", "the sum belongs where every rank has the same: at x")  # fmt: skip
    for name, r in zip(SHARED, ratios, strict=True):
        if not _near(r, 1):
            yield f"the gradient of {name}, all ranks' shares together, is {_times(r)} that of one process", F_AND_G
    for rank, own in enumerate(found):
        if not _near(r := _ratio(own["down.bias"], want["down.bias"]), 1):
            yield (f"on rank {rank} the gradient of down.bias is {_times(r)} that of one process: every rank has all "
                   "of this bias, and has to move it by all of its gradient",
                   "add it on every rank, after the sum")  # fmt: skip
    yield from _of_input([r["x"] for r in found], want["x"])


def _of_input(got: Sequence[Tensor], want: Tensor) -> Iterator[Finding]:
    n = len(got)
    if _near(_ratio(sum(got), want), 1) and not _near(_ratio(got[0], want), 1 / n):
        off = ((got[0] - want).norm() / want.norm()).item()
        yield ("each rank has a part of x's gradient, that of its own hidden features (rank 0's is "
               f"{off:.0%} of its size off the whole): the layers before would get other gradients on every rank",
               "all-reduce the gradient at the input: a torch.autograd.Function, in forward the identity, in backward "
               "the sum over the ranks")  # fmt: skip
    for rank, g in enumerate(got):
        if not _near(r := _ratio(g, want), 1):
            yield (f"x's gradient on rank {rank} is {_times(r)} that of one process",
                   "the sum over the ranks, once, and not their mean: each has another part of it")  # fmt: skip


def _residual(found: Sequence[Seen], want: Seen) -> Iterator[Finding]:
    got, n = found[0].gradients["x"], len(found)
    if got is None or not _near(_ratio(got, want.gradients["x"]), 1):
        yield (f"x + parallel_mlp(x, up, down), as in a transformer's block: x's gradient is wrong there, since your "
               f"sum over {n} ranks takes in what came around the layers and is whole on every rank",
               "sum what comes out of the layers only: a torch.autograd.Function on the way in, no hook on "
               "x")  # fmt: skip


def _ratio(got: Tensor, want: Tensor) -> float | None:
    """By how much `got` is larger; None if it is no multiple."""
    scale = ((got * want).sum() / want.square().sum()).item()
    return scale if (got - scale * want).norm() <= 1e-4 * want.norm() else None


def _near(r: float | None, value: float) -> bool:
    return r is not None and abs(r - value) < 1e-3


def _times(r: float | None) -> str:
    return "not a multiple of" if r is None else f"{r:.3g} times"
