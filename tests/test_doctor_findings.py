"""What the doctor concludes from profiles: planted bottlenecks come first, and noise is no finding."""

import math
import random

import pytest
from doctor_profiles import STARVED, STEP_S, WELL, made

from labs.doctor import compare, estimated_gain, report
from labs.doctor.bottlenecks import BOTTLENECKS, OPTION, RISK, SLOW, TRAINERS, UNPRICED, WRONG, Match, matched
from labs.doctor.findings import FROM_PARTS, INTERLEAVED, find, healthy, memory_growth, unknown
from labs.doctor.profile import Line, Loader

MODES = dict.fromkeys((b.mode for b in BOTTLENECKS if b.mode), STEP_S)


def names(ranks, *kinds):
    return [f.name for f in find(ranks) if f.kind in (kinds or (SLOW,))]


def test_a_healthy_script_has_no_finding():
    profile = made(modes=MODES)
    assert not find([profile])
    assert (
        len([text for text in healthy([profile]) if "no gain that this run can show" in text]) == len(MODES) - 1
    )  # no exchange


def test_of_many_intervals_together_few_runs_have_one_that_misses():
    """16 ways to take a step that change nothing, on a machine whose steps scatter by 10 %."""
    draw, accused = random.Random(1), 0
    for _ in range(40):
        ratios = [[math.exp(draw.gauss(0, 0.14)) for _ in range(8)] for _ in range(16)]
        accused += any(estimated_gain.standing(estimated_gain.of_ratios(r, 16)) == "gain" for r in ratios)
    assert accused <= 2, f"{accused} of 40 runs"  # with plain intervals it is 7


