"""Typical mistakes in notebook 01: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

import statistics

import torch

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


def _epoch(
    model,
    optimizer,
    loss_of,
    batches,
    device,
    *,
    zero=True,
    non_blocking=True,
    move=True,
    weigh=True,
    each=lambda loss: None,
    kept=lambda loss: loss.detach(),
):
    """An epoch as it should be, unless a keyword says otherwise."""
    total, right, samples = torch.zeros(()), torch.zeros(()), sum(len(y) for _, y in batches)
    for x, y in batches:
        if move:
            x, y = x.to(device, non_blocking=non_blocking), y.to(device, non_blocking=non_blocking)
        if zero:
            optimizer.zero_grad()
        output = model(x)
        loss = loss_of(output, y)
        loss.backward()
        optimizer.step()
        each(loss)
        total = total + kept(loss) * (len(y) if weigh else samples / len(batches))
        right = right + (output.argmax(1) == y).sum()
    return float(total) / samples, float(right) / samples


def _with(**changes):
    return lambda *arguments: _epoch(*arguments, **changes)


def _reads_every_step(model, optimizer, loss_of, batches, device):
    total = 0.0
    for x, y in batches:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(y)
    return total / sum(len(y) for _, y in batches), 0.5


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
        "item in every step": (_reads_every_step, "first by .item(): each waits"),
        "float in every step": (_with(kept=lambda loss: float(loss)), "first by float(...)"),
        "prints every loss": (_with(each=lambda loss: f"{loss:.3f}"), 'first by f"{...}"'),
        "blocking copies": (_with(non_blocking=False), "8 copies were blocking while a step was in the queue"),
        "no copies": (_with(move=False), "0 tensors were copied to the device, of 10"),
        "keeps the graphs": (_with(kept=lambda loss: loss), "graphs of former steps were still alive"),
        "mean of the batches' means": (_with(weigh=False), "weigh the mean loss of each batch by its samples"),
        "gradients are never set back": (_with(zero=False), "the gradients are never set back"),
    },
}
