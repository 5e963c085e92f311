"""Reference solutions of notebook 01."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from labs.kit.measure import differs, estimate


def benchmark(
    step: Callable[[Any], object],
    make_batch: Callable[[], Any],
    synchronize: Callable[[], object],
    clock: Callable[[], float],
) -> float:
    """Seconds of a typical step: 10 steps of warm-up, then the median of 30, each timed alone."""
    seconds = []
    for _ in range(10 + 30):
        batch = make_batch()
        synchronize()
        start = clock()
        step(batch)
        synchronize()
        seconds.append(clock() - start)
    return statistics.median(seconds[10:])


def compare(
    a: Callable[[], object], b: Callable[[], object], seconds_of: Callable[[Callable], float], pairs: int
) -> tuple[list[float], str]:
    """Seconds of b over seconds of a, pair by pair, and what their median's interval allows to say about b."""
    ratios = []
    for i in range(pairs):
        if i % 2 == 0:
            a_s, b_s = seconds_of(a), seconds_of(b)
        else:  # neither of them always runs first
            b_s, a_s = seconds_of(b), seconds_of(a)
        ratios.append(b_s / a_s)
    interval = estimate(ratios)
    if not differs(interval):
        return ratios, "no difference"
    return ratios, "b is slower" if interval.value > 1 else "b is faster"


def job_samples_per_s(step_s_by_rank: Sequence[Sequence[float]], batch_per_rank: int) -> float:
    """Samples per second of all ranks together: a step of the job ends when its slowest rank is done."""
    job_step_s = [max(seconds) for seconds in zip(*step_s_by_rank, strict=True)]
    return len(step_s_by_rank) * batch_per_rank / statistics.median(job_step_s)


def learning_rate(step: int, base_lr: float, batch: int, base_batch: int, warm_up_steps: int) -> float:
    """Linear scaling: from base_lr in step 0 on a straight line to its multiple in step `warm_up_steps`, then constant.

    Goyal et al., Accurate, Large Minibatch SGD, arXiv:1706.02677, sections 2.1 and 2.2.
    """
    target = base_lr * batch / base_batch
    if step >= warm_up_steps:
        return target
    return base_lr + (target - base_lr) * step / warm_up_steps
