"""Answers that are right but for one thing: each is refused, and told the one thing. Unusual right ones pass."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mutants import nb00, nb01, nb03
from speeds import first
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from labs.chapters.nb00 import exercise_busbw
from labs.chapters.nb00 import solutions as solutions_00
from labs.chapters.nb01 import solutions as solutions_01
from labs.chapters.nb03 import solutions as solutions_03
from labs.kit.check import Mistake, examine


def told(exercise_id, wrong, words):
    outcome = examine(exercise_id, wrong)
    assert outcome.state == "not yet" and words in outcome.text, outcome.text


def passes(exercise_id, right):
    outcome = examine(exercise_id, right)
    assert outcome.state == "passed", outcome.text


# -- 00.1: each but for one rule


def gpu_cores_too(report):
    """Right: more ranks than cores take turns on any device."""
    return "cores" if report["ranks"] > report["usable cores"] else solutions_00.diagnose(report)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (
            {
                "overhead": lambda r: (
                    nb00._calls_in_ms(r)
                    or r["pass: operators"] * r["host time of an operator (µs)"] > r["pass: memory (µs)"]
                )
            },
            "limited by arithmetic",
        ),
        (
            {"tf32": lambda r: r["FP32 product (TFLOP/s)"] > 2 * (r["published FP32 peak (TFLOP/s)"] or 1e9)},
            "above the card's published FP32 peak, 30.3",
        ),
        ({"cache": lambda r: r["triad: its arrays together (MiB)"] < 40}, "45 MiB together, and the caches 50"),
        ({"busy": lambda r: r["busy before the run (%)"] > 90}, "60 % busy"),
    ],
)
def test_a_rule_that_is_nearly_right_is_told(rule, words):
    told("00.1", nb00._diagnose(**rule), words)


def test_cores_are_counted_on_any_device():
    passes("00.1", gpu_cores_too)


# -- 00.2


def cut(affinity, quota, period):
    return max(1, min(len(affinity), int(quota) // int(period)))


def quota_by(no_quota, cores=len):
    """Right but for how it is seen that there is no quota, and how many cores there are then."""

    def usable_cores(affinity, cpu_max):
        return cores(affinity) if no_quota(cpu_max) else cut(affinity, *cpu_max.split())

    return usable_cores


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (quota_by(lambda text: text == "max 100000"), '"max 50000" ends in ValueError: you compare the whole text'),
        (
            lambda affinity, cpu_max: (
                {"max 100000": len(affinity)}.get(cpu_max) or cut(affinity, *cpu_max.replace("max", "100000").split())
            ),
            '"max 50000" gives 2, not 4: you compare the whole text',
        ),
        (quota_by(lambda text: "max" in text, lambda affinity: 4), 'affinity {5} and "max 100000" you return 4'),
        (lambda affinity, cpu_max: str(solutions_00.usable_cores(affinity, cpu_max)), "you return the text '4'"),
        (
            lambda affinity, cpu_max: (
                len(affinity)
                if "max" in cpu_max
                else max(1, min(len(affinity), int(cpu_max.split()[0]) / int(cpu_max.split()[1])))
            ),
            "2.7 cores stay 2.7",
        ),
    ],
)
def test_cores_that_are_nearly_right_are_told(wrong, words):
    told("00.2", wrong, words)


@pytest.mark.parametrize("no_quota", [lambda text: "max" in text, lambda text: text.split()[0] == "max"])
def test_any_way_to_see_that_there_is_no_quota_passes(no_quota):
    passes("00.2", quota_by(no_quota))


# -- 00.3: without ranks, from the times of calls that a clock would have seen


@pytest.fixture
def calls_s(monkeypatch):
    """Seconds of each rank's calls, the first one included, in place of a measurement: a list of lists to fill."""
    times: list[list[float]] = []

    def on_ranks(body, ranks, f, size, first_s, when):
        log = [[(size, 10.0 * k, 10.0 * k + s) for k, s in enumerate(rank)] for rank in times[:ranks]]
        return [(f(size, ranks), rank) for rank in log]

    monkeypatch.setattr(exercise_busbw, "_on_a_made_clock", lambda f: None)
    monkeypatch.setattr(exercise_busbw, "on_ranks", on_ranks)
    return times


def judged(rate):
    try:
        exercise_busbw.check_busbw(lambda size, ranks: rate(size, ranks) * 2 * (ranks - 1) / ranks)
    except Mistake as mistake:
        return str(mistake)
    return ""


