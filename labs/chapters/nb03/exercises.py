"""Exercises of notebook 03: the sampler, DDP's average by hand, accumulation with no_sync, a predicted speed-up."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from labs.chapters.nb03 import solutions as solution
from labs.kit.answers import on_ranks
from labs.kit.check import Exercise, Mistake
from labs.kit.failure import RankFailed
from labs.parts.data_parallel.gradient_buckets import counting_all_reduce

Function = Callable[..., Any]


def check_shard(f: Function) -> None:
    """Disjoint, complete, equal in length, in a new order each epoch, the same whoever asks."""
    state = _random_states()
    shards = _shards(f, 12, 3)
    if _random_states() != state:
        raise Mistake(
            "your code used or reset a global random generator: dropout and augmentation, which draw from it too, "
            "now depend on how often shard() is called",
            "make a generator of its own: torch.Generator().manual_seed(...), and pass it to torch.randperm",
        )
    if shards == [sorted(s) for s in shards]:
        raise Mistake(
            f"nothing is shuffled: with 12 samples rank 0 got {shards[0]}, rank 1 {shards[1]}",
            "draw one order of all samples first, then give each rank its part of that order",
        )
    if shards[0] == shards[1]:
        raise Mistake(
            f"ranks 0 and 1 both got {shards[0]}: three GPUs do the work of one",
            "rank decides which part of the common order is yours, for example order[rank::world_size]",
        )
    for size, ranks in ((12, 3), (10, 4), (3, 4)):
        _check_partition(_shards(f, size, ranks), size, ranks)
    _check_orders(f)
    for size, ranks in ((10, 4), (3, 4)):
        _check_filling(_shards(f, size, ranks), size, ranks)


def _check_partition(shards: list[list[int]], size: int, ranks: int) -> None:
    case, lengths = f"{size} samples on {ranks} ranks", [len(s) for s in shards]
    seen = Counter(i for s in shards for i in s)
    missing, want = sorted(set(range(size)) - set(seen)), -(-size // ranks)
    if strange := sorted(set(seen) - set(range(size))):
        raise Mistake(f"{case}: there is no sample {strange[0]}", f"indices go from 0 to {size - 1}")
    if len(set(lengths)) > 1:
        raise Mistake(
            f"{case}: the ranks got {lengths} samples, so one does a step more and waits in all-reduce for ever",
            "fill the order up to a multiple of world_size by repeating samples from its beginning",
        )
    if missing and seen.total() < size:
        raise Mistake(
            f"{case}: sample {missing[0]} goes to no rank; {lengths[0]} per rank do not cover all",
            "round the length up, not down, and repeat a few samples so that all ranks get equally many",
        )
    if missing:
        twice = next(i for i, n in seen.items() if n > 1)
        owners = [r for r, s in enumerate(shards) if twice in s]
        where = f"ranks {owners[0]} and {owners[1]} both got" if len(owners) > 1 else f"rank {owners[0]} got twice"
        raise Mistake(
            f"{case}: {where} sample {twice}, while nobody got sample {missing[0]}",
            "all ranks must draw the same order: the seed may depend on seed and epoch, never on rank",
        )
    if lengths[0] != want:
        raise Mistake(f"{case}: {lengths[0]} samples per rank, {want} are enough", "repeat as few as possible")


def _check_filling(shards: list[list[int]], size: int, ranks: int) -> None:
    case, want, seen = f"{size} samples on {ranks} ranks", -(-size // ranks), Counter(i for s in shards for i in s)
    dealt = [shards[i % ranks][i // ranks] for i in range(want * ranks)]  # every n-th, or one block each
    blocks = [i for s in shards for i in s]
    if not any(order[size:] == order[: want * ranks - size] for order in (dealt, blocks)):
        twice = ", ".join(f"sample {i} {n} times" for i, n in seen.items() if n > 1)
        raise Mistake(
            f"{case}: what fills the order up is not its own beginning ({twice}): samples from one place would count "
            "more than others in every epoch",
            "order += order[:missing]",
        )


def _check_orders(f: Function) -> None:
    first, second, other = (_shards(f, 60, 2, e, s) for e, s in ((0, 7), (1, 7), (0, 8)))
    if first == second:
        raise Mistake(
            "epoch 0 and epoch 1 have the same order, as with a DistributedSampler whose set_epoch is never called",
            "seed the generator with something that holds the epoch, such as seed + epoch",
        )
    if [set(s) for s in first] == [set(s) for s in second]:
        raise Mistake(
            f"rank 0 gets the same {len(first[0])} samples in every epoch, only in another order",
            "shuffle all samples first and cut then; you cut first",
        )
    if first == other:
        raise Mistake("seeds 7 and 8 give the same order", "the generator's seed must hold `seed` too")


def _shards(f: Function, size: int, ranks: int, epoch: int = 0, seed: int = 0) -> list[list[int]]:
    """Every rank's indices as plain lists; Mistake if asking twice gives two answers."""
    answers = [[f(size, rank, ranks, epoch, seed) for rank in range(ranks)] for _ in range(2)]
    try:
        once, again = ([[int(i) for i in s] for s in shards] for shards in answers)
    except (TypeError, ValueError):
        raise Mistake(f"{answers[0][0]!r:.60} is not a list of indices", "return a list of ints") from None
    if once != again:
        raise Mistake(
            f"called twice with the same arguments, rank 0 got {once[0]}, then {again[0]}: no two ranks would agree",
            "let the order depend on seed and epoch alone: seed a generator with them",
        )
    return once