FED = WELL | {"data": 0.0}
PLANTED = {
    "slow_loader": ("same batch again", 0.5, {"loader": Loader(32, 2, 2, "Images")}),
    "synchronise": ("no waiting line", 0.2, {"device": "cuda"}),
    "buffers": ("no buffer broadcast", 0.3, {}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bottleneck_is_named_first_with_its_gain(name):
    mode, share, more = PLANTED[name]
    first = find([made(FED, {**MODES, mode: STEP_S * (1 - share)}, **more)])[0]
    assert (first.name, first.kind, first.by) == (name, SLOW, INTERLEAVED)
    assert first.gain.value == pytest.approx(1 / (1 - share), rel=0.03)
    assert first.fix and first.notebook and "{" not in first.what + first.fix


def test_what_is_slow_is_ranked_by_what_is_certain_of_its_gain():
    profile = made(STARVED, modes=MODES | {"same batch again": 0.030, "no buffer broadcast": 0.040})
    noisy = [[s] for s in (0.018, 0.040, 0.018, 0.041, 0.018, 0.040, 0.018, 0.041)]
    profile.interleaved_s["no waiting line"] = noisy  # larger by its median, perhaps
    found = find([profile])
    assert [f.name for f in found] == ["slow_loader", "buffers", "synchronise"]
    assert found[2].gain.value > found[0].gain.value and found[2].gain.low < found[1].gain.low


def test_little_gains_and_options_come_after_what_is_slow():
    profile = made(modes=MODES | {"no waiting line": 0.044, "no buffer broadcast": 0.041})
    assert [(f.name, f.kind) for f in find([profile])] == [("buffers", SLOW), ("synchronise", OPTION)]


def test_few_rounds_and_wide_intervals_prove_nothing():
    few = made(modes=MODES | {"no waiting line": 0.025}, rounds=5)
    assert not find([few]) and any("too few" in text and "waiting" in text for text in unknown([few]))
    noisy = made(modes={})
    noisy.interleaved_s["no waiting line"] = [[s] for s in (0.03, 0.07) * 4]
    assert not find([noisy]) and not any("no waiting line" in text for text in healthy([noisy]))


def test_what_few_steps_have_is_priced_by_its_mean_and_not_by_short_turns():
    """A validation after every fourth step: short turns mostly miss it, and then see nothing."""
    profile = made(noise=0.001, modes=MODES)
    profile.spans_s["evaluation"] = [0.1 if i % 4 == 0 else 0.0 for i in range(30)]
    profile.step_s = [s + e for s, e in zip(profile.step_s, profile.spans_s["evaluation"], strict=True)]
    [found] = find([profile])
    assert (found.name, found.by) == ("validation", FROM_PARTS)
    assert found.gain.value == pytest.approx(sum(profile.step_s) / (sum(profile.step_s) - 0.8))
    assert 1.2 < found.gain.low < found.gain.value < found.gain.high < 2
    rate = estimated_gain.samples_per_s([profile])
    assert rate.value == pytest.approx(32 * 30 / sum(profile.step_s), rel=0.01)  # throughput, not the median step's


# Loaders and the script's own lines


def loader(workers=0, by_batch_ms=None, item="train.py:9  return self.x[i]"):
    return Loader(2048, workers, 2, "Rows", by_batch_ms, item)


def test_rows_in_memory_are_to_be_indexed_by_the_batch():
    profile = made(STARVED, {"same batch again": STEP_S / 2}, loader=loader(2, 1.0))
    first = find([profile])[0]
    assert (first.name, first.kind, first.line) == ("rows_one_by_one", SLOW, "train.py:9")
    assert first.gain.low <= STEP_S / (STEP_S / 2 + 0.001) <= first.gain.high  # with the index that is left
    assert "2,048 calls of Rows.__getitem__" in first.what and "num_workers=0" in first.fix


@pytest.mark.parametrize(("device", "kind"), [("cuda", OPTION), ("cpu", SLOW)])
def test_a_small_wait_for_rows_in_memory_is_no_fault_beside_a_gpu(device, kind):
    """As of the recipes on an H200: 1 ms of a step of 4 ms that the host limits, because the model is small."""
    parts = {"data": 0.27, "forward": 0.3, "backward": 0.43}
    profile = made(parts, {"same batch again": 0.0029}, step_s=0.00396, device=device, loader=loader(0, 0.05))
    found = find([profile])[0]
    assert (found.name, found.kind) == ("rows_one_by_one", kind)


def test_workers_that_start_in_each_epoch_are_told_with_their_time():
    profile = made(noise=0.001, loader=loader(4), restarts=list(range(2, 30, 7)))
    for i in profile.restarts:
        profile.spans_s["data"][i] += 0.3
        profile.step_s[i] += 0.3
    found = find([profile])[0]
    assert found.name == "workers_restart" and "300 ms each time" in found.what and "persistent_workers" in found.fix
    assert found.gain.value == pytest.approx((0.05 * 30 + 4 * 0.3) / (0.05 * 30), rel=0.05)
    profile.restarts = []
    assert "workers_restart" not in names([profile])


def test_the_script_s_own_lines_are_named():
    def line(kind, ms):
        return Line(kind, "", "/x/train.py", 4, "x()", 0.0, ms)

    parts = {"prepare": 0.4, "rest": 0.2, "forward": 0.4}
    lines = [line("prepare", 15.0), line("model", 5.0), line("rest", 5.0), line("loss", 5.0)]
    [found] = find([made(parts, lines=lines)])
    assert (found.name, found.line) == ("own_code", "train.py:4") and "take 20.0 ms" in found.what
    assert not find([made(parts, lines=lines[1:])])


@pytest.mark.parametrize("trainer", sorted(set(TRAINERS.values())))
def test_a_fix_names_the_trainers_option(trainer):
    profile = made(FED, {"no exchange": STEP_S / 2}, ranks=2)
    profile.training |= {"trainer": trainer, "find_unused_parameters": True}
    [found] = [f for f in find([profile]) if f.name == "find_unused"]
    assert " - in " in found.fix and ("ddp" in found.fix or "Kwargs" in found.fix)


# Ranks


def two_ranks(own=(0.030, 0.045), exchange_s=0.005):
    """Both take as long as the slower one; the other one waits in backward."""
    step, least = max(own) + exchange_s, min(own)
    parts = [{"forward": (least - 0.002) / step, "optimizer": 0.002 / step, "prepare": (s - least) / step} for s in own]
    return [
        made(p | {"backward": (step - s) / step}, {"no exchange": s}, step_s=step, rank=rank, ranks=2)
        for rank, (s, p) in enumerate(zip(own, parts, strict=True))
    ]


def test_a_straggler_is_named_by_rank_and_the_exchange_is_without_it():
    late, exchange = find(two_ranks()[::-1])[:2]
    assert late.name == "straggler" and "wait for rank 1" in late.what
    assert late.gain.low <= 0.050 / 0.035 <= late.gain.high
    assert exchange.name == "exchange" and exchange.gain.low <= 0.050 / 0.045 <= exchange.gain.high
    alike = two_ranks((0.020, 0.020))
    assert names(alike, SLOW, OPTION) == ["exchange"] and any("straggler: no gain" in text for text in healthy(alike))


def test_ranks_that_hold_different_parts_of_the_model_are_not_late():
    ranks = two_ranks()
    for f in ranks:
        f.training |= {"shapes": 0, "weights": 3.0}
        f.spans_s["exchange"] = [0.02] * len(f.step_s)
    assert set(names(ranks, SLOW, OPTION)) == {"straggler", "exchange"}
    ranks[1].training |= {"shapes": 0, "weights": 3.5}
    assert not names(ranks, SLOW, OPTION) and any("ranks hold different parts" in text for text in unknown(ranks))


@pytest.mark.parametrize(
    ("training", "exchange_s", "kind"),
    [
        ({"exchanges": 1, "bucket_bytes": 25 * 2**20}, 0.005, OPTION),
        ({"exchanges": 4}, 0.005, SLOW),
        ({"exchanges": 1}, 0.030, OPTION),
    ],
)
def test_exchange_is_a_fault_if_there_is_more_than_there_has_to_be(training, exchange_s, kind):
    ranks = two_ranks((0.020, 0.020), exchange_s)
    for f in ranks:
        f.training |= training
    assert names(ranks, kind) == ["exchange"]


# Memory, graphs, what is switched on


def memory(grows, **more):
    return {"series": [[i, 1e9 + grows(i)] for i in range(35)], "free": 1e9, **more}


def test_memory_that_settles_jumps_or_trembles_does_not_grow():
    draw = random.Random(0)
    for grows in (lambda i: draw.uniform(-1e6, 1e6), lambda i: 1e8 * (i > 10), lambda i: 1e6 * min(i, 20)):
        assert not find([made(memory=memory(grows))])


def test_memory_that_goes_on_growing_is_told_with_its_rate_if_its_tensors_do():
    growing = memory(lambda i: 1e6 * i, tensors_growth=0.0)
    profile = made(memory={**growing, "tensor_bytes_growth": 9e5})
    assert names([profile], RISK) == ["growing"] and "full after 1e+03 more" in find([profile])[0].what
    assert memory_growth(profile).value == pytest.approx(1e6)
    assert not find([made(memory={**growing, "tensor_bytes_growth": 1e4})])  # the C library's
    assert names([made(memory={**growing, "tensors_growth": 1.0, "tensor_bytes_growth": 4.0})], RISK)  # a graph's
    assert not find([made(memory={**growing, "tensor_bytes_growth": 9e5, "free": 1e15})])


def compiles(at, seconds):
    profile = made(noise=0.001, compiles=[int(i in at) for i in range(30)])
    for i in at:
        profile.step_s[i] += seconds
        profile.spans_s["forward"][i] += seconds
    return profile


def test_compiling_that_goes_on_has_a_gain_and_what_may_be_over_has_none():
    (found,) = find([compiles(range(0, 30, 5), 0.2)])
    assert found.name == "recompiles" and found.gain.value == pytest.approx(0.09 / 0.05, rel=0.02)
    for at in ((29,), (1, 2, 3)):
        (found,) = find([compiles(at, 3.0)])
        assert (found.kind, found.gain) == (UNPRICED, None)
    assert not find([made(compiles=[0] * 30)])


def test_what_is_switched_on_is_slow_without_a_number():
    profile = made()
    profile.training |= {"anomaly": True, "dtypes": ["float64"]}
    profile.machine["threads"] = 8
    assert {(f.name, f.gain) for f in find([profile])} == {("anomaly", None), ("float64", None), ("threads", None)}


# Wrong results


def match(kind):
    return Match("r", "w", "f", "/x/t.py", 3, "x()", {}, wrong=kind == WRONG)


def test_what_is_wrong_comes_before_what_is_slow_whatever_it_gains():
    profile = made(STARVED, {"same batch again": STEP_S / 9})
    found = find([profile], [match(RISK), match(WRONG)])
    assert [f.kind for f in found] == [WRONG, SLOW, RISK] and found[0].line == "t.py:3"
    page = report.page(report.make([profile], [match(WRONG)])).splitlines()
    assert page[0].startswith("WRONG RESULT: w (t.py:3).")


def test_no_profile_no_steps_nothing():
    empty = made(steps=0, rounds=0)
    for profiles in ([], [empty]):
        assert find(profiles) == [] and healthy(profiles) == []
    assert unknown([empty]) == []


# Before and after


def compared(before, after):
    return compare.page(*(report.Report([f], find([f]), [], []) for f in (before, after)))


NOTED = [Line("copy", "to", "/x/train.py", 4, "x.to(device)", 1.0, 9.0)]
OWN = [Line("rest", "", "/x/train.py", 4, "x()", 0.0, 20.0)]
BEFORE = {
    "slow_loader": (made(STARVED, {"same batch again": STEP_S / 2}), made(modes={"same batch again": STEP_S})),
    "own_code": (made({"rest": 0.5, "forward": 0.5}, lines=OWN), made()),
    "copies": (made({"copy": 0.4, "forward": 0.6}, lines=NOTED), made(lines=NOTED)),
    "recompiles": (compiles(range(0, 30, 5), 0.2), made()),
}


@pytest.mark.parametrize("name", BEFORE)
def test_what_is_not_there_any_more_is_gone(name):
    before, after = BEFORE[name]
    assert "]): gone" in compared(before, after)
    page = compared(before, before)
    assert "still there" in page and ": gone" not in page and "inconclusive" in page.splitlines()[0]


def test_what_the_second_run_did_not_come_to_try_is_not_called_gone():
    before = made(modes={"no buffer broadcast": STEP_S / 2})
    for turns in ([], [[0.02], [0.2]] * 4):
        after = made(modes={"no buffer broadcast": STEP_S})
        after.interleaved_s["no buffer broadcast"] = turns
        assert "not shown to be gone" in compared(before, after)


def test_two_runs_are_compared_by_samples_per_second():
    before, after = made(STARVED, {"same batch again": STEP_S / 2}), made(step_s=STEP_S / 2)
    ratio = compare.ratio(*(compare.rates([f], True) for f in (after, before)))
    assert ratio.low <= 2 <= ratio.high and " as fast as before. 640" in compared(before, after).splitlines()[0]
    page = compared(made(), made(step_s=2 * STEP_S, samples=128.0))
    assert "Beware: the batch of a rank was 32.0, now 128.0" in page


def test_a_missing_set_epoch_counts_only_if_the_run_made_a_sampler():
    read = [matched("set-epoch-missing", (__file__, 1))]
    assert not find([made(WELL)], read)
    [finding] = find([made(WELL, probes=[{"probe": "_sampled"}])], read)
    assert finding.name == "set-epoch-missing"
