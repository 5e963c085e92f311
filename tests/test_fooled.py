"""Where an effect is planted, the honest way finds the truth and the fooling one misses it; nothing stays behind."""

import contextlib
import itertools
import os
import statistics
import subprocess
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from again import holds_soon
from processes import MARK, PYTHON, assert_no_survivors, new_environment

from labs import fooled as lab
from labs.chapters.nb11 import editable_compare
from labs.fooled import learning, two_units
from labs.fooled import neighbour as neighbour_module
from labs.fooled.busy_as_useful import Work
from labs.fooled.neighbour import neighbour_on
from labs.fooled.ways import WAYS
from labs.kit import measure
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.record import Record, Records

CPU = torch.device("cpu")


class Clock:
    """A clock that only moves when somebody works."""

    def __init__(self):
        self.now = 0.0

    def costs(self, *seconds):
        """A step that takes these seconds, again and again."""
        each = itertools.cycle(seconds)
        return lambda *_: self.spend(next(each))

    def spend(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(measure.time, "perf_counter", lambda: made.now)
    return made


def rank(clock=None, world_size=2, slowest=list):
    return SimpleNamespace(device=CPU, world_size=world_size, slowest=slowest, barrier=lambda: None)


# -- each way, with a planted effect


def test_a_clock_that_does_not_wait_sees_the_orders_alone(clock):
    class Stream:
        done = 0.0

        def submit(self, step):
            clock.spend(0.001)
            self.done = max(self.done, clock.now) + 1.0

        def synchronize(self):
            clock.now = max(clock.now, self.done)

    told, so = lab.clock_stops_early(None, 10, Stream())
    assert (told, so) == (pytest.approx(0.001), pytest.approx(1.0, rel=0.001))


def test_first_steps_that_take_longer_are_not_those_of_a_training(clock):
    first = iter([7.0, 3.0])
    told, so = lab.first_steps_count(lambda: lambda: clock.spend(next(first, 1.0)), 4, CPU)
    assert (told, so) == (3.0, 1.0)


def test_a_best_time_beats_a_median_of_the_same_code(clock):
    told, so = lab.best_against_median(clock.costs(1.0, 1.25, 1.5), 12, CPU, 0)
    assert told >= 1.25 and so == pytest.approx(1.0, abs=0.25) and so < told


def test_a_neighbour_slows_down_whatever_comes_second(clock):
    there, visits = [], []

    @contextlib.contextmanager
    def neighbour(device):
        there.append(device)
        yield
        visits.append(there.pop())

    told, so = lab.one_after_the_other(lambda: clock.spend(2.0 if there else 1.0), 6, CPU, neighbour, 0)
    assert (told, so) == (2.0, 1.0) and visits == [CPU, CPU]


@pytest.mark.parametrize(("first_s", "usual_s"), [(1.5, 1.0), (1.0, 1.5)])
def test_one_pair_with_an_outlier_decides_wrongly_and_many_do_not(clock, first_s, usual_s):
    first = iter([first_s])
    told, so = lab.single_pair_decides(lambda: clock.spend(next(first, usual_s)), 20, CPU, 0)
    assert (told, so) == (1.5, 1.0)


def test_a_debug_switch_in_the_baseline_is_no_speed_up_of_ours(clock):
    told, so = lab.baseline_in_debug_mode(lambda: clock.spend(3.0 if torch.is_anomaly_enabled() else 1.0), 4, CPU, 0)
    assert (told, so) == (3.0, 1.0) and not torch.is_anomaly_enabled()


def test_a_batch_that_grows_with_the_ranks_looks_like_a_speed_up(clock):
    steps = {"alone": clock.costs(1.0), "a batch each": clock.costs(1.25), "one batch shared": clock.costs(1.0)}
    told, so = lab.weak_told_as_strong(steps, 4, rank())
    assert (told, so) == (pytest.approx(1.6), pytest.approx(1.0))


def test_padding_that_is_counted_hides_what_sorting_by_length_gains(clock):
    long, short = torch.ones(20, dtype=torch.int64), torch.ones(5, dtype=torch.int64)
    pad = lambda *rows: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # noqa: E731
    batches = {"as they come": [pad(long, short)] * 2, "by length": [pad(short, short), pad(long, long)]}
    told, so = two_units.padding_counts_as_tokens(lambda batch: clock.spend(batch.numel()), batches, CPU, 0)
    assert (told, so) == (pytest.approx(1.0), pytest.approx(80 / 50)), "a token costs the same in both"
    told, so = two_units.padding_counts_as_tokens(lambda batch: clock.spend(1.0), batches, CPU, 0)
    assert (told, so) == (pytest.approx(50 / 80), pytest.approx(1.0)), "where a batch costs the same nothing is gained"


def test_both_orders_hold_the_same_sentences_and_padding_is_no_target():
    rows = two_units.sentences()
    first = two_units.batched(rows, CPU)
    assert len(rows) == two_units.SENTENCES and rows[0].numel() == 3, "Call me Ishmael."
    words = lambda batches: sum(int((b != two_units.PADDING).sum()) for b in batches)  # noqa: E731
    by_length = two_units.batched(sorted(rows, key=len), CPU)
    assert words(first) == words(by_length) == sum(map(len, rows)), "no word has the padding's number"
    assert sum(b.numel() for b in by_length) < 0.7 * sum(b.numel() for b in first)
    losses = []
    entropy = torch.nn.functional.cross_entropy
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            torch.nn.functional, "cross_entropy", lambda *a, **k: (losses.append(entropy(*a, **k)), losses[-1])[1]
        )
        for wider in (0, 7):
            row = torch.nn.functional.pad(rows[1][None], (0, wider))
            two_units.next_word_training(CPU, 0)(row)
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)