@pytest.mark.parametrize("clock_s", [0.0, 1e-4, 8e-4])
@pytest.mark.parametrize("spread", [0.0, 0.02, 0.04])
def test_gib_are_told_from_gb(calls_s, clock_s, spread):
    """Also where calls differ by more than half of what a GiB has more than a GB; `clock_s` is what a clock adds."""
    calls_s += [[1.1, *(own * (1 + spread * k) for k in (0, 0.5, 1))] for own in (0.02, 0.02, 0.1)]
    calls_s[1] = calls_s[2]  # the case of two ranks has the slowest one, too
    median = 0.1 * (1 + spread / 2) + clock_s
    assert "GiB/s" in judged(lambda size, ranks: size / median / 2**30)
    assert judged(lambda size, ranks: size / median / 1e9) == ""
    assert judged(lambda size, ranks: size / (median * 1.04) / 1e9) == ""  # a clock around more than the call


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        (lambda size, ranks: size / 4 / 0.1 / 1e9, "the size is taken in elements"),
        (lambda size, ranks: size / 1e9 / (0.14 if ranks == 3 else 0.12), "the time of all ranks added up"),
        (lambda size, ranks: size / 1e9 / (0.14 / 3 if ranks == 3 else 0.06), "the mean of the ranks' times"),
        (lambda size, ranks: size / 1e9 / 0.1 / (2 * (ranks - 1) / ranks) ** 2, "the factor is upside down"),
        (lambda size, ranks: size / 1e9 / 0.1 * (4 / 3) / (2 * (ranks - 1) / ranks), "the number of ranks is fixed"),
        (lambda size, ranks: 0.1 / (2 * (ranks - 1) / ranks), "the seconds of a call"),
    ],
)
def test_a_bandwidth_that_is_nearly_right_is_told(calls_s, rate, words):
    calls_s += [[1.1, 0.02, 0.02, 0.02], [1.1, 0.1, 0.1, 0.1], [1.1, 0.02, 0.02, 0.02]]
    assert words in judged(rate)


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


@pytest.mark.parametrize("steps", [4, 10])
def test_long_blocks_are_told(steps):
    assert f"your samples are blocks of {steps} steps" in examine("01.1", of_blocks(steps, steps, n=30)).text


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


# -- 01.2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ratios, verdict: (verdict, ratios), "the verdict first, then the ratios"),
        (lambda ratios, verdict: ([100 * r for r in ratios], verdict), "ratios in percent"),
        (lambda ratios, verdict: ([math.log(r) for r in ratios], verdict), "logarithms of ratios"),
    ],
)
def test_a_comparison_that_is_nearly_right_is_told(change, words):
    told("01.2", lambda *arguments: change(*solutions_01.compare(*arguments)), words)


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


# -- 03.1


def shard(seed=lambda epoch, seed: 100 * seed + epoch, begin=lambda rank, ranks: rank, of=list):
    """Right but for the generator's seed, for whose turn it is first, or for what `of` makes of a rank's part."""

    def shard(dataset_size, rank, world_size, epoch, seed_):
        order = nb03._order(dataset_size, seed(epoch, seed_))
        total = -(-dataset_size // world_size) * world_size
        return of((order * total)[:total][begin(rank, world_size) :: world_size])

    return lambda dataset_size, rank, world_size, epoch, seed: shard(dataset_size, rank, world_size, epoch, seed)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (shard(lambda epoch, seed: 100 * seed + epoch % 2), "epoch 0 and epoch 2 have the same order"),
        (shard(lambda epoch, seed: 100 * seed + min(epoch, 1)), "epoch 1 and epoch 2 have the same order"),
        (shard(lambda epoch, seed: 100 * epoch + seed % 2), "seeds 7 and 9 give the same order"),
        (shard(of=lambda part: [float(i) for i in part]), "is not a list of indices"),
        (shard(of=lambda part: [str(i) for i in part]), "is not a list of indices"),
        (shard(of=sorted), "each rank's samples are sorted"),
    ],
)
def test_a_sampler_that_is_nearly_right_is_told(wrong, words):
    told("03.1", wrong, words)


@pytest.mark.parametrize(
    "right",
    [
        shard(begin=lambda rank, ranks: ranks - 1 - rank),
        shard(begin=lambda rank, ranks: (rank + 1) % ranks),
        shard(of=torch.tensor),
        shard(of=np.array),
    ],
)
def test_unusual_samplers_pass(right):
    passes("03.1", right)