def _random_states() -> tuple:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state(legacy=False))


def check_predicted_speedup(f: Function) -> None:
    """The formula on several machines; knows what the usual slips would give."""
    if not np.isclose(alone := _number(f(0.1, 1e8, 1e-5, 1e10, 1)), 1):
        raise Mistake(
            f"one rank alone gets {alone:.4g}, not 1",
            "with ranks = 1 nothing is sent: a ring sends 2 (n - 1) messages, which is none",
        )
    cases = [(0.1, 1e8, 1e-5, 1e10, 2), (0.02, 4e8, 1e-3, 2e10, 8), (0.005, 1e7, 5e-4, 1e9, 4)]
    got = [_number(f(*case)) for case in cases]
    for wrong, what, hint in SLIPS:
        if np.allclose(got, [wrong(*case) for case in cases], rtol=1e-6):
            raise Mistake(what, hint)
    for case, value in zip(cases, got, strict=True):
        want = solution.predicted_speedup(*case)
        if not np.isclose(value, want, rtol=1e-3):
            raise Mistake(
                f"for compute_s={case[0]}, gradient_bytes={case[1]:g}, latency_s={case[2]}, bytes_per_s={case[3]:g}, "
                f"ranks={case[4]} you predict {value:.4g}, not {want:.4g}",
                "step = compute_s + 2 (n - 1) (latency_s + (gradient_bytes / n) / bytes_per_s); n batches per step",
            )


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise Mistake(f"{value!r:.60} is not a number", "return the speed-up itself, such as 1.8") from None


def _ring_s(size: float, latency: float, speed: float, n: int) -> float:
    return 2 * (n - 1) * (latency + size / n / speed)


SLIPS: list[tuple[Callable[..., float], str, str]] = [
    (lambda t, s, a, b, n: t / (t + _ring_s(s, a, b, n)), "this is the efficiency: 1 would be ideal for any ranks",
     "n ranks finish n batches per step: speed-up = n x efficiency"),
    (lambda t, s, a, b, n: (t + _ring_s(s, a, b, n)) / t, "it grows when communication gets slower",
     "this is the time of a step relative to one rank's; the speed-up has it in the denominator"),
    (lambda t, s, a, b, n: t / (t / n + _ring_s(s, a, b, n)), "you let the ranks share one batch (strong scaling)",
     "weak scaling: every rank computes a whole batch, so compute_s stays, and n batches are done"),
    (lambda t, s, a, b, n: n * t / max(t, _ring_s(s, a, b, n)), "you hide the all-reduce behind the computation",
     "without overlap the two times add up"),
    (lambda t, s, a, b, n: n * t / (t + _ring_s(s, a, b, n) / 2), "this is half a ring: n - 1 messages",
     "n - 1 messages sum the parts (reduce-scatter), and n - 1 more hand them round (all-gather)"),
    (lambda t, s, a, b, n: n * t / (t + 2 * (n - 1) * (a + s / b)), "every message carries the whole gradient",
     "the ring cuts it into n parts: a message has gradient_bytes / n"),
    (lambda t, s, a, b, n: n * t / (t + _ring_s(s, 0, b, n)), "the latency plays no part",
     "each of the 2 (n - 1) messages pays latency_s: what rules when the model is small"),
    (lambda t, s, a, b, n: n * t / (t + a + _ring_s(s, 0, b, n)), "the latency is paid once per step only",
     "each of the 2 (n - 1) messages pays it, one after the other"),
    (lambda t, s, a, b, n: n * t / (t + _ring_s(8 * s, a, b, n)), "you turned bytes into bits",
     "gradient_bytes and bytes_per_s are both in bytes: no factor of 8"),
    (lambda t, s, a, b, n: float(n), "the all-reduce costs nothing", "add its time to compute_s"),
]  # fmt: skip


