"""The tuner: its decisions on synthetic rates, its search on simulated pipelines, and on real ones that sleep."""

import os
import random
import time

import psutil
import pytest
import torch
from again import holds_soon
from processes import is_backstage
from torch.utils.data import DataLoader, Dataset, IterableDataset

from labs import tune_dataloader as lab
from labs.common.loading.feed import Feed, expected
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.tune_dataloader import rules
from labs.tune_dataloader.bench import MODEL, Bench, Evidence, Turn
from labs.tune_dataloader.report import Tuning
from labs.tune_dataloader.rules import Setting
from labs.tune_dataloader.search import search, tune_dataloader, untried

CPU = torch.device("cpu")


# -- decisions, on rates in samples per second


@pytest.mark.parametrize(
    ("most", "steps"), [(0, [0]), (1, [0, 1]), (2, [0, 1, 2]), (6, [0, 1, 2, 4, 6]), (8, [0, 1, 2, 4, 8])]
)
def test_the_ladder_doubles_up_to_what_is_allowed(most, steps):
    assert rules.ladder(most) == steps


@pytest.mark.parametrize(
    ("loaders", "reason"),
    [
        ({0: 50}, ""),
        ({0: 5000}, ""),  # 2 % of the model's time
        ({0: 10_000}, "faster than the model"),  # 1 %
        ({0: 50, 1: 129}, ""),
        ({0: 50, 1: 131}, "faster than the model"),
        ({0: 50, 1: 40}, ""),  # the first worker costs more than it brings, the second may pay
        ({0: 50, 1: 40, 2: 43}, "no gain"),
        ({0: 50, 1: 40, 2: 60}, ""),
        ({0: 50, 1: 50, 2: 100, 4: 109}, "no gain"),
        ({0: 50, 1: 50, 2: 100, 4: 111}, ""),
        ({0: 300, 1: 20, 2: 24}, "cannot catch up"),  # 24 x 1.2 x 1.2 with 8, against 75 of worker 0
        ({0: 300, 1: 20, 2: 40}, ""),  # 160 with 8
    ],
)
def test_when_more_workers_cannot_help(loaders, reason):
    assert rules.reason_to_stop(100, loaders, most=8) == reason


@pytest.mark.parametrize(
    ("model", "loaders", "workers"),
    [
        (100, {0: 20_000}, [0]),
        (1000, {0: 50, 1: 50, 2: 100, 4: 200}, [4]),  # half of the best is not compared
        (100, {0: 50, 1: 80, 2: 160}, [1, 2]),
        (1000, {0: 90, 1: 100, 2: 110, 4: 111}, [1, 2, 4]),  # both neighbours, and none beyond them
        (1000, {0: 900, 1: 200, 2: 220}, [0]),
        (100, {0: 50, 1: 48}, [0, 1]),  # with one core the worker has none of its own: together 0 may be faster
        (100, {0: 350, 1: 88, 2: 150}, [1, 2]),  # 0 is far enough from 2; its neighbour is 1
    ],
)
def test_who_is_compared(model, loaders, workers):
    assert rules.finalists(model, loaders) == workers


@pytest.mark.parametrize(
    ("choice", "loaders", "reached", "above"),
    [
        (4, {0: 50, 1: 50, 2: 100, 4: 150}, 0.9, 8),
        (4, {0: 50, 1: 50, 2: 100, 4: 150}, 0.96, None),  # the model alone is no faster
        (2, {0: 50, 1: 50, 2: 100, 4: 150}, 0.8, None),  # more were tried, and are no better
        (4, {0: 50, 1: 50, 2: 100, 4: 105}, 0.8, None),  # the last doubling brought nothing
        (8, {0: 50, 1: 50, 2: 100, 4: 150}, 0.9, None),  # none are left
        (0, {0: 50}, 0.5, 1),
    ],
)
def test_whether_one_more_is_tried(choice, loaders, reached, above):
    assert rules.one_more(choice, 130, loaders, 8, reached) == above


