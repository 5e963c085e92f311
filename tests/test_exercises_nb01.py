"""Checkers of notebook 01: every fair way of measuring passes, and a benchmark is led from fault to fault."""

from __future__ import annotations

import functools
import statistics

import numpy as np
import pytest
import torch

from labs.chapters.nb01 import solutions as solution
from labs.chapters.nb01.exercise_benchmark import SimulatedDevice
from labs.kit.check import TODO, examine
from labs.kit.measure import estimate


def device(**changes) -> SimulatedDevice:
    return SimulatedDevice(**{"step_s": 0.02, "warm_up_steps": 4, "batch_s": 0.01, "seed": 1} | changes)


# -- the simulated machines


def test_a_step_returns_at_once_and_the_clock_shows_it_after_waiting():
    d = device()
    batch, start = d.make_batch(), d.clock()
    d.step(batch)
    launched, _ = d.clock() - start, d.synchronize()
    assert 50 * launched < d.clock() - start
    assert [r.queued for r in d.readings] == [0, 1, 0]


# -- 01.1


def one_by_one(step, make_batch, synchronize, clock):
    seconds = []
    for _ in range(10):
        step(make_batch())
    for _ in range(20):
        batch = make_batch()
        synchronize()
        start = clock()
        step(batch)
        synchronize()
        seconds.append(clock() - start)
    return sorted(seconds)[len(seconds) // 2]


def in_blocks(step, make_batch, synchronize, clock):
    batch = make_batch()
    for _ in range(12):
        step(batch)
    seconds = []
    for _ in range(25):
        synchronize()
        start = clock()
        step(batch)
        step(batch)
        synchronize()
        seconds.append((clock() - start) / 2)
    return np.median(seconds)


def test_ratios_in_single_precision_pass():
    def compare(a, b, seconds_of, pairs):
        ratios, verdict = solution.compare(a, b, seconds_of, pairs)
        return np.float32(ratios).tolist(), verdict

    assert examine("01.2", compare).state == "passed"


def timed(n, step, make_batch, synchronize, clock):
    seconds = []
    batches = [make_batch() for _ in range(n)]
    synchronize()
    last = clock()
    for batch in batches:
        step(batch)
        synchronize()
        now = clock()
        seconds.append(now - last)
        last = now
    return seconds


def rounded_and_trimmed(step, make_batch, synchronize, clock):
    seconds = sorted(timed(60, step, make_batch, synchronize, clock)[10:])
    return statistics.fmean(seconds[20:30])


@pytest.mark.parametrize(
    "fair",
    [
        one_by_one,
        in_blocks,
        rounded_and_trimmed,
    ],
)
def test_every_fair_benchmark_passes(fair):
    assert examine("01.1", fair).state == "passed", examine("01.1", fair).text


def test_the_listing_is_led_from_fault_to_fault():
    stages = [(), ("wait",), ("wait", "warm"), ("wait", "warm", "data"), ("wait", "warm", "data", "each")]
    told = [examine("01.1", listing(stage)) for stage in stages]
    words = ["never called", "no warm-up", "30 batches were made", "can only give their mean"]
    assert all(w in o.text for w, o in zip(words, told, strict=False)), [o.text for o in told]
    assert [o.state for o in told] == 4 * ["not yet"] + ["passed"]


def listing(repaired):
    """The printed loop with some of its faults removed."""

    def benchmark(step, make_batch, synchronize, clock):
        if "warm" in repaired:
            timed(10, step, make_batch, synchronize, clock)
        if "each" in repaired:
            return statistics.median(timed(30, step, make_batch, synchronize, clock))
        batches = [make_batch() for _ in range(30)]
        start = clock()
        for batch in batches:
            step(batch if "data" in repaired else make_batch())
        if "wait" in repaired:
            synchronize()
        return (clock() - start) / 30

    return benchmark


def test_the_stub_is_the_listing_itself_and_to_do():
    def benchmark(step, make_batch, synchronize, clock):
        TODO  # noqa: B018
        start = clock()
        for _ in range(30):
            step(make_batch())
        return clock() - start

    assert examine("01.1", benchmark).state == "to do"


# -- 01.2


def told(ratios):
    interval = estimate(ratios)
    if interval.low <= 1 <= interval.high:
        return ratios, "no difference"
    return ratios, "b is slower" if interval.low > 1 else "b is faster"


# -- 01.3


def by_lists(model, optimizer, loss_of, batches, device):
    losses, right, sizes = [], [], [len(y) for _, y in batches]
    for x, y in batches:
        x, y = (t.to(device=device, non_blocking=True) for t in (x, y))
        out = model(x)
        loss = loss_of(out, y)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        right.append(out.detach().argmax(1).eq(y).sum())
    weights = torch.tensor(sizes, dtype=torch.float)
    return (torch.stack(losses) @ weights / sum(sizes)).numpy(), np.float32(sum(r.item() for r in right) / sum(sizes))


def into_buffers(model, optimizer, loss_of, batches, device):
    found = torch.zeros(2, device=device)
    for x, y in batches:
        x, y = torch.empty_like(x).copy_(x, non_blocking=True), torch.empty_like(y).copy_(y, True)
        out = model(x)
        loss = loss_of(out, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found[0] += loss * len(y)
            found[1] += (out.max(dim=1).indices == y).sum()
    return (found / sum(len(y) for _, y in batches)).tolist()


@pytest.mark.parametrize("epoch", [by_lists, into_buffers])
def test_every_epoch_that_does_not_wait_passes(epoch):
    assert examine("01.3", epoch).state == "passed", examine("01.3", epoch).text


def test_the_epoch_that_is_given_is_led_from_fault_to_fault():
    def given(model, optimizer, loss_of, batches, device, *, zero=False, read=lambda t: t.item(), **how):
        total, right = 0.0, 0
        for x, y in batches:
            x, y = x.to(device, **how), y.to(device, **how)
            if zero:
                optimizer.zero_grad()
            output = model(x)
            loss = loss_of(output, y)
            loss.backward()
            optimizer.step()
            total += read(loss)
            right += read((output.argmax(1) == y).sum())
        return total / len(batches), right / sum(len(y) for _, y in batches)

    repairs = [{}, {"zero": True}, {"read": lambda t: t}, {"non_blocking": True}, {"read": lambda t: t.detach()}]
    words = [
        "never set back",
        "first by .item()",
        "copies were blocking",
        "graphs of former steps",
        "weigh the mean loss",
    ]
    done: dict = {}
    for repair, said in zip(repairs, words, strict=True):
        done |= repair
        text = examine("01.3", functools.partial(given, **done)).text
        assert said in text, text