# -- 03.2 and 03.3: on real ranks


ROWS = ((6, 4, 2), (2, 4, 6))
"""Rows of the micro-batches of each rank: unequal, but 12 on each."""


def check_all_reduce_gradients(f: Function) -> None:
    """The mean over ranks, in every .grad, on three ranks; then with a layer that only rank 0 used."""
    try:
        found = on_ranks(_reduce, 3, f, when="in your all-reduce")
    except RankFailed as e:
        if "rocess group has not been initialized" in str(e):
            raise Mistake("your code leaves the process group: the next step cannot talk to the other ranks any more",
                          "destroy_process_group() comes once, at the end of the program") from e  # fmt: skip
        raise
    if any(r["not waited for"] for r in found):
        raise Mistake("all_reduce(..., async_op=True) only starts, and your code reads p.grad before it is done",
                      "work = dist.all_reduce(..., async_op=True), then work.wait() before p.grad is used")  # fmt: skip
    names = list(found[0]["before"])
    if any(r["parameters changed"] for r in found):
        raise Mistake(
            "your code changed the parameters themselves; the gradients are what has to be averaged",
            "work on p.grad: the optimizer makes the same step on every rank if the gradients are equal",
        )
    before, after = ([_flat(r[k].values()) for r in found] for k in ("before", "after"))
    mean = sum(before) / 3
    right = [torch.allclose(a, mean, rtol=1e-4, atol=1e-7) for a in after]
    if all(right):
        return _check_unused(f)
    if all(map(torch.equal, before, after)):
        raise Mistake("every rank still has its own gradients: nothing was written into p.grad",
                      "all_reduce works in place: on a copy it leaves p.grad as it was")  # fmt: skip
    if right[0]:
        raise Mistake("rank 0 has the mean, the other ranks do not: their models will drift apart",
                      "dist.reduce gives the sum to one rank; dist.all_reduce gives it to all")  # fmt: skip
    if all(torch.equal(a, before[0]) for a in after):
        raise Mistake("all ranks have rank 0's gradients: the other ranks' samples are lost",
                      "broadcast copies; all_reduce adds")  # fmt: skip
    own = [n for n in names if torch.equal(found[1]["after"][n], found[1]["before"][n])]
    if own:
        raise Mistake(f"{', '.join(own)} still hold each rank's own gradients", "go through all model.parameters()")
    scale = (after[0] @ mean / (mean @ mean)).item()
    if torch.allclose(after[0], scale * mean, rtol=1e-3, atol=1e-6):
        raise Mistake(
            f"on 3 ranks your gradients are {scale:.3g} times the mean"
            + (": that is the sum, a learning rate 3 times too large" if abs(scale - 3) < 1e-3 else ""),
            "divide the sum by dist.get_world_size(), once, and in p.grad itself: g = g / n leaves p.grad as it was",
        )
    raise Mistake(f"the gradients are {(after[0] - mean).norm() / mean.norm():.2g} of their size off the mean",
                  "for each parameter: all_reduce p.grad, then divide it by the number of ranks")  # fmt: skip


def _check_unused(f: Function) -> None:
    case = "when a layer was used on rank 0 only (p.grad is None on rank 1)"
    try:
        found = on_ranks(_reduce_unused, 2, f, when=case)
    except RankFailed as e:
        if "NoneType" in str(e):
            raise Mistake("a parameter that took no part in the loss has p.grad None, and your code fails on it",
                          "let None stand for zeros: p.grad = torch.zeros_like(p)") from e  # fmt: skip
        raise
    want = found[0]["before"] / 2
    if all(r["after"] is not None and torch.allclose(r["after"], want * 2 / 3, rtol=1e-4) for r in found):
        raise Mistake("on two ranks the sum is divided by 3: the number of ranks is fixed in your code",
                      "divide by dist.get_world_size()")  # fmt: skip
    for rank, r in enumerate(found):
        if r["after"] is None or not torch.allclose(r["after"], want, rtol=1e-4, atol=1e-7):
            has = "no gradient" if r["after"] is None else "another gradient than half of rank 0's"
            raise Mistake(f"{case}, rank {rank} ends with {has} for it",
                          "a rank without a gradient contributes zeros, and receives the mean as well")  # fmt: skip