def test_a_ratio_of_few_pairs_claims_little():
    one = rules.ratio([80.0], [100.0])
    assert (one.value, one.low, one.high, one.n) == pytest.approx((0.8, 0.8 / 1.5, 1.2, 1))
    three = rules.ratio([80.0, 82.0, 84.0], [100.0] * 3)
    assert (three.value, three.low, three.high) == pytest.approx((0.82, 0.8**2 / 0.84, 0.84**2 / 0.8))
    assert rules.ratio([1.0, 2.0, 9.0], [1.0] * 3).low > 0  # of rates, which are positive
    six = rules.ratio([80.0, 82.0, 84.0] * 2, [100.0] * 6)
    assert 0.8 <= six.low <= 0.82 <= six.high <= 0.84 and six.value == pytest.approx(0.82)


ZERO, ONE, TWO, FOUR = Setting(0), Setting(1), Setting(2), Setting(4)


@pytest.mark.parametrize(
    ("rates", "setting", "sure"),
    [
        ({TWO: [100] * 3}, TWO, True),
        ({TWO: [100]}, TWO, False),
        ({ONE: [50, 51, 50], TWO: [100, 101, 100]}, TWO, True),
        ({TWO: [100, 101, 100], FOUR: [101, 100, 101]}, TWO, True),
        ({TWO: [95, 99, 96], FOUR: [98, 103, 100]}, FOUR, True),  # 4 % slower in every round
        ({TWO: [95, 104, 80], FOUR: [100, 95, 100]}, TWO, False),  # 5 % slower, or not
        ({TWO: [80, 90, 104], FOUR: [100, 98, 97]}, FOUR, False),  # 8 % slower, or not
        ({TWO: [100], FOUR: [100]}, TWO, False),  # one pair shows nothing
        ({ONE: [98, 98, 98], TWO: [97, 97, 97], FOUR: [100, 100, 100]}, ONE, True),
    ],
)
def test_the_cheapest_that_may_be_as_good_is_taken(rates, setting, sure):
    found = rules.cheapest(rates)
    assert (found.setting, found.sure) == (setting, sure)


@pytest.mark.parametrize(
    ("loader", "waits", "bursty"),
    [
        (150, [0.1] * 19 + [3.0], True),  # each step takes 1
        (105, [0.1] * 19 + [3.0], False),  # hardly faster than the model: of course it waits
        (150, [0.0] * 19 + [0.9], False),  # too little to gain
        (150, [0.2] * 20, False),  # each step waits: a deeper queue would be as empty
    ],
)
def test_when_a_deeper_queue_may_help(loader, waits, bursty):
    assert rules.is_bursty(100, loader, waits, [1.0] * 20) is bursty


# -- the search, on pipelines that are simulated


class Simulated(Bench):
    """Turns take no time: rates come from functions, times `noise`; a turn moves the clock by `turn_s`."""

    def __init__(self, model, loader, together=None, *, noise=0.0, budget_s=60.0, turn_s=0.2, seed=0, bursty=()):
        self.model, self.loader, self.bursty = model, loader, bursty
        self.together = together or (lambda s: 0.98 * expected(model, loader(s.workers), s.workers))
        self.noise, self.turn_s, self.budget_s, self.clock = noise, turn_s, budget_s, 0.0
        self.draw, self.round, self.evidence, self.begun = random.Random(seed), 0, Evidence(), []

    def is_over(self, share=1.0):
        return self.clock >= share * self.budget_s

    def first(self):
        self.take(("loader", ZERO))
        self.take(MODEL)

    def take(self, arm, batches=0):
        self.begun.append(self.clock)
        self.clock += self.turn_s
        way, setting = arm
        rate = self.model if way == "model" else getattr(self, way)(setting if way == "together" else setting.workers)
        step_s = 1 / (rate * self.draw.gauss(1, self.noise))
        share = max(0.0, 1 - rate / self.model) if way == "together" else 0.0
        n = 8 * max(1, setting.workers if setting else 1)
        waits = [share * step_s] * n
        if setting in self.bursty:
            waits = [0.0] * (n - 1) + [n * share * step_s]
        feed = Feed(tuple(waits), (step_s * (1 - share),) * n, 1, max(1, setting.workers if setting else 1))
        self.evidence.append(Turn(arm, self.round, feed))


def tuned(bench, most=8):
    choice, capped = search(bench, most)
    return Tuning(choice, 1, bench.evidence, bench.clock, bench.budget_s, capped, untried(bench, choice, most))


def each(rate):
    """A loader whose workers bring `rate` each."""
    return lambda workers: rate * max(1, workers)


