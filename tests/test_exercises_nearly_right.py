"""Answers that are right but for one thing: each is refused, and told the one thing. Unusual right ones pass."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mutants import nb01, nb03

from labs.chapters.nb03 import solutions as solutions_03
from labs.kit.check import examine


def told(exercise_id, wrong, words):
    outcome = examine(exercise_id, wrong)
    assert outcome.state == "not yet" and words in outcome.text, outcome.text


def passes(exercise_id, right):
    outcome = examine(exercise_id, right)
    assert outcome.state == "passed", outcome.text


# -- 01.1


def of_samples(statistic, n=40, warm_up=10):
    """What `statistic` makes of the seconds of `n` steps."""
    return lambda *device: statistic(nb01._samples(*device, n=n, warm_up=warm_up))


def of_blocks(steps, divisor, n=20):
    """The median of `n` blocks of so many steps, divided by something else."""

    def benchmark(step, make_batch, synchronize, clock):
        nb01._run(10, step, make_batch)
        batch, seconds = make_batch(), []
        for _ in range(n):
            synchronize()
            start = clock()
            for _ in range(steps):
                step(batch)
            synchronize()
            seconds.append((clock() - start) / divisor)
        return statistics.median(seconds)

    return benchmark


@pytest.mark.parametrize("n", [2, 3, 5, 7, 9, 11, 13, 15, 17, 18, 19])
@pytest.mark.parametrize("timed", [True, False])
def test_too_few_samples_are_counted_right(n, timed):
    """Whether the warm-up was timed and thrown away, or not timed; a median of an odd number is one of the samples."""
    median = statistics.median
    wrong = of_samples(lambda s: median(s[10:]), n + 10, 0) if timed else of_samples(median, n)
    told("01.1", wrong, f"{n} samples are too few")


@pytest.mark.parametrize("warm_up", [10, 11, 15])
@pytest.mark.parametrize("n", [20, 21, 33])
def test_twenty_samples_are_enough(warm_up, n):
    passes("01.1", of_samples(statistics.median, n, warm_up))
    passes("01.1", of_samples(lambda s: statistics.median_high(s[warm_up:]), n + warm_up, 0))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (of_samples(lambda s: s[-1]), "the last of your samples only"),
        (of_samples(lambda s: s[20]), "one of your samples, but not their median"),
        (of_samples(lambda s: float(np.percentile(s, 25))), "this is the 25th percentile of 40 samples"),
        (of_samples(lambda s: float(np.percentile(s, 90))), "this is the 90th percentile of 40 samples"),
        (of_samples(lambda s: -statistics.median(s)), "these seconds are negative"),
        (of_samples(lambda s: statistics.median(s) / 2), "the seconds of one step are divided by 2"),
        (of_samples(lambda s: round(statistics.median(s), 3)), "rounded until little is left"),
        (of_blocks(3, 2), "the seconds of 3 steps are divided by 2"),
        (of_blocks(2, 3), "the seconds of 2 steps are divided by 3"),
        (of_blocks(3, 3, n=19), "19 samples are too few"),
    ],
)
def test_a_benchmark_that_is_nearly_right_is_told(wrong, words):
    told("01.1", wrong, words)


# -- 01.3


def to(tensor, device):
    return tensor.to(device, non_blocking=True)


def epoch(x_to=to, y_to=to, each=lambda loss, hits: None, answer=lambda loss, hits, n, m: (loss / n, hits / n)):
    """An epoch as it should be; `answer` takes the sums over samples, and how many samples and batches there are."""

    def train_epoch(model, optimizer, loss_of, batches, device):
        total, right = torch.zeros((), device=device), torch.zeros((), device=device)
        for x, y in batches:
            x, y = x_to(x, device), y_to(y, device)
            optimizer.zero_grad()
            output = model(x)
            loss = loss_of(output, y)
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(y)
            right += (output.argmax(1) == y).sum()
            each(loss.detach(), right)
        return answer(total.item(), right.item(), sum(len(y) for _, y in batches), len(batches))

    return train_epoch


def stays(tensor, device):
    return tensor


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (epoch(y_to=stays), "5 tensors were copied to the device, of 10: on a GPU the loss would not find y"),
        (epoch(x_to=stays), "5 tensors were copied to the device, of 10: on a GPU the model would not find its input"),
        (epoch(y_to=stays, each=lambda loss, hits: to(loss, loss.device)), "left on the host"),
        (epoch(answer=lambda loss, hits, n, m: (hits / n, loss / n)), "the accuracy first, then the mean loss"),
        (epoch(answer=lambda loss, hits, n, m: (loss / m, hits / n)), "divided by the 5 batches"),
        (epoch(answer=lambda loss, hits, n, m: (loss / n, hits / m)), "not a share"),
        (epoch(answer=lambda loss, hits, n, m: (loss / n, 1 - hits / n)), "the share of wrong answers"),
        (epoch(each=lambda loss, hits: torch.cpu.synchronize()), "synchronize() was called while"),
        (epoch(each=lambda loss, hits: torch.cuda.synchronize()), "synchronize() was called while"),
        (epoch(each=lambda loss, hits: range(hits.long())), "first by its use as a Python number"),
        (epoch(each=lambda loss, hits: torch.is_nonzero(hits)), "first by its use as a Python number"),
        (epoch(each=lambda loss, hits: torch.allclose(loss, loss)), "first by torch.allclose(...)"),
    ],
)
def test_an_epoch_that_is_nearly_right_is_told(wrong, words):
    told("01.3", wrong, words)


@pytest.mark.parametrize(
    "right",
    [
        epoch(x_to=lambda x, device: x.to(str(device), non_blocking=True)),
        epoch(x_to=lambda x, device: x.pin_memory().to(device, non_blocking=True)),  # they lie there already
        epoch(y_to=lambda y, device: y.to(torch.empty((), dtype=y.dtype, device=device), non_blocking=True)),
        epoch(answer=lambda loss, hits, n, m: torch.cuda.synchronize() or (loss / n, hits / n)),
    ],
)
def test_unusual_epochs_pass(right):
    passes("01.3", right)


# -- 03.3


def weighed(ranks=None, rows=None):
    """Weights of a rank's micro-batches, with a number of ranks or of rows that is fixed."""

    def weights(micro_batches):
        everybodys = torch.tensor(sum(len(x) for x, _ in micro_batches))
        dist.all_reduce(everybodys)
        return [len(x) * (ranks or dist.get_world_size()) / (rows or everybodys.item()) for x, _ in micro_batches]

    return weights