def test_samples_per_second_are_not_the_time_to_a_loss():
    done = {(32, 0.1): (1000, 1.0), (1024, 0.8): (16000, 2.0)}
    told, so = lab.samples_told_as_learning(lambda *how: done[how], {32: 0.1, 1024: 0.8})
    assert (told, so) == (8.0, 0.5)


@pytest.mark.parametrize("best", learning.RATES)
def test_the_learning_rate_that_needs_the_fewest_samples_is_found_wherever_it_is(best):
    asked = []

    def samples(rate, most):
        asked.append(rate)
        return min(most, round(1000 * max(rate / best, best / rate)))

    assert learning.best_rate(samples) == best and len(set(asked)) == len(asked)


def test_a_training_counts_its_samples_until_its_loss_and_no_judging(monkeypatch):
    data = lab.vectors(2000, CPU)
    judged, steps = [], []
    entropy, time_steps = torch.nn.functional.cross_entropy, measure.time_steps

    def spy(output, target):
        judged.extend([None] * (not torch.is_grad_enabled()))
        return entropy(output, target)

    monkeypatch.setattr(learning.nn.functional, "cross_entropy", spy)
    monkeypatch.setattr(
        measure, "time_steps", lambda step, n, device: (steps.append(n), time_steps(step, n, device), [0.5] * n)[-1]
    )
    samples, seconds = lab.train_to_loss(128, 0.1, 0, data, 1.8)
    assert samples == 128 * sum(steps) and seconds == 0.5 * sum(steps) and len(judged) == len(steps)
    assert lab.train_to_loss(128, 0.1, 0, data, 0.0, 1500)[0] == 1536, "a loss that nobody reaches ends, too"


def test_a_device_that_is_busy_all_the_time_may_do_a_tenth_of_what_it_could(clock):
    training, product = Work(clock.costs(1.0), 10.0), Work(clock.costs(0.5), 50.0)
    busy = SimpleNamespace(busy_s=lambda: 5.0 + clock.now, memory_s=2.0)
    assert lab.busy_told_as_useful(training, product, busy, 8.0, CPU) == (1.0, 0.1)
    half = SimpleNamespace(busy_s=lambda: clock.now / 2, memory_s=0.0)
    assert lab.busy_told_as_useful(training, product, half, 8.0, CPU) == (0.5, 0.1)