@pytest.mark.parametrize(
    ("model", "loader", "settings", "limit"),
    [
        (100, each(60), {"num_workers": 2}, "model"),
        (1000, each(60), {"num_workers": 8}, "loader"),
        (1000, lambda w: 60 * min(max(1, w), 2), {"num_workers": 2}, "loader"),  # 2 cores
        (100, lambda w: 20_000 if w == 0 else 900, {"num_workers": 0}, "model"),
        (1000, lambda w: 5000 if w == 0 else 100 * w, {"num_workers": 0}, "model"),
        (1000, lambda w: 300 if w == 0 else 200 * w, {"num_workers": 8}, "model"),  # the first worker does not pay
        (100, lambda w: 60 if w == 0 else 100 * min(w, 2) / 2, {"num_workers": 2}, "neither by more than noise"),
    ],
)
def test_the_search_finds_setting_and_limit(model, loader, settings, limit):
    found = tuned(Simulated(model, loader))
    assert (found.choice.setting.options, found.limit, found.choice.sure) == (settings, limit, True)


def test_workers_that_share_cores_with_the_model_are_judged_together():
    """Alone four workers load 80 % more than two; with the model on the same cores they are slower."""
    together = {1: 40, 2: 75, 4: 60, 8: 50}
    found = tuned(Simulated(100, lambda w: {1: 45, 2: 90, 4: 160}.get(w, 50), lambda s: together.get(s.workers, 33)))
    assert found.choice.setting == Setting(2) and found.choice.sure
    assert "they share cores" in str(found)


def test_bursts_are_met_with_a_deeper_queue_and_nothing_else_is():
    together = {(2, 2): 80, (2, 4): 90, (2, 8): 99, (4, 2): 85, (4, 4): 85, (4, 8): 85}
    shares = {"bursty": [Setting(2), Setting(4)]}
    found = tuned(Simulated(100, each(70), lambda s: together.get(s, 80 if s.workers == 8 else 40), **shares))
    assert found.settings == {"num_workers": 2, "prefetch_factor": 8, "persistent_workers": True}
    steady = Simulated(100, each(70), lambda s: together.get(s, 80 if s.workers == 8 else 40))
    assert {s.prefetch for _, s in (t.arm for t in steady.evidence) if s} <= {2} and (
        tuned(steady).choice.setting.prefetch == 2
    )


def pipeline(draw):
    """Rates of a model, and of a loader on 2 to 64 cores whose first worker may cost much more than it brings."""
    model, one = 10 ** draw.uniform(1.5, 4), 10 ** draw.uniform(1.5, 4)
    inside = one * (draw.uniform(1, 1.2) if draw.random() < 0.7 else draw.uniform(1, 8))
    cores, crowded = draw.choice([2, 4, 8, 64]), draw.uniform(0.7, 1.05)
    return model, lambda w: one * (w if w <= cores else cores * crowded) if w else inside


@pytest.mark.parametrize(("noise", "lost", "unsure"), [(0.01, 0, 0.02), (0.03, 0.03, 0.4)])
def test_what_is_chosen_has_95_percent_of_the_best_rate(noise, lost, unsure):
    shares, searched, doubts = [], 0, 0
    for seed in range(100):
        bench = Simulated(*pipeline(random.Random(seed)), noise=noise, seed=seed)
        found = tuned(bench)
        rates = {w: bench.together(Setting(w)) for w in (0, 1, 2, 4, 8)}
        share = bench.together(found.choice.setting) / max(rates.values())
        assert share >= 0.95 or not found.choice.sure, (seed, share)
        shares.append(share)
        searched += len(bench.evidence)
        doubts += not found.choice.sure
    assert sum(s < 0.95 for s in shares) <= 100 * lost and min(shares) > 0.9
    assert doubts <= 100 * unsure and searched / 100 < 25


@pytest.mark.parametrize("budget_s", [0.1, 0.5, 1.0, 1.5, 2.0, 3.0, 15.0])
def test_no_turn_begins_when_the_budget_is_spent(budget_s):
    bench = Simulated(200, each(60), budget_s=budget_s, noise=0.02)
    found = tuned(bench)
    assert all(t < budget_s for t in bench.begun[3:]), "the first batch and a turn of the model are always taken"
    assert found.limit and len(found.table) >= 2 and str(found) == repr(found)
    assert found.choice.sure is (budget_s == 15.0)
    if not found.choice.sure:
        assert "Not sure" in str(found) and "aise budget_s" in str(found)