@contextmanager
def _bytes_sent_by_hand() -> Iterator[list[int]]:
    """Within, the bytes of each dist.all_reduce, DDP's own among them."""
    sent, real = [], dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return real(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield sent
    finally:
        dist.all_reduce = real


def _reduce(f: Function) -> dict[str, Any]:
    torch.manual_seed(0)
    model, rank = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), dist.get_rank()
    x = torch.randn(dist.get_world_size(), 5, 4)[rank]
    model(x).square().mean().backward()
    with torch.no_grad():  # apart on purpose: averaging parameters would otherwise change nothing
        for p in model.parameters():
            p += 1e-3 * rank
    grads, parameters = _grads(model), _flat(model.parameters())
    with _works_noted() as works:
        f(model)
    return {"before": grads, "after": _grads(model), "not waited for": any(not w.waited for w in works),
            "parameters changed": not torch.equal(parameters, _flat(model.parameters()))}  # fmt: skip


class _Work:
    """What all_reduce(async_op=True) returns, with a note whether it was waited for."""

    def __init__(self, work: dist.Work) -> None:
        self.work, self.waited = work, False

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        self.waited = True
        return self.work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


@contextmanager
def _works_noted() -> Iterator[list[_Work]]:
    """Within, dist.all_reduce(async_op=True) returns a _Work, which is also added to the list."""
    works, real = [], dist.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        work = real(*args, **kwargs)
        if work is not None:
            works.append(work := _Work(work))
        return work

    dist.all_reduce = all_reduce
    try:
        yield works
    finally:
        dist.all_reduce = real
        for w in works:
            w.work.wait()


def _reduce_unused(f: Function) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"always": nn.Linear(4, 4), "never": nn.Linear(3, 3), "rank 0 only": nn.Linear(4, 2)})
    hidden = model["always"](torch.ones(2, 4))
    (model["rank 0 only"](hidden) if dist.get_rank() == 0 else hidden).square().sum().backward()
    weight = model["rank 0 only"].weight
    before = None if weight.grad is None else weight.grad.clone()
    f(model)
    return {"before": before, "after": weight.grad}


def _grads(model: nn.Module) -> dict[str, Tensor]:
    return {n: _gradient_or_zeros(p).clone() for n, p in model.named_parameters()}


def _gradient_or_zeros(p: nn.Parameter) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def check_accumulate_step(f: Function) -> None:
    """One step, one synchronisation, the whole batch's gradient, one graph at a time, on two ranks."""
    found = on_ranks(_accumulate, 2, f, when="in your accumulation")
    first, m = found[0], len(ROWS[0])
    idle = [rank for rank, r in enumerate(found) if not r["applied"]]
    if idle and len(idle) < len(found):
        raise Mistake(f"rank {idle[0]} made no optimizer step, and the other did: the ranks' models drift apart",
                      "every rank holds a copy of the model: optimizer.step() on all of them")  # fmt: skip
    if (steps := len(first["applied"])) != 1:
        raise Mistake(
            f"{m} micro-batches made {steps} optimizer steps, not 1",
            "optimizer.step() comes once, after the loop over micro-batches",
        )
    if first["all_reduces"] == 0 and not first["own_bytes"]:
        spread = (found[0]["parameters"] - found[1]["parameters"]).abs().max()
        raise Mistake(
            f"no all-reduce in the whole step: the parameters of the two ranks now differ by up to {spread:.2g}",
            "the last micro-batch must be outside of no_sync(): its backward sends what has accumulated",
        )
    _check_gradient(first["applied"][0], m)
    gradient_bytes = first["parameters"].nbytes
    if first["own_bytes"] > gradient_bytes * (first["all_reduces"] == 0):
        raise Mistake(f"the gradient is right, of {gradient_bytes} bytes, but you sent {first['own_bytes']} by hand",
                      "all micro-batches but the last in ddp.no_sync(), and DDP's own all-reduce once")  # fmt: skip
    if first["all_reduces"] > 1 and first["no_sync"] == 0:
        raise Mistake(f"the gradient is right, but it was all-reduced {first['all_reduces']} times per step, not once",
                      "with ddp.no_sync(): around forward and backward of all micro-batches but the last")  # fmt: skip
    if first["all_reduces"] > 1:
        raise Mistake(f"you entered no_sync(), yet there were {first['all_reduces']} all-reduces, not one",
                      "DDP decides in the forward pass: ddp(x) must be inside the `with`, like backward()")  # fmt: skip
    if "forward forward" in first["order"]:
        raise Mistake(f"all {m} forward passes come before the first backward: their activations are in memory "
                      "at once, as with the batch that did not fit",
                      "call backward() for each micro-batch, and let .grad do the adding")  # fmt: skip


