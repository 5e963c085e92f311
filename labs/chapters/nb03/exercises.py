"""Exercises of notebook 03: the sampler, DDP's average by hand, accumulation with no_sync, a predicted speed-up."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from labs.chapters.nb03 import solutions as solution
from labs.chapters.nb03.exercise_gradients import check_accumulate_step, check_all_reduce_gradients
from labs.kit.check import Exercise, Mistake

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