def test_to_hand_over_is_blamed_only_where_a_worker_brings_far_less():
    """A worker as fast as the process itself shows that handing over costs nothing."""
    found = tuned(Simulated(1000, each(50), turn_s=1.0, budget_s=3))
    assert found.choice.share is None and found.limit == "loader"
    assert "hand a batch over" not in str(found) and "aise budget_s" in str(found)
    far = tuned(Simulated(5000, lambda w: 2000 if w == 0 else 90 * w))
    assert far.choice.setting.workers == 0 and "Next: to hand a batch over costs more" in str(far)


# -- what is told


def report(**kwargs):
    return tuned(Simulated(200, each(60), noise=0.01, **kwargs))


# -- real datasets and workers


class Waiting(Dataset):
    """Items that take `item_s`, and note when they were asked for, in this process."""

    def __init__(self, item_s=0.0, size=64, bad=-1):
        self.item_s, self.size, self.bad, self.asked = item_s, size, bad, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.asked.append(time.perf_counter())
        if index == self.bad:
            raise KeyError(f"no label for item {index}")
        time.sleep(self.item_s)
        return torch.full((4,), float(index)), index


@pytest.fixture(autouse=True)
def no_process_left():
    before = set(psutil.Process().children())
    yield
    left = [p for p in psutil.Process().children() if p not in before and not is_backstage(p, os.getpid())]
    assert left == []


@pytest.mark.quiet
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_slow_source_gets_workers_and_they_are_worth_it():
    def tuned():
        return tune_dataloader(Waiting(0.005), lambda batch: None, batch_size=2, max_workers=4, budget_s=10)

    def workers_pay(tuning):  # that 4 beat 2, or that more than 4 would bring more, a search of seconds may not tell
        workers = tuning.settings["num_workers"]
        chosen = Setting(workers, tuning.settings.get("prefetch_factor", 2))
        left = tuning.evidence.ratio(("together", chosen), MODEL).value
        return workers in (2, 4) and tuning.limit == "loader" and left < 0.5 < tuning.wait_share.value

    tuning = tuned()
    assert holds_soon(workers_pay, tuning, tuned)
    loader = DataLoader(Waiting(), 2, shuffle=True, **tuning.settings)
    assert len(list(loader)) == 32 and loader.persistent_workers == (loader.num_workers > 0)


@pytest.mark.quiet
def test_a_slow_model_needs_no_workers():
    def tuned():
        step = lambda batch: time.sleep(0.02)  # noqa: E731
        return tune_dataloader(Waiting(), step, batch_size=2, max_workers=4, budget_s=10)

    def is_fed(tuning):  # unsure, it may be; and that no batch is asked for after the budget is tested below
        limits = ("model", "neither by more than noise")
        return tuning.settings == {"num_workers": 0} and tuning.limit in limits and tuning.wait_share.low < 0.5

    assert holds_soon(is_fed, tuned(), tuned)


def test_the_step_gets_whole_batches_of_the_loader_with_its_options():
    seen = []
    collate = lambda items: {"x": torch.stack([x for x, _ in items]), "names": ["?"] * len(items)}  # noqa: E731
    tune_dataloader(Waiting(0.001), seen.append, batch_size=3, max_workers=0, budget_s=0.3, collate_fn=collate)
    assert {tuple(b["x"].shape) for b in seen} == {(3, 4)} and seen[0]["names"] == ["?"] * 3


def test_the_budget_is_a_bound_on_asking_for_batches(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])  # a clock that only samples move
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    dataset, start = Waiting(0.05), time.perf_counter()
    step = lambda batch: time.sleep(0.01)  # noqa: E731
    tune_dataloader(dataset, step, batch_size=4, max_workers=0, budget_s=0.5)
    assert 1 <= len(dataset.asked) / 4 <= 3 and dataset.asked[-4] - start < 1, "a batch takes 0.2 s, a turn has three"


def test_every_turn_reads_on_where_the_last_one_ended():
    """Otherwise a slow disk would look like the page cache."""
    bench = Bench(dataset := Waiting(), lambda batch: seen.extend(batch[1].tolist()), 4, CPU)
    seen = []
    bench.first()
    for _ in range(3):
        bench.take(("together", ZERO))
    order = seen[8:]  # the first batch goes through the step twice
    assert len(dataset.asked) > 128 and all(sorted(order[i : i + 64]) for i in range(0, 64))
    assert sorted(seen[:4] + order[:60]) == list(range(64))


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(9)


