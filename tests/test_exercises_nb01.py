"""Exercises of notebook 01: right answers of another style pass, and wrong ones that no known mistake covers."""

import random
import statistics
from itertools import pairwise

import numpy as np
import torch

from labs.kit.check import examine
from labs.kit.measure import paired_ratio


def passes(exercise_id, answer):
    outcome = examine(exercise_id, answer)
    assert outcome.state == "passed", outcome.text


def fails(exercise_id, answer, words):
    outcome = examine(exercise_id, answer)
    assert outcome.state != "passed" and words in outcome.text, outcome.text


def drops_samples(step, make_batch, synchronize, clock):
    samples = []
    for _ in range(90):
        batch = make_batch()
        synchronize()
        start = clock()
        step(batch)
        synchronize()
        samples.append(clock() - start)
    return np.median(samples[45:])


def takes_pairs(step, make_batch, synchronize, clock):
    batch = make_batch()
    for _ in range(50):
        step(batch)
    synchronize()
    marks = [clock()]
    for _ in range(100):
        step(batch)
        synchronize()
        marks.append(clock())
    return statistics.median(b - a for a, b in pairwise(marks))


def test_two_other_benchmarks():
    passes("01.1", drops_samples)
    passes("01.1", takes_pairs)


def test_one_long_block_is_too_few_samples():
    def block(step, make_batch, synchronize, clock):
        batch = make_batch()
        for _ in range(50):
            step(batch)
        synchronize()
        start = clock()
        for _ in range(100):
            step(batch)
        synchronize()
        return (clock() - start) / 100

    fails("01.1", block, "at least 20 samples of 1 to 3 steps: expected True, got False")


def compare_at_random(a, b, seconds_of, pairs):
    rows = []
    for i in range(pairs):
        order = [("a", a), ("b", b)] if i < 2 or (i > 3 and random.Random(i).random() < 0.5) else [("b", b), ("a", a)]
        rows.append({name: seconds_of(f) for name, f in order})
    found = paired_ratio([row["b"] for row in rows], [row["a"] for row in rows])
    verdict = "b is slower" if found.low > 1 else "b is faster" if found.high < 1 else "no difference"
    return np.array([row["b"] / row["a"] for row in rows]), verdict


def compare_mirrored(a, b, seconds_of, pairs):
    a_s, b_s = [], []
    for i in range(pairs):
        for f, times in ((b, b_s), (a, a_s))[:: 1 if i % 2 else -1]:
            times.append(seconds_of(f))
    ratios = [y / x for x, y in zip(a_s, b_s, strict=True)]
    found = paired_ratio(b_s, a_s)
    if found.low <= 1 <= found.high:
        return ratios, "no difference"
    return ratios, ("b is faster", "b is slower")[found.low > 1]


def test_two_other_comparisons():
    passes("01.2", compare_at_random)
    passes("01.2", compare_mirrored)


def test_a_lost_pair_is_shown_as_a_number():
    def drops_the_slowest(a, b, seconds_of, pairs):
        ratios, verdict = compare_mirrored(a, b, seconds_of, pairs)
        return sorted(ratios)[:-1], verdict

    fails("01.2", drops_the_slowest, "number of ratios: expected 24, got 23")


def epoch_with_lists(model, optimizer, loss_of, batches, device):
    losses, hits, rows = [], [], []
    for x, y in batches:
        output = model(x.to(device=device, non_blocking=True))
        target = y.to(device=device, non_blocking=True)
        loss = loss_of(output, target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        hits.append(output.detach().argmax(1).eq(target).sum())
        rows.append(len(y))
    weights = torch.tensor(rows, dtype=torch.float32)
    return float(torch.stack(losses) @ weights / sum(rows)), float(torch.stack(hits).sum()) / sum(rows)


def epoch_in_one_tensor(model, optimizer, loss_of, batches, device):
    sums, rows = torch.zeros(2, device=device), 0
    for x, y in batches:
        x, y = (t.to(device, non_blocking=True) for t in (x, y))
        output = model(x)
        loss = loss_of(output, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            sums += torch.stack([loss * len(y), (output.argmax(1) == y).float().sum()])
        rows += len(y)
    loss, right = (sums / rows).tolist()
    return loss, right


def test_two_other_epochs():
    passes("01.3", epoch_with_lists)
    passes("01.3", epoch_in_one_tensor)


def test_a_mask_as_index_and_kept_graphs_are_found():
    def counts_by_mask(model, optimizer, loss_of, batches, device):
        return epoch_in_one_tensor(model, optimizer, lambda o, y: (y[y > 0], loss_of(o, y))[1], batches, device)

    def keeps_graphs(model, optimizer, loss_of, batches, device):
        kept = []
        return epoch_in_one_tensor(
            model, optimizer, lambda o, y: (kept.append(o.sum()), loss_of(o, y))[1], batches, device
        )

    fails("01.3", counts_by_mask, "in the loop")
    fails("01.3", keeps_graphs, "graphs of more than 2 former steps")