def test_a_counter_that_looks_back_is_not_asked_about_the_product_before(clock):
    """What NVML says of the last two seconds: all busy with the product, then nothing."""
    start = clock.now + 0.5
    late = SimpleNamespace(busy_s=lambda: min(clock.now, start + 2.0), memory_s=2.0)
    told, _ = lab.busy_told_as_useful(Work(clock.costs(1.0), 1.0), Work(clock.costs(0.5), 1.0), late, 8.0, CPU)
    assert told == 0.0


def test_the_clock_of_a_rank_with_little_work_is_not_the_job_s(clock):
    told, so = lab.one_clock_of_many(clock.costs(1.0), rank(slowest=lambda samples: [max(*samples, 2.0)]))
    assert (told, so) == (1.0, 2.0)


def test_latency_makes_a_small_message_s_rate_useless_for_a_large_one(clock):
    told, so = lab.rate_of_another_size(lambda n: clock.spend(0.001 + n / 1e9), 40_000, 40_000_000, 4, rank())
    assert so == pytest.approx(0.041) and told == pytest.approx(1.04)


# -- what comes out of a run


def made(way, fooled, honest, kind="measured", **case):
    case |= {"way": way} | ({"truth": WAYS[way].truth} if WAYS[way].truth else {})
    unit = WAYS[way].unit
    return [
        Record("fooled", "fooled", unit, tuple(fooled), kind, case, layout={"world_size": 2}),
        Record("fooled", "honest", unit, tuple(honest), "measured", case, layout={"world_size": 2}),
    ]


SURE = [2.0, 2.1, 1.9, 2.0, 2.05, 1.95]
EVEN = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98]


def test_a_way_fools_only_if_this_run_shows_it():
    found = {r.way.key: r for r in lab.rows(Records([*made("blocked", SURE, EVEN), *made("cold_start", EVEN, EVEN)]))}
    assert found["blocked"].fools and found["blocked"].factor == pytest.approx(2, rel=0.02)
    assert not found["cold_start"].fools
    few = lab.rows(Records(made("blocked", SURE[:2], EVEN[:2])))[0]
    assert not few.fools, "two samples hold no interval"


def test_an_answer_is_held_against_the_truth_where_it_is_known_and_against_the_honest_one_elsewhere():
    known, other = lab.rows(Records([*made("blocked", SURE, SURE), *made("early_clock", SURE, SURE)]))[::-1]
    assert known.fooled.value == pytest.approx(2.0) and known.honest.value == pytest.approx(2.0)
    assert other.fooled.value == pytest.approx(1.0) and other.honest.value == pytest.approx(1.0)


def test_a_factor_counts_in_either_direction():
    [found] = lab.rows(Records(made("early_clock", [0.01] * 6, EVEN)))
    assert found.gap.value == pytest.approx(0.01, rel=0.03) and found.factor == pytest.approx(100, rel=0.03)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"ways": ("block",)}, "ways: there is no 'block': did you mean"),
        ({"batch_size": 1}, "batch_size must be from 2"),
        ({"seed": -1}, "seed must be from 0"),
        ({"seconds": 0.0}, "seconds must be a positive number, not 0"),
    ],
)
def test_bad_input(values, words):
    with pytest.raises(BadInput, match=words):
        lab.Config(**values)


# -- real runs


def neighbours():
    """Busy processes that this process has started."""
    return [p for p in psutil.Process().children(recursive=True) if "os.getppid" in " ".join(p.cmdline())]


def test_a_neighbour_is_a_busy_process_that_ends_with_the_block_also_after_an_error():
    with neighbour_on(CPU):
        [found] = neighbours()
        before = found.cpu_times().user
        assert holds_soon(lambda used: used > before, before, lambda: (time.sleep(0.3), found.cpu_times().user)[1])
    assert not neighbours()
    with pytest.raises(KeyError), neighbour_on(CPU):
        raise KeyError
    assert not neighbours()


