"""Typical mistakes in notebook 01: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

import statistics
import time
from itertools import chain

from labs.kit.measure import differs, estimate

N = 40


def _as_it_was(step, make_batch, synchronize, clock):
    start = clock()
    for _ in range(30):
        step(make_batch())
    return clock() - start


def _divided_only(step, make_batch, synchronize, clock):
    return _as_it_was(step, make_batch, synchronize, clock) / 30


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


def _waits_before_each_step_only(*device):
    return statistics.median(_samples(*device, second=False))


def _waits_once_after_the_loop(step, make_batch, synchronize, clock):
    seconds = _samples(step, make_batch, synchronize, clock, settle=False, first=False, second=False)
    synchronize()
    return statistics.median(seconds)


def _no_warm_up(*device):
    return statistics.median(_samples(*device, warm_up=0))


def _warm_up_too_short(*device):
    return statistics.median(_samples(*device, warm_up=5))


def _warm_up_inside_the_clock(step, make_batch, synchronize, clock):
    batch = make_batch()
    start = clock()
    for _ in range(10 + N):
        step(batch)
    synchronize()
    return (clock() - start) / N


def _warm_up_left_in_the_queue(*device):
    return statistics.median(_samples(*device, settle=False, first=False))


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


def _in_one_go(step, make_batch, synchronize, clock, steps=N):
    _run(10, step, make_batch)
    batch = make_batch()
    synchronize()
    start = clock()
    for _ in range(steps):
        step(batch)
    synchronize()
    return clock() - start


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


def _unsorted_middle(*device):
    return _samples(*device)[N // 2]


def _real_clock(step, make_batch, synchronize, clock):
    return statistics.median(_samples(step, make_batch, synchronize, time.perf_counter))


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


def _aabb(a, b, seconds_of, pairs):
    found = {a: [], b: []}
    for i in range(2 * pairs):
        f = b if (i % 4 >= 2 and len(found[b]) < pairs) or len(found[a]) == pairs else a
        found[f].append(seconds_of(f))
    return _say(_divide(found[b], found[a]))


def _upside_down(*arguments):
    first, second = _pairs(*arguments)
    return _say(_divide(first, second))


def _second_over_first(a, b, seconds_of, pairs):
    ratios = []
    for i in range(pairs):
        first, second = (a, b) if i % 2 == 0 else (b, a)
        ratios.append(1 / (seconds_of(first) / seconds_of(second)))
    return _say(ratios)


def _ratio_of_medians(*arguments):
    first, second = map(statistics.median, _pairs(*arguments))
    return second / first, "b is slower" if second > first else "b is faster"


def _slow_pairs_dropped(*arguments):
    first, second = _pairs(*arguments)
    limit = 1.2 * min(first)
    return _say([y / x for x, y in zip(first, second, strict=True) if x < limit])


def _differences(*arguments):
    first, second = _pairs(*arguments)
    return _say([y - x for x, y in zip(first, second, strict=True)])


def _percent(*arguments):
    first, second = _pairs(*arguments)
    return _say([100 * (r - 1) for r in _divide(second, first)])


def _always_ten_pairs(a, b, seconds_of, pairs):
    first, second = _pairs(a, b, seconds_of, 10)
    return _say(_divide(second, first))


def _until_it_pleases(a, b, seconds_of, pairs):
    first, second = _pairs(a, b, seconds_of, pairs + 6)
    return _say(_divide(second[6:], first[6:]))


def _sorted_before_pairing(*arguments):
    first, second = map(sorted, _pairs(*arguments))
    return _say(_divide(second, first))


def _over_the_median_of_a(*arguments):
    first, second = _pairs(*arguments)
    return _say([y / statistics.median(first) for y in second])


def _over_the_first_of_a(*arguments):
    first, second = _pairs(*arguments)
    return _say([y / first[0] for y in second])


def _point_estimate(*arguments):
    first, second = _pairs(*arguments)
    return _say(_divide(second, first), lambda interval: True)


def _five_percent_or_nothing(*arguments):
    first, second = _pairs(*arguments)
    return _say(_divide(second, first), lambda interval: differs(interval) and abs(interval.value - 1) > 0.05)


def _never_a_difference(*arguments):
    first, second = _pairs(*arguments)
    return _say(_divide(second, first), lambda interval: False)


def _signs_swapped(*arguments):
    ratios, said = _say(_divide(*reversed(_pairs(*arguments))))
    return ratios, {"b is slower": "b is faster", "b is faster": "b is slower"}.get(said, said)


def _words_of_its_own(*arguments):
    return _say(_divide(*reversed(_pairs(*arguments))))[0], "B wins"


def _ratios_only(*arguments):
    return _divide(*reversed(_pairs(*arguments)))


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
        "divided, nothing else": (_divided_only, "Your answer means 12.1 ms"),
        "waits before the clock only": (_waits_before_the_clock_only, "steps were still in the queue"),
        "waits before each step only": (_waits_before_each_step_only, "at 40 of the 40 readings"),
        "waits once, after the loop": (_waits_once_after_the_loop, "synchronize() comes once, after the loop"),
        "no warm-up": (_no_warm_up, "no warm-up: the first 7 steps"),
        "warm-up too short": (_warm_up_too_short, "5 steps of warm-up are too few: 2 more were slow"),
        "warm-up inside the clock": (
            _warm_up_inside_the_clock,
            "50 steps ran between your readings and you divide by 40",
        ),
        "warm-up left in the queue": (_warm_up_left_in_the_queue, "when sample 1 began, 10 earlier steps"),
        "data inside the clock": (_data_inside, "40 batches were made while the clock ran"),
        "one step": (lambda *d: _samples(*d, n=1)[0], "you timed one step"),
        "six samples": (lambda *d: statistics.median(_samples(*d, n=6)), "6 samples are too few"),
        "last sample only": (lambda *d: _samples(*d)[-1], "the last of your samples"),
        "middle of an unsorted list": (_unsorted_middle, "not their median"),
        "one interval": (lambda *d: _in_one_go(*d) / N, "one interval around 40 steps can only give their mean"),
        "total": (_in_one_go, "the seconds of all 40 steps together"),
        "divided by another number": (lambda *d: _in_one_go(*d) / 100, "40 steps were timed, and you divide by 100"),
        "blocks not divided": (_blocks_not_divided, "the seconds of 3 steps"),
        "mean": (lambda *d: statistics.fmean(_samples(*d)), "mean of 40 samples"),
        "minimum": (lambda *d: min(_samples(*d)), "the fastest step"),
        "maximum": (lambda *d: max(_samples(*d)), "the slowest step"),
        "milliseconds": (lambda *d: 1e3 * statistics.median(_samples(*d)), "these are milliseconds"),
        "steps per second": (lambda *d: 1 / statistics.median(_samples(*d)), "these are steps per second"),
        "all samples": (lambda *d: _samples(*d), "you return a list of 40"),
        "another clock": (_real_clock, "clock() was never called"),
        "a constant": (lambda step, make_batch, synchronize, clock: 0.02 + clock() * 0, "read only once"),
        "no batch": (lambda step, make_batch, *_: step(make_batch), "the function make_batch itself"),
    },
    "01.2": {
        "all a, then all b": (_block_by_block, "all runs of a came before all of b"),
        "always a first": (_always_a_first, "b was the second of its pair 24 of 24 times"),
        "a a b b": (_aabb, "a pair is not one run of a and one of b"),
        "upside down": (_upside_down, "upside down: a over b"),
        "second over first": (_second_over_first, "you divide the second run by the first"),
        "ratio of medians": (_ratio_of_medians, "is a single ratio; in truth it is 1.00"),
        "slow pairs dropped": (_slow_pairs_dropped, "13 are missing"),
        "differences": (_differences, "these are differences"),
        "percent": (_percent, "changes in percent"),
        "always ten pairs": (_always_ten_pairs, "for pairs=24 you ran a 10 and b 10 times"),
        "more runs than asked": (_until_it_pleases, "who picks among runs"),
        "sorted before pairing": (_sorted_before_pairing, "you sorted the runs"),
        "over the median of a": (_over_the_median_of_a, "median of all runs of a"),
        "over the first of a": (_over_the_first_of_a, "the first run of a"),
        "point estimate": (_point_estimate, "it holds 1, yet you say"),
        "never a difference": (_never_a_difference, "it leaves out 1"),
        "five percent or nothing": (_five_percent_or_nothing, "it leaves out 1"),
        "signs swapped": (_signs_swapped, 'yet you say "b is faster"'),
        "words of its own": (_words_of_its_own, "there is no verdict 'B wins'"),
        "ratios only": (_ratios_only, "a list of 24, not two things"),
    },
    "01.3": {
        "rank 0's step": (
            lambda s, b: len(s) * b / statistics.median(s[0]),
            "rank 0's steps only, and it is not always the slowest. For",
        ),
        "rank 0 alone": (lambda s, b: b / statistics.median(s[0]), "; also, these are the samples of one rank"),
        "mean over ranks": (
            lambda s, b: len(s) * b / statistics.median(map(statistics.fmean, zip(*s, strict=True))),
            "you average over the ranks",
        ),
        "sum of own rates": (lambda s, b: sum(b / statistics.median(r) for r in s), "each rank would do on its own"),
        "slowest of the medians": (lambda s, b: len(s) * b / max(map(statistics.median, s)), "each rank's median"),
        "fastest rank": (
            lambda s, b: len(s) * b / statistics.median(map(min, zip(*s, strict=True))),
            "the fastest rank",
        ),
        "all thrown together": (
            lambda s, b: len(s) * b / statistics.median(chain(*s)),
            "throw the steps of all ranks",
        ),
        "one rank's samples": (lambda s, b: b / _typical(s), "the samples of one rank"),
        "ranks twice": (lambda s, b: len(s) ** 2 * b / _typical(s), "the number of ranks is in it twice"),
        "batch twice": (lambda s, b: len(s) * b * b / _typical(s), "batch_per_rank is in it twice"),
        "steps per second": (lambda s, b: 1 / _typical(s), "steps per second"),
        "samples over seconds, in total": (
            lambda s, b: len(s) * b * len(s[0]) / sum(_slowest(s)),
            "the mean over steps",
        ),
        "best step": (lambda s, b: len(s) * b / min(_slowest(s)), "the best step"),
        "seconds per sample": (lambda s, b: _typical(s) / len(s) / b, "seconds per sample"),
        "taking turns": (
            lambda s, b: len(s) * b / statistics.median(map(sum, zip(*s, strict=True))),
            "as if they took turns",
        ),
        "two ranks assumed": (lambda s, b: 2 * b / _typical(s), "you return"),
    },
    "01.4": {
        "no scaling": (lambda s, lr, b, base, w: lr, "the batch plays no part"),
        "square root": (lambda s, lr, b, base, w: _line(s, lr, lr * (b / base) ** 0.5, w), "square root"),
        "batch for ratio": (lambda s, lr, b, base, w: _line(s, lr, lr * b, w), "by the batch itself"),
        "factor for rate": (lambda s, lr, b, base, w: _line(s, 1, b / base, w), "the factor, not the rate"),
        "ratio upside down": (lambda s, lr, b, base, w: _line(s, lr, lr * base / b, w), "upside down"),
        "integer division": (lambda s, lr, b, base, w: _line(s, lr, lr * (b // base), w), "1.5 times the batch"),
        "never stops": (lambda s, lr, b, base, w: lr + (_target(lr, b, base) - lr) * s / max(1, w), "never settles"),
        "one step short": (
            lambda s, lr, b, base, w: _line(min(s, w - 1), lr, _target(lr, b, base), w),
            "one step short",
        ),
        "no warm-up": (lambda s, lr, b, base, w: _target(lr, b, base), "no warm-up"),
        "waits, then jumps": (lambda s, lr, b, base, w: lr if s < w else _target(lr, b, base), "then jumps"),
        "from zero": (lambda s, lr, b, base, w: _line(s, 0, _target(lr, b, base), w), "begins at 0"),
        "from nearly zero": (lambda s, lr, b, base, w: _line(s + 1, 0, _target(lr, b, base), w), "near 0"),
        "one step ahead": (lambda s, lr, b, base, w: _line(s + 1, lr, _target(lr, b, base), w), "one step ahead"),
        "one step late": (lambda s, lr, b, base, w: _line(s, lr, _target(lr, b, base), w + 1), "one step late"),
        "above the target": (
            lambda s, lr, b, base, w: lr + _target(lr, b, base) * s / w if s < w else _target(lr, b, base),
            "above",
        ),
        "by a factor per step": (
            lambda s, lr, b, base, w: lr * (b / base) ** min(1, s / max(1, w)),
            "by a factor per step",
        ),
        "smaller batch keeps the rate": (
            lambda s, lr, b, base, w: _line(s, lr, lr * max(1, b / base), w),
            "the rate stays 0.2",
        ),
        "smaller batch cut off": (
            lambda s, lr, b, base, w: min(_target(lr, b, base), lr + (_target(lr, b, base) - lr) * s / max(1, w)),
            "not one that falls",
        ),
        "smaller batch at once": (
            lambda s, lr, b, base, w: _line(s, lr, _target(lr, b, base), w) if b > base else _target(lr, b, base),
            "there is no way down",
        ),
        "division by zero": (
            lambda s, lr, b, base, w: lr + (_target(lr, b, base) - lr) * min(1, s / w),
            "division by zero",
        ),
        "base_lr without warm-up": (
            lambda s, lr, b, base, w: _line(s, lr, _target(lr, b, base), w) if w and s else lr,
            "with warm_up_steps=0",
        ),
    },
}
