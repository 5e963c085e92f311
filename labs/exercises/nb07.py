"""Exercises of notebook 07: an all-reduce with few rounds, and an 8-bit communication hook for any number of ranks."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labs.kit import _compat
from labs.kit.answers import on_ranks
from labs.kit.exercise import Exercise, KnownMistake

Answer = Callable[..., Any]
Event = tuple
"""("send", number, to, tag); ("sent", number) once that send was waited for; ("got", from, tag)."""

# 07.1


def all_reduce_small(x: Tensor) -> None:
    """Sum `x` over all ranks in place, with the same bits on all: recursive doubling with the whole vector.

    Source: Thakur, Rabenseifner and Gropp, Int. Journal of High Performance Computing Applications 19 (2005).
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    core = 1 << (ranks.bit_length() - 1)  # the largest power of two up to `ranks`
    if rank >= core:  # beyond it: hand the numbers to a partner and get the sum at the end
        dist.send(x, rank - core)
        dist.recv(x, rank - core)
        return
    other = torch.empty_like(x)
    if rank + core < ranks:
        dist.recv(other, rank + core)
        x += other
    step = 1
    while step < core:  # each round doubles the number of ranks in a rank's sum
        sending = dist.isend(x, rank ^ step)
        dist.recv(other, rank ^ step)
        sending.wait()  # before x changes
        x += other
        step *= 2
    if rank + core < ranks:
        dist.send(x, rank + core)


def _around_a_ring(x: Tensor) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    every, passing = [x.clone() for _ in range(ranks)], x.clone()
    for step in range(1, ranks):
        arriving = torch.empty_like(x)
        sending = dist.isend(passing, (rank + 1) % ranks)
        dist.recv(arriving, (rank - 1) % ranks)
        sending.wait()
        every[(rank - step) % ranks] = passing = arriving
    x.copy_(torch.stack(every).sum(0))


def _through_rank_0(x: Tensor) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(x, 0)
        dist.recv(x, 0)
        return
    other = torch.empty_like(x)
    for peer in range(1, ranks):
        dist.recv(other, peer)
        x += other
    for peer in range(1, ranks):
        dist.send(x, peer)


def _powers_of_two_only(x: Tensor) -> None:
    rank, ranks, step = dist.get_rank(), dist.get_world_size(), 1
    while step < ranks:
        if rank ^ step < ranks:
            other = torch.empty_like(x)
            sending = dist.isend(x, rank ^ step)
            dist.recv(other, rank ^ step)
            sending.wait()
            x += other
        step *= 2


def _a_new_tensor(x: Tensor) -> None:
    all_reduce_small(x.clone())


class _Work:
    """A message's work, which notes when it is waited for. Only then does what arrived appear in its tensor."""

    def __init__(self, work: Any, done: Callable[[], Event], tensor: Tensor | None, held: Tensor, log: list) -> None:
        self.work, self.done, self.tensor, self.held, self.log, self.waited = work, done, tensor, held, log, False

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        if not self.waited:
            self.waited = True
            self.work.wait(*args, **kwargs)
            if self.tensor is not None:
                self.tensor.copy_(self.held)
            self.log.append(self.done())
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


@contextmanager
def _messages() -> Iterator[list[Event]]:
    """Yield the messages that this rank sends and receives, in order, by patching methods of ProcessGroup."""
    log: list[Event] = []
    real = {name: getattr(dist.ProcessGroup, name) for name in ("send", "recv", "recv_anysource")}
    works: list[_Work] = []

    def send(group: dist.ProcessGroup, tensors: list[Tensor], to: int, tag: int) -> _Work:
        number, held = len(works), tensors[0].clone()
        log.append(("send", number, to, tag))
        works.append(_Work(real["send"](group, [held], to, tag), lambda: ("sent", number), None, held, log))
        return works[-1]

    def receive(name: str) -> Callable[..., _Work]:
        def method(group: dist.ProcessGroup, tensors: list[Tensor], *args: Any) -> _Work:
            held = torch.empty_like(tensors[0])
            work = real[name](group, [held], *args)
            works.append(_Work(work, lambda: ("got", _compat.source_rank(work), args[-1]), tensors[0], held, log))
            return works[-1]

        return method

    with _patched({"send": send} | {name: receive(name) for name in ("recv", "recv_anysource")}):
        yield log
    for work in works:  # otherwise the next call would receive these messages
        if not work.waited:
            work.work.wait()