# -- 03.2


def each_gradient(change):
    def all_reduce_gradients(model):
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            change(p.grad)

    return all_reduce_gradients


@pytest.mark.parametrize(
    ("change", "words"),
    first(
        1,
        [
            (lambda g: dist.all_reduce(g, op=dist.ReduceOp.MAX), "the maximum of the ranks' numbers"),
            (lambda g: dist.broadcast(g, 1), "all ranks have rank 1's gradients"),
            (lambda g: g.div_(dist.get_world_size()), "no sum came before or after"),
        ],
    ),
)
def test_a_mean_that_is_nearly_right_is_told(change, words):
    told("03.2", each_gradient(change), words)


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
    first(
        4,
        [
            (nb03._accumulate(weighed(ranks=2)), "the number of ranks is fixed"),
            (nb03._accumulate(weighed(rows=16)), "the number of rows is fixed"),
            (nb03._accumulate(weighed(ranks=2, rows=16)), "the number of ranks and of rows is fixed"),
            (nb03._accumulate(syncs=lambda i, last: i >= 2), "the number of micro-batches is fixed"),
            (nb03._accumulate(syncs=lambda i, last: i == 2), "what comes after the 3rd stays on each rank"),
            (
                nb03._accumulate(
                    lambda _: [12 / 16, 8 / 16, 4 / 16] if dist.get_rank() == 0 else [4 / 16, 2 / 16, 2 / 16]
                ),
                "it raises an error",
            ),
            (first_three, "those after the 3rd are left out"),
            (one_forward, "12 rows went through the model at once"),
            (around_ddp, "a forward of the module inside goes around DDP"),
            (nb03._accumulate(lambda batches: [len(x) for x, _ in batches]), "nothing is divided by the number of all"),
            (
                nb03._accumulate(lambda batches: [2 * w for w in nb03._weights(batches)]),
                "twice as large as it should be",
            ),
        ],
    ),
)
def test_a_step_that_is_nearly_right_is_told(wrong, words):
    told("03.3", wrong, words)


# -- 03.4


def program(
    epoch_of=lambda epoch: epoch,
    adds_up=False,
    saved=lambda model: model.state_dict(),
    loads=True,
    tested=lambda n, rank, ranks: range(rank, n, ranks),
    returned=lambda share, rank: share,
    **sampled,
):
    """The program, repaired but for one thing."""

    def train(model, train_set, test_set, epochs, path):
        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        ddp, sampler = DistributedDataParallel(model), DistributedSampler(train_set, **sampled)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(epochs):
            sampler.set_epoch(epoch_of(epoch))
            for x, y in DataLoader(train_set, batch_size=8, sampler=sampler):
                if not adds_up:
                    optimizer.zero_grad()
                torch.nn.functional.cross_entropy(ddp(x), y).backward()
                optimizer.step()
        if rank == 0:
            torch.save(saved(model), path)
        dist.barrier()
        if loads:
            model.load_state_dict(torch.load(path, weights_only=True))
        mine = [test_set[i] for i in tested(len(test_set), rank, ranks)]
        counts = torch.tensor([sum(int(model(x).argmax() == y) for x, y in mine), len(mine)])
        dist.all_reduce(counts)
        dist.destroy_process_group()
        return returned((counts[0] / counts[1]).item(), rank)

    return train


@pytest.mark.parametrize(
    ("fault", "words"),
    first(
        1,
        [
            ({"adds_up": True}, "the gradients are never set back"),
            ({"shuffle": False}, "nothing is shuffled"),
            ({"epoch_of": lambda epoch: epoch % 2}, "epochs 0 and 2 have the same order"),
            ({"saved": lambda model: model, "loads": False}, "the file holds more than tensors"),
            ({"tested": lambda n, rank, ranks: [i % n for i in range(rank, n + 1, ranks)]}, "8 samples were counted"),
            ({"returned": lambda share, rank: None if rank else share}, "rank 1 returns None"),
        ],
    ),
)
def test_a_program_that_is_nearly_right_is_told(fault, words):
    told("03.4", program(**fault), words)


def test_an_accuracy_as_a_tensor_passes():
    passes("03.4", program(returned=lambda share, rank: torch.tensor(share), loads=False))
