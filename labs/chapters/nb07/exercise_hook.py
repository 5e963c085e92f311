"""Exercise 07.2: a communication hook that sends 8 bits and forgets nothing, on real ranks.

DDP refuses hooks whose annotations are strings, so there is no `from __future__ import annotations` here.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from labs.chapters.nb07.traffic import bytes_noted
from labs.kit.answers import on_ranks
from labs.kit.check import Mistake
from labs.kit.failure import RankFailed

Function = Callable[..., Any]
EACH = 300  # numbers in each bucket but the longer one
SCALES = {"large": 1.0, "small": 1e-4, "longer": 0.01, "zero": 0.0}
SMALLEST = 3e-3  # of the largest gradient in its bucket: less than half of a step of 1/127
SLOWEST = 3e-4  # has to be kept for many steps until it is half of a step of 1/127
STEPS = 60
BEFORE = 2  # steps before it counts: DDP rearranges its buckets after the first
FIRST = 0.01  # times as large are gradients in those: a scale that is kept from them is far too small later
TRAINING_STEPS = 30
EXTRA_BYTES = 64  # that a bucket may send beside one byte for each number: its scale


class Linear(nn.Module):
    """Its gradients are the numbers it is given, whatever the parameters are: one bucket for each parameter."""

    def __init__(self) -> None:
        super().__init__()
        lengths = {name: EACH + 100 * (name == "longer") for name in SCALES}
        self.p = nn.ParameterDict({name: nn.Parameter(torch.zeros(n)) for name, n in lengths.items()})

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return sum((self.p[name] * g).sum() for name, g in gradients.items())


def gradients_of(rank: int) -> dict[str, Tensor]:
    """In each bucket the first number is the largest, the same on all ranks; then many small ones of two sizes, then
    others.

    Ranks have other largest numbers in one bucket, so that each has a scale of its own there.
    """
    found = {}
    for k, (name, scale) in enumerate(SCALES.items()):
        g = torch.rand(EACH + 100 * (name == "longer"), generator=torch.Generator().manual_seed(10 * rank + k)) - 0.5
        g[0], g[1:100], g[100:120] = 1.0, SMALLEST, SLOWEST
        found[name] = g * scale * (1 + rank if name == "longer" else 1)
    return found


def check_eight_bits(f: Function) -> None:
    """Gradients that stay the same for 60 steps on 2 and on 3 ranks, then a short training."""
    for ranks in (2, 3):
        _check_constant(ranks, _run(_constant, ranks, f))
    _check_training(_run(_train, 2, f))


def _run(body: Function, ranks: int, f: Function) -> list[dict[str, Any]]:
    try:
        return on_ranks(body, ranks, f, when=f"in the hook, on {ranks} ranks")
    except RankFailed as e:
        text = str(e)
        if "KeyError" in text and "'bucket'" in text:
            raise Mistake(
                "DDP asks for the hook's second parameter by its name, and yours has another",
                "def eight_bits(state, bucket): it has to be called bucket",
            ) from e
        if "Communication hook: " in text:
            raise Mistake(
                "DDP refuses the annotations of your hook before it is ever called",
                "leave them out, or write bucket: dist.GradBucket and -> torch.futures.Future[torch.Tensor]",
            ) from e
        if re.search(r"size of tensor a \(\d+\) must match the size of tensor b \(\d+\)|shape .* is invalid", text):
            raise Mistake(
                "what one bucket left out is added to a bucket of another length. There are several buckets, "
                "and after the first step DDP rearranges them",
                "keep the error for each parameter of bucket.parameters(), or under a name that holds them all, "
                "tuple(map(id, bucket.parameters())): an index may be another bucket's afterwards",
            ) from e
        if re.search(r"[Ff]uture", text) and re.search(r"TypeError|expected|cast|isinstance|INTERNAL ASSERT", text):
            raise Mistake(
                "DDP wants a future from its hook, and got something else",
                "done = torch.futures.Future(); done.set_result(mean); return done",
            ) from e
        raise


def _constant(f: Function) -> dict[str, Any]:
    rank = dist.get_rank()
    # A bucket for each parameter: none fits in beside another
    ddp = DistributedDataParallel(Linear(), bucket_cap_mb=EACH * 4 / 2**20)
    ddp.register_comm_hook({}, f)
    gradients = gradients_of(rank)
    total = {name: torch.zeros_like(g) for name, g in gradients.items()}
    sent = []
    for step in range(STEPS + BEFORE):
        ddp.zero_grad()
        loss = ddp({name: g if step >= BEFORE else FIRST * g for name, g in gradients.items()})
        with bytes_noted() as noted:
            loss.backward()
        if step >= BEFORE:
            sent.append(sum(n for _, n in noted))
            for name, p in ddp.module.p.items():
                total[name] += p.grad
    return {"total": total, "sent": max(sent), "buckets": len(SCALES)}


def _check_constant(ranks: int, found: list[dict[str, Any]]) -> None:
    where, first = f"on {ranks} ranks", found[0]["total"]
    every = [gradients_of(r) for r in range(ranks)]
    mean = {name: sum(g[name] for g in every) / ranks for name in SCALES}
    numbers = sum(len(g) for g in mean.values())
    if name := next((name for name in SCALES if not torch.isfinite(first[name]).all()), ""):
        raise Mistake(
            f"{where} a bucket comes back with NaN or infinity"
            + (": all its gradients are zero, and so is its scale" if name == "zero" else ""),
            "0 / 0 is no number: divide by scale.clamp(min=1e-30)",
        )
    for rank, r in enumerate(found[1:], 1):
        if any(not torch.equal(r["total"][name], first[name]) for name in SCALES):
            raise Mistake(
                f"{where} rank 0 and rank {rank} get other gradients from the same exchange: their models drift apart",
                "whoever decodes must use the scale with which it was encoded. Each rank has one of its own, "
                "which must travel too, or all agree on one first",
            )
    _check_mean(ranks, where, first, mean)
    most = numbers + EXTRA_BYTES * len(SCALES)
    if (sent := max(r["sent"] for r in found)) > most:
        raise Mistake(
            f"{where} you hand {sent:,} bytes to collectives in a step, for {numbers:,} gradients: "
            f"{sent / numbers:.1f} bytes for each, not 1",
            "what travels must be a tensor of torch.int8: encode, exchange, and decode what arrives",
        )


def _check_mean(ranks: int, where: str, total: dict[str, Tensor], mean: dict[str, Tensor]) -> None:
    """Mistake unless the gradients of all steps have arrived, up to what is still left out."""
    large, arrived = mean["large"] * STEPS, total["large"]
    ratio = (arrived @ large / (large @ large)).item()
    if abs(ratio - ranks) < 0.05:
        raise Mistake(f"{where} the gradients are {ranks} times the mean: that is the sum", "divide by the ranks")
    if abs(ratio - 1 / ranks) < 0.05:
        raise Mistake(f"{where} the gradients are divided by {ranks} twice", "once is enough: the mean over ranks")
    if abs(arrived[0] / large[0] - FIRST) < 0.2 * FIRST:
        raise Mistake(
            f"{where} the largest gradient is 1 on every rank, and the mean arrives as "
            f"{(arrived[0] / STEPS).item():.2g}, its size in the first steps: the scale is still that of them",
            "one scale for each bucket and each step: gradients grow and shrink during a training",
        )
    if arrived[0] < 0.2 * large[0]:
        raise Mistake(
            f"{where} the largest gradient is 1 on every rank, and the mean arrives as "
            f"{(arrived[0] / STEPS).item():.2g}: {' + '.join(['127'] * ranks)} does not fit into 8 bits",
            f"in a sum of int8 every rank may use {127 // ranks} at most on {ranks} ranks; or gather the bytes "
            "of all and add them up as FP32",
        )
    few, shown = slice(1, 100), SMALLEST * STEPS
    if total["large"][few].abs().max() < 0.2 * shown:
        raise Mistake(
            f"{where} a gradient of {SMALLEST} beside one of 1 was to add up to {shown:g} in {STEPS} steps, and "
            f"{total['large'][1].item():.2g} has arrived: in every step it is rounded away",
            "keep what encoding left out, wanted - decoded, in `state`, and add it to the next gradient of the "
            "same bucket before encoding",
        )
    for name, scale in SCALES.items():
        step = mean[name].abs().max() / (127 // ranks)  # between two neighbours of the coarsest code that is allowed
        off = (total[name] - STEPS * mean[name]).abs().max()
        if off > 2.5 * step * (2 if name == "longer" else 1):  # there the largest is up to twice the mean
            if name == "small":
                raise Mistake(
                    f"{where} a bucket whose largest gradient is {scale} arrives as if others decided how fine "
                    f"its steps are: after {STEPS} steps it is off by {(off / scale).item():.2g} of the largest",
                    "one scale for each bucket and each step: its largest magnitude over 127",
                )
            raise Mistake(
                f"{where} after {STEPS} equal steps the sum of the gradients is off by "
                f"{(off / scale).item():.2g} of the largest, which no rounding of one step explains",
                "left out = (gradient + what was left out before) - decode(what this rank sends), on each rank "
                "for itself: not the mean that comes back, and never added twice",
            )
    if total["large"][100:120].abs().max() < 0.2 * SLOWEST * STEPS:
        raise Mistake(
            f"{where} a gradient of {SLOWEST} beside one of 1 was to add up to {SLOWEST * STEPS:g} in {STEPS} steps, "
            f"and {total['large'][100].item():.2g} has arrived, though ten times as large ones arrive: what is left "
            "out fades before it has grown to a step of the code",
            "all of what encoding left out comes to the next gradient, whatever its size: nothing is taken off it",
        )


def _train(f: Function) -> dict[str, Any]:
    """A regression with and without the hook, from the same weights and data."""
    losses = {}
    for name, hook in (("plain", None), ("hook", f)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))
        teacher = torch.randn(20, 1)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
        if hook is not None:
            ddp.register_comm_hook({}, hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        draw = torch.Generator().manual_seed(1 + dist.get_rank())
        losses[name] = []
        for _ in range(TRAINING_STEPS):
            x = torch.randn(32, 20, generator=draw)
            loss = mse_loss(ddp(x), (x @ teacher / 20**0.5).tanh())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
        weights = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    return {"losses": losses, "weights": weights}


def _check_training(found: list[dict[str, Any]]) -> None:
    if any(not torch.equal(r["weights"], found[0]["weights"]) for r in found):
        raise Mistake("after a short training the ranks' parameters differ", "every rank must decode the same bytes")
    ends = {name: sum(sum(r["losses"][name][-10:]) for r in found) / 10 / len(found) for name in ("plain", "hook")}
    if not ends["hook"] <= 1.1 * ends["plain"]:
        raise Mistake(
            f"a short training ends with a loss of {ends['hook']:.3g}, with all bits {ends['plain']:.3g}",
            "what is left out must come back in the very next step, once",
        )