@contextmanager
def _patched(methods: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    real = {name: getattr(dist.ProcessGroup, name) for name in methods}
    for name, method in methods.items():
        setattr(dist.ProcessGroup, name, method)
    try:
        yield
    finally:
        for name, method in real.items():
            setattr(dist.ProcessGroup, name, method)


def rounds(logs: Sequence[Sequence[Event]]) -> int:
    """Return the fewest rounds in which these messages can travel, if a rank sends and receives one per round.

    A message takes one round. It starts when its sender has finished everything that it waited for before.
    """
    places, clock = [0] * len(logs), [0] * len(logs)
    busy_out, busy_in = [0] * len(logs), [0] * len(logs)
    ends: dict[tuple[int, int], int] = {}
    on_the_way: dict[tuple[int, int, int], deque[int]] = {}
    moved = True
    while moved:
        moved = False
        for rank, log in enumerate(logs):
            while places[rank] < len(log):
                what, *about = log[places[rank]]
                if what == "send":
                    number, to, tag = about
                    start = max(clock[rank], busy_out[rank])
                    busy_out[rank] = ends[rank, number] = start + 1
                    on_the_way.setdefault((rank, to, tag), deque()).append(start)
                elif what == "sent":
                    clock[rank] = max(clock[rank], ends[rank, about[0]])
                else:
                    waiting = on_the_way.get((about[0], rank, about[1]))
                    if not waiting:
                        break  # its sender isn't that far yet
                    busy_in[rank] = max(waiting.popleft(), busy_in[rank]) + 1
                    clock[rank] = max(clock[rank], busy_in[rank])
                places[rank] += 1
                moved = True
    return max([*clock, *busy_out])


def most_rounds(ranks: int) -> int:
    """Return log2 of the largest power of two up to `ranks`, plus two if that isn't `ranks`."""
    power = ranks.bit_length() - 1
    return power if ranks == 1 << power else power + 2


SHORT, LONG = 5, 1_000_003
"""Numbers per tensor. No number of ranks above 1 divides the second, and its 4 MB exceed all buffers on the way."""


def observe_small(answer: Answer) -> dict[str, Any]:
    """Return the sums on 1 to 6 ranks, whether all ranks hold the same bits, and the rounds."""
    seen: dict[str, Any] = {}
    for ranks in (2, 4, 3, 6, 1):
        found = on_ranks(_reduce, ranks, answer, when=f"on {ranks} ranks")
        where = f"on {ranks} rank{'s' * (ranks > 1)}"
        seen[f"{where}: x on each rank, where rank r began with 10^r"] = [r["short"] for r in found]
        seen[f"{where}: a million numbers are summed"] = all(r["right"] for r in found)
        seen[f"{where}: all ranks hold the same bits"] = len({r["bits"] for r in found}) == 1
        if any(r["log"] for r in found):
            seen[f"{where}: rounds"] = max(rounds([r["log"] for r in found]), most_rounds(ranks))
        elif ranks > 1:
            seen[f"{where}: rounds"] = "no messages"
    return seen


def _reduce(answer: Answer) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    short = torch.full((SHORT,), float(10**rank))
    with _messages() as log:
        answer(short)
    every = [torch.randn(LONG, generator=torch.Generator().manual_seed(r)) for r in range(ranks)]
    long = every[rank].clone()
    with _messages():
        answer(long)
    total = sum(x.double() for x in every)
    bound = ranks * 2**-24 * sum(x.double().abs() for x in every)  # n - 1 roundings of sums below this one
    return {
        "short": int(short[0]) if len(set(short.tolist())) == 1 else short.tolist(),
        "right": bool(((long - total).abs() <= bound).all()),
        "bits": hashlib.sha256(long.numpy().tobytes()).hexdigest(),
        "log": log,
    }


# 07.2: DDP rejects hooks whose annotations are strings, so hooks have none here


def eight_bits(state, bucket):
    """Return the mean over ranks. Each rank averages one part in FP32, received as int8 and sent back as bfloat16."""
    ranks, name = dist.get_world_size(), tuple(map(id, bucket.parameters()))  # an index can change its bucket
    wanted = bucket.buffer() + state.get(name, 0.0)
    scale = wanted.abs().max().clamp(min=1e-30) / 127  # not 0, even if all gradients are
    code = (wanted / scale).round().to(torch.int8)
    state[name] = wanted - code * scale
    part = -(-len(code) // ranks)  # rounded up; the last part is padded with zeros
    outgoing = torch.zeros(part * ranks, dtype=torch.int8)
    outgoing[: len(code)] = code
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing)  # part r of every rank's code goes to rank r
    scales = [torch.empty_like(scale) for _ in range(ranks)]
    dist.all_gather(scales, scale)
    mean = sum(c * s for c, s in zip(incoming.view(ranks, part), scales, strict=True)) / ranks
    means = [torch.empty(part, dtype=torch.bfloat16) for _ in range(ranks)]
    dist.all_gather(means, mean.bfloat16())
    done = torch.futures.Future()
    done.set_result(torch.cat(means)[: len(code)].float())
    return done


def _gathered(state, bucket, feedback=True, own_scale=False, divide=True):
    """Send all codes to all ranks: right on any number of ranks, but the bytes grow with it."""
    ranks, name = dist.get_world_size(), tuple(map(id, bucket.parameters()))
    wanted = bucket.buffer() + (state.get(name, 0.0) if feedback else 0.0)
    scale = wanted.abs().max().clamp(min=1e-30) / 127
    code = (wanted / scale).round().to(torch.int8)
    state[name] = wanted - code * scale
    scales = [torch.empty_like(scale) for _ in range(ranks)]
    dist.all_gather(scales, scale)
    codes = [torch.empty_like(code) for _ in range(ranks)]
    dist.all_gather(codes, code)
    total = sum(c * (scale if own_scale else s) for c, s in zip(codes, scales, strict=True))
    done = torch.futures.Future()
    done.set_result(total / ranks if divide else total)
    return done


def _forgetful(state, bucket):
    return _gathered(state, bucket, feedback=False)


def _own_scale(state, bucket):
    return _gathered(state, bucket, own_scale=True)


def _sum(state, bucket):
    return _gathered(state, bucket, divide=False)


EACH, STEPS, BEFORE, LIMIT = 300, 24, 2, 3.0
"""Numbers per bucket, steps that count, steps before them (DDP rearranges its buckets), bytes per gradient."""
SMALLEST = 3e-3  # of the bucket's largest gradient: less than half of a step of 1/127
SCALES = {"large": 1.0, "small": 1e-4, "unequal": 0.01, "zero": 0.0}
"""Size of each bucket's gradients. In "unequal", the largest differs between ranks."""


class _Given(nn.Module):
    """A model whose gradients are the numbers that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.ParameterDict({name: nn.Parameter(torch.zeros(EACH)) for name in SCALES})

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return sum((self.p[name] * g).sum() for name, g in gradients.items())


def _gradients(rank: int) -> dict[str, Tensor]:
    found = {}
    for k, (name, scale) in enumerate(SCALES.items()):
        g = torch.rand(EACH, generator=torch.Generator().manual_seed(10 * rank + k)) - 0.5
        g[0], g[1:100] = 1.0, SMALLEST
        found[name] = g * scale * (1 + rank if name == "unequal" else 1)
    return found


SENT: dict[str, tuple[int, Callable[[int], float]]] = {
    "allreduce": (0, lambda n: 2 * (n - 1) / n),
    "broadcast": (0, lambda n: 1.0),
    "reduce": (0, lambda n: 1.0),
    "send": (0, lambda n: 1.0),
    "allgather": (1, lambda n: n - 1),
    "_allgather_base": (1, lambda n: n - 1),
    "all_gather_single": (1, lambda n: n - 1),
    "gather": (1, lambda n: 1.0),
    "reduce_scatter": (1, lambda n: (n - 1) / n),
    "_reduce_scatter_base": (1, lambda n: (n - 1) / n),
    "reduce_scatter_single": (1, lambda n: (n - 1) / n),
    "alltoall": (1, lambda n: (n - 1) / n),
    "alltoall_base": (1, lambda n: (n - 1) / n),
    "all_to_all_single": (1, lambda n: (n - 1) / n),
}
"""{ProcessGroup method: (position of the tensor that a rank contributes, multiple of its bytes sent to n ranks)}."""


@contextmanager
def _counted() -> Iterator[list[float]]:
    """Yield the bytes that this rank sends in each collective within the block, by the usual algorithms."""
    sent: list[float] = []

    def counting(name: str, place: int, factor: Callable[[int], float]) -> Callable[..., Any]:
        real = getattr(dist.ProcessGroup, name)

        def method(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            sent.append(factor(dist.get_world_size()) * _nbytes(args[place]))
            return real(group, *args, **kwargs)

        return method

    with _patched({name: counting(name, *how) for name, how in SENT.items() if hasattr(dist.ProcessGroup, name)}):
        yield sent


def _nbytes(tensors: Any) -> int:
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(_nbytes, tensors))


def observe_hook(answer: Answer) -> dict[str, Any]:
    """Return the sums of equal gradients over many steps, and the bytes per gradient, on 2 and 5 ranks."""
    seen: dict[str, Any] = {}
    for ranks in (2, 5):
        found = on_ranks(_constant, ranks, answer, when=f"in the hook, on {ranks} ranks")
        where, total = f"on {ranks} ranks", found[0]["total"]
        every = [_gradients(rank) for rank in range(ranks)]
        mean = {name: sum(g[name] for g in every) / ranks for name in SCALES}
        seen[f"{where}: all gradients are finite"] = all(bool(g.isfinite().all()) for g in total.values())
        seen[f"{where}: the largest gradient arrives as"] = _meaning(total["large"][0].item() / STEPS, ranks)
        same = all(torch.equal(r["total"][name], total[name]) for r in found for name in SCALES)
        seen[f"{where}: all ranks get the same gradients"] = same
        arrived = total["large"][1].item() / (STEPS * SMALLEST)
        seen[f"{where}: a small gradient arrives in {STEPS} steps"] = "yes" if arrived > 0.8 else f"{arrived:.0%} of it"
        for name in SCALES:
            largest = max(g[name].abs().max() for g in every)
            off = (total[name] - STEPS * mean[name]).abs().max()
            allowed = (
                2.5 * largest / 127 + 0.005 * STEPS * mean[name].abs().max()
            )  # error feedback still held; bfloat16
            seen[f"{where}: the gradients of the bucket {name!r} add up"] = bool(off <= allowed)
        each = max(r["sent"] for r in found) / (EACH * len(SCALES))
        seen[f"{where}: bytes that a rank sends per gradient"] = "at most 3" if each <= LIMIT else f"{each:.1f}"
    return seen


def _meaning(value: float, ranks: int) -> str:
    words = {"the mean": 1.0, "the sum": float(ranks), "the mean, divided once more": 1 / ranks}
    return next((word for word, right in words.items() if abs(value - right) < 0.05 * right), f"{value:.3g}, not 1")


def _constant(answer: Answer) -> dict[str, Any]:
    """Return each gradient's sum over STEPS equal steps, and a step's most bytes; 8 per rank and bucket are free."""
    ddp = DistributedDataParallel(_Given(), bucket_cap_mb=EACH * 4 / 2**20)  # one bucket per parameter
    ddp.register_comm_hook({}, answer)
    gradients = _gradients(dist.get_rank())
    total = {name: torch.zeros(EACH) for name in SCALES}
    steps = []
    for step in range(STEPS + BEFORE):
        ddp.zero_grad()
        loss = ddp({name: g if step >= BEFORE else 0.01 * g for name, g in gradients.items()})
        with _counted() as sent:
            loss.backward()
        if step >= BEFORE:
            steps.append(sum(sent) - 8 * len(SCALES) * dist.get_world_size())
            for name, p in ddp.module.p.items():
                total[name] += p.grad
    return {"total": total, "sent": max(steps)}


EXERCISES = {
    "07.1": Exercise(
        "07.1",
        20,
        "an all-reduce of few rounds, from messages",
        observe_small,
        all_reduce_small,
        (
            KnownMistake(
                "The sum never reaches the caller's tensor.",
                "Write into `x`: x += other works in place.",
                _a_new_tensor,
            ),
            KnownMistake(
                "This is a ring: what a rank knows goes to one neighbor only.",
                "After k rounds a rank can hold the sum of 2^k ranks: exchange with rank ^ 1, rank ^ 2, rank ^ 4.",
                _around_a_ring,
            ),
            KnownMistake(
                "All messages go through rank 0, one after the other.",
                "While two ranks exchange, the others can exchange as well.",
                _through_rank_0,
            ),
            KnownMistake(
                "This works for powers of two only: other ranks have no partner in some rounds.",
                "Ranks beyond the largest power of two hand their numbers over first, and get the sum at the end.",
                _powers_of_two_only,
            ),
        ),
    ),
    "07.2": Exercise(
        "07.2",
        30,
        "a communication hook of 8 bits for any number of ranks",
        observe_hook,
        eight_bits,
        (
            KnownMistake(
                "What rounding leaves out is lost, so small gradients never arrive.",
                "Keep wanted - code * scale in `state`, and add it to the next gradient of the same bucket.",
                _forgetful,
            ),
            KnownMistake(
                "The bytes grow with the number of ranks, because every rank sends its whole code to all others.",
                "Let rank r average part r: `dist.all_to_all_single` brings the parts, an all-gather the means.",
                _gathered,
            ),
            KnownMistake(
                "Each rank decodes with its own scale, so the ranks get different gradients.",
                "A code needs the scale it was made with: gather the scales as well.",
                _own_scale,
            ),
            KnownMistake("The gradients are the sum over the ranks.", "Divide by the number of ranks.", _sum),
        ),
    ),
}