def _check_gradient(got: Tensor, m: int) -> None:
    """Mistake unless `got` is the gradient of the whole batch; knows what the usual mistakes would give."""
    model, batches = _problem()
    g = [[_gradient(model, *batch) for batch in own] for own in batches]

    def mean(weights: Callable[[int, int], float]) -> Tensor:
        return sum(weights(rank, i) * g[rank][i] for rank in (0, 1) for i in range(m)) / 2

    total = sum(ROWS[0])
    whole, stale = mean(lambda r, i: ROWS[r][i] / total), mean(lambda r, i: i == 0)
    weigh = "weigh each micro-batch's loss by its share of the rows: len(x) / rows"
    known = [
        (mean(lambda r, i: 1), f"the losses of {m} micro-batches were added, not averaged: the step is about {m} times "
         "too long", weigh),
        (mean(lambda r, i: 1 / m), "every micro-batch weighs the same, but they have 6, 4 and 2 rows: a row of the "
         "small one counts three times as much as a row of the large one", weigh),
        (mean(lambda r, i: (i == m - 1) * ROWS[r][i] / total), "only the last micro-batch is in the gradient",
         "zero_grad() empties .grad: call it once, before the loop"),
        (whole + stale, "the gradient of the step before is in it too", "optimizer.zero_grad() before the loop"),
        (whole / 2, "the gradient is half as large as it should be",
         "DDP averages over ranks already: divide by this rank's rows only"),
    ]  # fmt: skip
    known.append((mean(lambda r, i: (i == 0) * ROWS[r][0] / total) + sum(ROWS[0][i] / total * g[0][i]
                  for i in range(1, m)), "only the first micro-batch was sent; what came after stays on each rank",
                  "outside of no_sync() the last one, when all the others are in .grad"))  # fmt: skip
    if _close(got, whole):
        return
    for gradient, what, hint in known:
        if _close(got, gradient):
            raise Mistake(what, hint)
    raise Mistake(
        f"the gradient is {(got - whole).norm() / whole.norm():.2g} of its size off that of the whole batch", weigh
    )


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def _problem() -> tuple[nn.Module, list[list[tuple[Tensor, Tensor]]]]:
    """The model, and each rank's micro-batches; the same on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
        return model, [[(torch.randn(n, 5), torch.randn(n, 1)) for n in rows] for rows in ROWS]


def _gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return _flat(torch.autograd.grad(mse_loss(model(x), y), list(model.parameters())))


def _accumulate(f: Function) -> dict[str, Any]:
    model, batches = _problem()
    mine = batches[dist.get_rank()]
    ddp, traffic, order, applied = DistributedDataParallel(model), Counter(), [], []

    def hook(traffic, bucket):  # DDP refuses annotations that are text
        traffic["in hook"] += bucket.buffer().nbytes
        return counting_all_reduce(traffic, bucket)

    ddp.register_comm_hook(traffic, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: applied.append(_flat(map(_gradient_or_zeros, ddp.parameters()))))
    mse_loss(ddp(mine[0][0]), mine[0][1]).backward()  # the step before, whose gradient is still there
    traffic.clear()
    no_sync = ddp.no_sync

    def counted() -> AbstractContextManager:
        traffic["no_sync"] += 1
        return no_sync()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        loss = mse_loss(output, target)
        order.append("forward")
        loss.register_hook(lambda _: order.append("backward"))
        return loss

    ddp.no_sync = counted  # type: ignore[method-assign]
    with _bytes_sent_by_hand() as sent:
        f(ddp, optimizer, mine, loss_fn)
    own_bytes = sum(sent) - traffic["in hook"]  # the hook ends in dist.all_reduce, too
    return {"own_bytes": own_bytes, "applied": applied, "all_reduces": traffic["all_reduces"],
            "no_sync": traffic["no_sync"],
            "order": " ".join(order), "parameters": _flat(ddp.parameters())}  # fmt: skip


EXERCISES = {
    "03.1": Exercise("each rank's share of the samples", check_shard, solution.shard),
    "03.2": Exercise(
        "the mean gradient of all ranks, by hand", check_all_reduce_gradients, solution.all_reduce_gradients
    ),
    "03.3": Exercise(
        "one step from many micro-batches, synchronised once", check_accumulate_step, solution.accumulate_step
    ),
    "03.4": Exercise(
        "the speed-up that latency and bandwidth allow", check_predicted_speedup, solution.predicted_speedup
    ),
}
