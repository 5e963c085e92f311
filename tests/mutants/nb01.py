"""Typical mistakes in notebook 01: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

import statistics

from labs.kit.measure import differs, estimate

N = 40


def _as_it_was(step, make_batch, synchronize, clock):
    start = clock()
    for _ in range(30):
        step(make_batch())
    return clock() - start


def _waits_before_the_clock_only(step, make_batch, synchronize, clock):
    _run(10, step, make_batch)
    batch = make_batch()
    synchronize()
    start = clock()
    for _ in range(N):
        step(batch)
    return (clock() - start) / N


def _run(n, step, make_batch):
    for _ in range(n):
        step(make_batch())


def _samples(step, make_batch, synchronize, clock, *, n=N, warm_up=10, settle=True, first=True, second=True):
    """One sample per step, as it should be unless a keyword says otherwise."""
    _run(warm_up, step, make_batch)
    if settle:
        synchronize()
    seconds = []
    for _ in range(n):
        batch = make_batch()
        if first:
            synchronize()
        start = clock()
        step(batch)
        if second:
            synchronize()
        seconds.append(clock() - start)
    return seconds


def _no_warm_up(*device):
    return statistics.median(_samples(*device, warm_up=0))


def _warm_up_inside_the_clock(step, make_batch, synchronize, clock):
    batch = make_batch()
    start = clock()
    for _ in range(10 + N):
        step(batch)
    synchronize()
    return (clock() - start) / N


def _data_inside(step, make_batch, synchronize, clock):
    _run(10, step, make_batch)
    synchronize()
    seconds = []
    for _ in range(N):
        start = clock()
        step(make_batch())
        synchronize()
        seconds.append(clock() - start)
    return statistics.median(seconds)


def _blocks_not_divided(step, make_batch, synchronize, clock):
    _run(10, step, make_batch)
    batch, seconds = make_batch(), []
    for _ in range(N):
        synchronize()
        start = clock()
        for _ in range(3):
            step(batch)
        synchronize()
        seconds.append(clock() - start)
    return statistics.median(seconds)


def _pairs(a, b, seconds_of, pairs, turns=True):
    """Runs pair by pair, as it should be: ([seconds of a], [seconds of b])."""
    found = {a: [], b: []}
    for i in range(pairs):
        for f in (b, a) if turns and i % 2 else (a, b):
            found[f].append(seconds_of(f))
    return found[a], found[b]


def _say(ratios, wanted=differs):
    interval = estimate(ratios)
    if not wanted(interval):
        return ratios, "no difference"
    return ratios, "b is slower" if interval.value > 1 else "b is faster"


def _divide(x, y):
    return [p / q for p, q in zip(x, y, strict=True)]


def _block_by_block(a, b, seconds_of, pairs):
    first = [seconds_of(a) for _ in range(pairs)]
    second = [seconds_of(b) for _ in range(pairs)]
    return _say(_divide(second, first))


def _always_a_first(a, b, seconds_of, pairs):
    first, second = _pairs(a, b, seconds_of, pairs, turns=False)
    return _say(_divide(second, first))


def _second_over_first(a, b, seconds_of, pairs):
    ratios = []
    for i in range(pairs):
        first, second = (a, b) if i % 2 == 0 else (b, a)
        ratios.append(1 / (seconds_of(first) / seconds_of(second)))
    return _say(ratios)


def _slow_pairs_dropped(*arguments):
    first, second = _pairs(*arguments)
    limit = 1.2 * min(first)
    return _say([y / x for x, y in zip(first, second, strict=True) if x < limit])


def _always_ten_pairs(a, b, seconds_of, pairs):
    first, second = _pairs(a, b, seconds_of, 10)
    return _say(_divide(second, first))


def _sorted_before_pairing(*arguments):
    first, second = map(sorted, _pairs(*arguments))
    return _say(_divide(second, first))


def _point_estimate(*arguments):
    first, second = _pairs(*arguments)
    return _say(_divide(second, first), lambda interval: True)


def _five_percent_or_nothing(*arguments):
    first, second = _pairs(*arguments)
    return _say(_divide(second, first), lambda interval: differs(interval) and abs(interval.value - 1) > 0.05)


def _slowest(steps):
    return [max(s) for s in zip(*steps, strict=True)]


def _typical(steps):
    return statistics.median(_slowest(steps))


def _target(base_lr, batch, base_batch):
    return base_lr * batch / base_batch


def _line(step, lr, target, warm_up_steps):
    return lr + (target - lr) * min(1, step / warm_up_steps) if warm_up_steps else target


MUTANTS = {
    "01.1": {
        "as it was": (_as_it_was, "synchronize() is never called"),
        "waits before the clock only": (_waits_before_the_clock_only, "steps were still in the queue"),
        "no warm-up": (_no_warm_up, "no warm-up: the first 7 steps"),
        "warm-up inside the clock": (
            _warm_up_inside_the_clock,
            "50 steps ran between your readings and you divide by 40",
        ),
        "data inside the clock": (_data_inside, "40 batches were made while the clock ran"),
        "six samples": (lambda *d: statistics.median(_samples(*d, n=6)), "6 samples are too few"),
        "blocks not divided": (_blocks_not_divided, "the seconds of 3 steps"),
        "mean": (lambda *d: statistics.fmean(_samples(*d)), "mean of 40 samples"),
    },
    "01.2": {
        "all a, then all b": (_block_by_block, "all runs of a came before all of b"),
        "always a first": (_always_a_first, "b was the second of its pair 24 of 24 times"),
        "second over first": (_second_over_first, "you divide the second run by the first"),
        "slow pairs dropped": (_slow_pairs_dropped, "13 are missing"),
        "always ten pairs": (_always_ten_pairs, "for pairs=24 you ran a 10 and b 10 times"),
        "sorted before pairing": (_sorted_before_pairing, "you sorted the runs"),
        "point estimate": (_point_estimate, "it holds 1, yet you say"),
        "five percent or nothing": (_five_percent_or_nothing, "it leaves out 1"),
    },
    "01.3": {
        "rank 0's step": (
            lambda s, b: len(s) * b / statistics.median(s[0]),
            "rank 0's steps only, and it is not always the slowest. For",
        ),
        "mean over ranks": (
            lambda s, b: len(s) * b / statistics.median(map(statistics.fmean, zip(*s, strict=True))),
            "you average over the ranks",
        ),
        "sum of own rates": (lambda s, b: sum(b / statistics.median(r) for r in s), "each rank would do on its own"),
        "slowest of the medians": (lambda s, b: len(s) * b / max(map(statistics.median, s)), "each rank's median"),
        "one rank's samples": (lambda s, b: b / _typical(s), "the samples of one rank"),
        "steps per second": (lambda s, b: 1 / _typical(s), "steps per second"),
        "samples over seconds, in total": (
            lambda s, b: len(s) * b * len(s[0]) / sum(_slowest(s)),
            "the mean over steps",
        ),
        "taking turns": (
            lambda s, b: len(s) * b / statistics.median(map(sum, zip(*s, strict=True))),
            "as if they took turns",
        ),
    },
    "01.4": {
        "no scaling": (lambda s, lr, b, base, w: lr, "the batch plays no part"),
        "square root": (lambda s, lr, b, base, w: _line(s, lr, lr * (b / base) ** 0.5, w), "square root"),
        "integer division": (lambda s, lr, b, base, w: _line(s, lr, lr * (b // base), w), "1.5 times the batch"),
        "never stops": (lambda s, lr, b, base, w: lr + (_target(lr, b, base) - lr) * s / max(1, w), "never settles"),
        "no warm-up": (lambda s, lr, b, base, w: _target(lr, b, base), "no warm-up"),
        "from zero": (lambda s, lr, b, base, w: _line(s, 0, _target(lr, b, base), w), "begins at 0"),
        "smaller batch cut off": (
            lambda s, lr, b, base, w: min(_target(lr, b, base), lr + (_target(lr, b, base) - lr) * s / max(1, w)),
            "not one that falls",
        ),
        "division by zero": (
            lambda s, lr, b, base, w: lr + (_target(lr, b, base) - lr) * min(1, s / w),
            "division by zero",
        ),
    },
}