def test_a_neighbour_whose_starter_is_gone_before_it_begins_does_not_stay():
    nobody = str(os.getpid() + 10_000_000)  # above any process id
    subprocess.run([*PYTHON, "-c", neighbour_module.BUSY, nobody], check=True, timeout=100)


@pytest.mark.drill
def test_a_neighbour_ends_when_whoever_started_it_is_killed():
    program = (
        "import os, torch\nfrom labs.fooled.neighbour import neighbour_on\n"
        "with neighbour_on(torch.device('cpu')):\n    os.kill(os.getpid(), 9)"
    )
    environment = new_environment()
    done = subprocess.run([*PYTHON, "-c", program], env=environment)
    assert done.returncode == -9
    assert_no_survivors(environment[MARK])


@pytest.mark.quiet
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_way_runs_and_nothing_is_left(ranks):
    run = launch("fooled", ranks, smoke=True, oversubscribe=True)
    measured, left = {r.case["way"] for r in run.where("honest")}, {r.case["way"] for r in run.where("left_out")}
    wanted = {way.key for way in WAYS.values() if way.ranks > ranks}
    assert left == wanted and measured == set(WAYS) - wanted
    assert all(len(r.samples) == 2 and min(r.samples) > 0 for r in run.where("honest"))
    assert all(len(r.samples) == 2 for r in run.where("fooled"))
    assert {r.case["way"] for r in run if r.kind == "modelled" and r.metric == "fooled"} == {"early_clock"}
    assert not any(r.fools for r in lab.rows(run) if r.gap.n < measure.fewest())
    assert not neighbours()


CELL = """
def compare(a, b, seconds_of, rounds=20):
    seconds = {a: [], b: []}
    for program in [a, b, b, a] * (rounds // 2):
        seconds[program].append(seconds_of(program))
    ratios = [of_b / of_a for of_a, of_b in zip(seconds[a], seconds[b])]
    return statistics.median(ratios)
"""
ONE_AFTER_THE_OTHER = "[a, b, b, a] * (rounds // 2)", "[a] * rounds + [b] * rounds"
BEST_AGAINST_MEDIAN = "statistics.median(ratios)", "min(seconds[b]) / statistics.median(seconds[a])"
A_SINGLE_PAIR = "rounds=20", "rounds=2"


def comparison(*edit):
    """The function of the editable cell, after an edit."""
    names = {"statistics": statistics}
    exec(CELL.replace(*edit) if edit else CELL, names)
    return names["compare"]


@pytest.mark.parametrize(
    ("edit", "wrong"),
    [((), [0, 0]), (ONE_AFTER_THE_OTHER, [6, 6]), (BEST_AGAINST_MEDIAN, [6, 6]), (A_SINGLE_PAIR, [6, 6])],
)
def test_one_line_of_the_editable_comparison_decides_beside_a_neighbour(clock, monkeypatch, edit, wrong):
    there = []

    @contextlib.contextmanager
    def neighbour(device):
        there.append(device)
        yield
        there.pop()

    monkeypatch.setattr(editable_compare, "neighbour_on", neighbour)
    step = lambda: clock.spend(2.0 if there else 1.0)  # noqa: E731
    monkeypatch.setattr(
        editable_compare, "probing", SimpleNamespace(matmul_step=lambda *_: step, inner_calls=lambda *_: 12)
    )
    said = editable_compare._said(comparison(*edit))
    assert [found for _, _, found in editable_compare.judged(said)] == wrong and not there
    assert [truth for truth, _, _ in editable_compare.judged(said)] == [1.0, 1.2]


@pytest.mark.parametrize(("timings", "alone"), [(2, 1), (4, 1), (6, 3), (40, 19)])
def test_the_neighbour_comes_within_a_pair_about_the_middle(timings, alone):
    compare = lambda a, b, seconds_of: sum(seconds_of(a) for _ in range(timings))  # noqa: E731
    assert editable_compare.moving_in(compare) == alone


def test_a_comparison_that_never_ends_is_told():
    def compare(a, b, seconds_of):
        while True:
            seconds_of(a)

    with pytest.raises(RuntimeError, match="does its loop end"):
        editable_compare.moving_in(compare)