def first_three(ddp, optimizer, micro_batches, loss_fn):
    solutions_03.accumulate_step(ddp, optimizer, micro_batches[:3], loss_fn)


def one_forward(ddp, optimizer, micro_batches, loss_fn):
    together = [torch.cat(tensors) for tensors in zip(*micro_batches, strict=True)]
    solutions_03.accumulate_step(ddp, optimizer, [tuple(together)], loss_fn)


def around_ddp(ddp, optimizer, micro_batches, loss_fn):
    optimizer.zero_grad()
    for (x, y), weight in zip(micro_batches, nb03._weights(micro_batches), strict=True):
        (loss_fn(ddp.module(x), y) * weight).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (nb03._accumulate(weighed(ranks=2)), "the number of ranks is fixed"),
        (nb03._accumulate(weighed(rows=16)), "the number of rows is fixed"),
        (nb03._accumulate(weighed(ranks=2, rows=16)), "the number of ranks and of rows is fixed"),
        (nb03._accumulate(syncs=lambda i, last: i >= 2), "the number of micro-batches is fixed"),
        (nb03._accumulate(syncs=lambda i, last: i == 2), "what comes after the 3rd stays on each rank"),
        (nb03._accumulate(lambda _: [12 / 16, 8 / 16, 4 / 16] if dist.get_rank() == 0 else [4 / 16, 2 / 16, 2 / 16]),
         "it raises an error"),
        (first_three, "those after the 3rd are left out"),
        (one_forward, "12 rows went through the model at once"),
        (around_ddp, "a forward of the module inside goes around DDP"),
        (nb03._accumulate(lambda batches: [len(x) for x, _ in batches]), "nothing is divided by the number of all"),
        (nb03._accumulate(lambda batches: [2 * w for w in nb03._weights(batches)]), "twice as large as it should be"),
    ],
)  # fmt: skip
def test_a_step_that_is_nearly_right_is_told(wrong, words):
    told("03.3", wrong, words)