def no_step(batch):
    raise RuntimeError("shapes differ\nmore of it\nsize mismatch, 3 and 4\n")


WAITING = {"dataset": Waiting(), "step": lambda batch: None, "batch_size": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"batch_size": 65}, "a batch of 65 needs as many samples, and the dataset has 64"),
        ({"budget_s": 0}, "budget_s must be a positive number of seconds, not 0"),
        ({"budget_s": float("inf")}, "budget_s must be a positive"),
        ({"batch_size": "8"}, "batch_size must be a whole number, not '8'"),
        ({"max_workers": 2.5}, "max_workers must be a whole number, not 2.5"),
        ({"device": "gpu"}, "device 'gpu' cannot be used: "),
        ({"max_workers": -1}, "max_workers must not be negative: -1"),
        ({"dataset": []}, "the dataset is empty"),
        ({"dataset": Stream()}, "an iterable dataset cannot be tuned here"),
        ({"dataset": 7}, "the dataset, a int, needs __getitem__"),
        ({"dataset": Waiting(bad=0, size=4)}, "loading a batch raised KeyError: 'no label for item 0'"),
        ({"step": no_step}, "step(batch) raised RuntimeError: shapes differ ... size mismatch, 3 and 4"),
        ({"step": None}, "step(batch) raised TypeError: 'NoneType' object is not callable"),
        ({"num_workers": 2, "shuffle": True}, "leave out num_workers, shuffle: the tuner"),
        ({"collate_fn": lambda items: 1 / 0}, "loading a batch raised ZeroDivisionError: division by zero"),
        ({"pin_memry": True}, "loading a batch raised TypeError: "),
    ],
)
def test_bad_input_is_one_line(change, message):
    with pytest.raises(BadInput) as error:
        tune_dataloader(**(WAITING | {"budget_s": 1.0, "max_workers": 0} | change))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.drill
def test_an_interrupt_leaves_no_worker():
    calls = []

    def step(batch):
        calls.append(len(psutil.Process().children()))
        if calls[-1] > calls[0]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune_dataloader(Waiting(0.005), step, batch_size=4, max_workers=2, budget_s=10)


# -- the lab


def test_smoke_run_of_the_lab():
    run = launch("tune_dataloader", nproc=1, smoke=True)
    assert {r.case["by"] for r in run.where("rate_per_s")} == {"sweep", "tuned", "best"}
    assert {r.case["by"] for r in run.where("search_s")} == {"tuner", "sweep"}
    (row,) = lab.verdicts(run)
    assert row["workload"] == "tiny" and row["workers"] in (0, 1), "smoke tries no more; which is better, noise may say"
    again = lambda: launch("tune_dataloader", nproc=1, smoke=True)  # noqa: E731
    assert holds_soon(lambda run: lab.verdicts(run)[0]["share_of_best"].high > 0.5, run, again)


def factory():
    return Waiting(0.001), len


def test_a_dataset_of_ones_own_is_tuned_and_printed():
    run = launch("tune_dataloader", nproc=1, dataset="test_tuning:factory", batch_size=4, budget_s=2.0)
    assert "[rank 0] num_workers=" in run.printed
    ways = {r.case["way"] for r in run}
    if "Not sure" in run.printed:  # workers that start slowly on a busy machine leave no time for both together
        assert {"model alone", "loader alone"} <= ways
    else:
        assert "of each step waits for data" in run.printed
        assert ways == {"model alone", "loader alone", "both together"}


class Ragged(Waiting):
    def __getitem__(self, index):
        return torch.ones(1 + index % 5)


def ragged():
    return Ragged(), len


def padded():
    return Ragged(), len, {"collate_fn": torch.nn.utils.rnn.pad_sequence}


@pytest.mark.long
def test_items_of_different_sizes_need_the_collate_fn_of_their_loader():
    with pytest.raises(BadInput, match=r"equal size.*pass the collate_fn of your own DataLoader") as error:
        launch("tune_dataloader", nproc=1, dataset="test_tuning:ragged", batch_size=4)
    assert "\n" not in str(error.value)
    run = launch("tune_dataloader", nproc=1, dataset="test_tuning:padded", batch_size=4, budget_s=1.0)
    assert "[rank 0] num_workers=" in run.printed


def raises():
    raise OSError("no such bucket")
