"""What the doctor concludes from facts: planted causes come first, noise is no finding, the arithmetic is right."""

import math
import random

import pytest
from doctor_facts import STARVED, STEP_S, WELL, made

from labs.doctor import bounds, compare
from labs.doctor.causes import CAUSES, HOLDS_BACK, OPTION, READING
from labs.doctor.diagnosis import FROM_PARTS, IN_TURN, diagnose, healthy, memory_growth, unknown
from labs.doctor.facts import AS_IS
from labs.kit.measure import Estimate, estimate

MODES = dict.fromkeys((c.mode for c in CAUSES), STEP_S) | {"larger batch": 2 * STEP_S}


LOOP = {"optimizers": [{"kind": "AdamW", "fused": False, "foreach": False}]}


def names(facts, *kinds):
    return [f.name for f in diagnose(facts) if f.kind in (kinds or (HOLDS_BACK,))]


def test_a_healthy_training_is_accused_of_nothing():
    facts = made(modes=MODES, samples_factor={"larger batch": 2.0})
    assert not diagnose([facts])
    assert len([text for text in healthy([facts]) if "no difference that this run can show" in text]) > 10


def test_of_many_intervals_together_few_runs_have_one_that_misses():
    """16 counterfactuals that change nothing, on a machine whose steps scatter by 10 %."""
    draw, accused = random.Random(1), 0
    for _ in range(60):
        ratios = [[math.exp(draw.gauss(0, 0.14)) for _ in range(8)] for _ in range(16)]
        accused += any(bounds.standing(bounds.of_ratios(r, 16)) == "gain" for r in ratios)
    assert accused <= 3, f"{accused} of 60 runs"  # with plain intervals it is 10


def _without(mode, share):
    return {**MODES, mode: (2 if mode == "larger batch" else 1) * STEP_S * (1 - share)}


FED = WELL | {"data": 0.0}
PLANTED = {
    "slow_loader": ("same batch again", 0.5, {}),
    "anomaly": ("no anomaly detection", 0.2, {}),
    "synchronise": ("no waiting line", 0.2, {"device": "cuda"}),
    "threads": ("fewer threads", 0.4, {"machine": {"cores": 2, "threads": 8}}),
    "tiny_batches": ("larger batch", 0.45, {}),
    "python_overhead": ("compiled", 0.4, {"device": "cuda", "machine": {"gpu_percent": 40}}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_named_first_with_its_bound(name):
    mode, share, more = PLANTED[name]
    facts = made(FED, _without(mode, share), samples_factor={"larger batch": 2.0}, **more)
    first = diagnose([facts])[0]
    assert (first.name, first.kind, first.by) == (name, HOLDS_BACK, IN_TURN)
    assert first.bound.low <= 1 / (1 - share) <= first.bound.high
    assert first.cure and first.notebook and "{" not in first.what + first.cure


def test_causes_are_ranked_by_what_is_certain_of_their_bound():
    facts = made(modes=MODES | {"same batch again": 0.030, "no anomaly detection": 0.040})
    noisy = [[s] for s in (0.020, 0.035, 0.020, 0.036, 0.020, 0.035, 0.020, 0.036)]
    facts.turns_s["no search for unused parameters"] = noisy  # larger by its median, perhaps
    found = diagnose([facts])
    assert [f.name for f in found] == ["slow_loader", "anomaly", "find_unused"]
    assert found[2].bound.value > found[0].bound.value and found[2].bound.low < found[1].bound.low


def test_a_cure_of_the_optimizer_gives_no_more_than_a_step_without_one():
    """Noise can show more. On a GPU the host's clock does not know how long the optimizer's work takes."""
    facts = made(WELL | {"optimizer": 0.01, "forward": 0.41}, MODES | {"fused optimizer": 0.7 * STEP_S})
    assert not diagnose([facts])
    assert any(text.startswith("fused optimizer: at most 1.01 x") for text in healthy([facts]))
    facts.turns_s["fused optimizer"] = [[s] for s in (0.02, 0.09) * 4]  # unclear
    assert any(text.startswith("fused optimizer: at most 1.01 x") for text in healthy([facts]))
    facts = made(modes=MODES | {"fused optimizer": 0.7 * STEP_S}, device="cuda", training=LOOP)
    assert names([facts]) == ["optimizer_loop"]


def test_what_a_healthy_training_may_use_comes_after_what_holds_it_back():
    facts = made(modes=MODES | {"half precision": 0.025, "no anomaly detection": 0.041, "fused optimizer": 0.040})
    assert [(f.name, f.kind) for f in diagnose([facts])] == [
        ("anomaly", HOLDS_BACK),
        ("half_precision", OPTION),
        ("fused_optimizer", OPTION),
    ]


@pytest.mark.parametrize(("share", "kind"), [(0.9, HOLDS_BACK), (0.4, OPTION)])
def test_batches_are_tiny_only_if_most_of_a_step_is_paid_whatever_their_size_is(share, kind):
    """A step with a fixed share f takes f + 4 (1 - f) with 4 times the samples."""
    longer = STEP_S * (share + 4 * (1 - share))
    [found] = diagnose([made(FED, {"larger batch": longer}, samples_factor={"larger batch": 4.0}, rounds=12)])
    assert found.kind == kind and found.bound.low <= 4 * STEP_S / longer <= found.bound.high
    assert "batch_size=128" in found.cure


def test_few_rounds_prove_nothing():
    facts = made(modes=MODES | {"half precision": 0.025}, rounds=5)
    assert not diagnose([facts])
    assert any("5 rounds are too few" in text for text in unknown([facts]))


def test_an_interval_that_holds_1_and_more_is_neither_healthy_nor_a_finding():
    facts = made(modes={})
    facts.turns_s["half precision"] = [[s] for s in (0.03, 0.07, 0.03, 0.07, 0.03, 0.07, 0.03, 0.07)]
    assert not diagnose([facts]) and not any("half precision" in text for text in healthy([facts]))
    assert any(text.startswith("no difference that") and "half precision" in text for text in unknown([facts]))


def test_rounds_are_paired_by_their_place():
    """A slow spell of the machine is in both sides of its round; a mode of a later stage has no turn in the first."""
    facts = made()
    speed = [1, 1, 1, 1, 1, 1, 5, 5, 5, 9, 9, 9]
    facts.turns_s[AS_IS] = [[0.05 * s] for s in speed]
    facts.turns_s["compiled"] = [[]] * 6 + [[0.04 * s] for s in speed[6:]]
    bound = bounds.in_turn([facts], "compiled")
    assert bound.n == 6 and bound.value == pytest.approx(1.25) and bound.low == pytest.approx(bound.high)


def test_parts_give_a_bound_by_arithmetic_where_no_counterfactual_was_taken():
    facts = made({**WELL, "data": 1.0}, step_s=0.040, noise=0.0)
    [found] = [f for f in diagnose([facts]) if f.name == "slow_loader"]
    assert found.by == FROM_PARTS and found.bound.value == pytest.approx((1 + 0.98) / 0.98)


def test_what_few_steps_have_is_priced_by_its_mean_and_not_by_short_turns():
    """A validation after every fourth step: short turns mostly miss it, and then see nothing."""
    facts = made(noise=0.001, modes=MODES)
    facts.spans_s["evaluation"] = [0.1 if i % 4 == 0 else 0.0 for i in range(30)]
    facts.step_s = [s + e for s, e in zip(facts.step_s, facts.spans_s["evaluation"], strict=True)]
    [found] = diagnose([facts])
    assert (found.name, found.by) == ("validation", FROM_PARTS)
    assert found.bound.value == pytest.approx(sum(facts.step_s) / (sum(facts.step_s) - 0.8))
    assert 1.2 < found.bound.low < found.bound.value < found.bound.high < 2
    rate = bounds.samples_per_s([facts])
    assert rate.value == pytest.approx(32 * 30 / sum(facts.step_s), rel=0.01)  # throughput, not the median step's


def _now_and_then(at, seconds=0.5):
    facts = made(noise=0.001)
    for i in at:
        facts.spans_s["evaluation"][i] = seconds
        facts.step_s[i] += seconds
    return facts


@pytest.mark.parametrize("at", [(4,), (5, 7, 28)])
def test_what_comes_without_order_three_times_in_thirty_steps_is_not_known(at):
    facts = _now_and_then(at)
    assert not diagnose([facts]) and any("validation" in text for text in unknown([facts]))


def two_ranks(own=(0.030, 0.045), exchange_s=0.005):
    """Both take as long as the slower one; the other one waits in backward."""
    step = max(own) + exchange_s
    return [
        made(
            {
                "forward": (min(own) - 0.002) / step,
                "optimizer": 0.002 / step,
                "prepare": (s - min(own)) / step,
                "backward": (step - s) / step,
            },
            {"no exchange": s},
            step_s=step,
            rank=rank,
            ranks=2,
        )
        for rank, s in enumerate(own)
    ]


def test_a_straggler_is_named_by_rank_and_the_exchange_is_without_it():
    facts = two_ranks()
    late, exchange = diagnose(facts[::-1])[:2]
    assert late.name == "straggler" and "wait for rank 1: it needs" in late.what and late.by == IN_TURN
    assert late.bound.low <= 0.050 / 0.035 <= late.bound.high
    assert exchange.name == "exchange" and exchange.bound.low <= 0.050 / 0.045 <= exchange.bound.high
    exposed = estimate([a - b for a, b in bounds.pairs_s(facts, "no exchange")], "s")  # step - step without exchange
    assert exchange.what.startswith(str(exposed)) and exposed.low < 0.005 < exposed.high


def test_ranks_that_hold_different_parts_of_the_model_are_not_late_and_have_no_exchange_too_many():
    facts = two_ranks()
    for f in facts:
        f.training |= {"shapes": 0, "weights": 3.0}
        f.spans_s["exchange"] = [0.02] * len(f.step_s)
    assert set(names(facts, HOLDS_BACK, OPTION)) == {"straggler", "exchange"}
    facts[1].training |= {"shapes": 0, "weights": 3.5}
    assert not names(facts, HOLDS_BACK, OPTION) and any("ranks hold different parts" in text for text in unknown(facts))
    assert not any("ranks: the slowest" in text for text in healthy(facts))


def test_ranks_that_are_alike_have_no_straggler():
    facts = two_ranks((0.020, 0.020))
    assert names(facts, OPTION) == ["exchange"] and any(
        text.startswith("ranks: the slowest takes") for text in healthy(facts)
    )


@pytest.mark.parametrize(
    ("training", "exchange_s", "kind"),
    [
        ({"exchanges": 1, "bucket_bytes": 25 * 2**20}, 0.005, OPTION),
        ({"exchanges": 4}, 0.005, HOLDS_BACK),
        ({"exchanges": 1}, 0.030, OPTION),
    ],
)
def test_exchange_is_an_illness_if_there_is_more_than_there_has_to_be(training, exchange_s, kind):
    facts = two_ranks((0.020, 0.020), exchange_s)
    for f in facts:
        f.training |= training
    assert names(facts, kind) == ["exchange"]


def test_without_a_counterfactual_the_straggler_is_who_waits_for_nobody():
    facts = two_ranks()
    for f in facts:
        del f.turns_s["no exchange"]
    [late] = [f for f in diagnose(facts) if f.name == "straggler"]
    assert late.by == FROM_PARTS and "rank 1" in late.what


def test_bounds_are_those_of_the_slowest_rank_of_each_round():
    fast, slow = made(modes={"compiled": 0.02}, ranks=2), made(modes={"compiled": 0.04}, rank=1, ranks=2)
    assert bounds.in_turn([fast, slow], "compiled").value == pytest.approx(0.05 / 0.04, rel=0.03)


def _series(growth, noise, steps=30, jump=0.0):
    draw = random.Random(0)
    return [3e8 + growth * i + draw.uniform(-noise, noise) + (jump if i > 10 else 0) for i in range(steps)]


@pytest.mark.parametrize("series", [_series(0, 1e6), _series(0, 0, jump=1e8)])
def test_memory_that_settles_jumps_or_trembles_does_not_grow(series):
    facts = made()
    facts.memory["each_step"] = series
    assert not diagnose([facts])


def test_memory_that_settles_after_the_steps_as_they_are_does_not_grow():
    facts = made(memory={"each_step": [1e9 + 1e6 * i for i in range(30)], "free": 1e9})
    assert names([facts]) == ["growing"]
    facts.memory["each_round"] = [[40 + 9 * i, 1.03e9 + 1e4 * (i % 2)] for i in range(14)]
    assert not diagnose([facts])
    facts.memory["each_round"] = [[40 + 9 * i, 1.03e9 + 9e6 * i] for i in range(14)]
    assert names([facts]) == ["growing"] and memory_growth(facts).value == pytest.approx(1e6)


def test_a_process_that_grows_while_its_tensors_do_not_is_no_illness():
    memory = {"each_step": [1e9 + 1e6 * i for i in range(30)], "free": 1e9, "tensors_growth": 0.0}
    facts = made(memory={**memory, "tensor_bytes_growth": 1e4})
    assert not diagnose([facts]) and any("its tensors do not" in text for text in unknown([facts]))
    for more in ({"tensor_bytes_growth": 9e5}, {"tensors_growth": 1.0, "tensor_bytes_growth": 4.0}):  # a graph's loss
        facts = made(memory={**memory, **more})
        assert names([facts]) == ["growing"] and not any("its tensors do not" in text for text in unknown([facts]))


def test_memory_that_grows_is_told_with_its_rate():
    facts = made(noise=0.0)
    facts.memory["each_step"] = _series(1e5, 2e4)
    facts.spans_s["rest"] = [s + 1e-4 * i for i, s in enumerate(facts.spans_s["rest"])]
    facts.step_s = [s + 1e-4 * i for i, s in enumerate(facts.step_s)]
    [found] = diagnose([facts])
    assert (found.name, found.kind, found.bound) == ("growing", HOLDS_BACK, None)
    assert "0.1" in found.what or "100" in found.what, found.what
    assert "each step takes 100.0 µs longer" in found.what
    facts.memory["free"] = 1e9  # bytes
    assert "full after 1e+04 steps" in diagnose([facts])[0].what
    facts.memory["free"] = 1e12
    assert not diagnose([facts]) and any("it lasts for a million steps" in text for text in healthy([facts]))


def test_recompiles_are_told_only_if_they_were_seen():
    facts = _compiles(range(0, 30, 5), 0.2)
    found = diagnose([facts])[0]
    assert found.name == "recompiles" and found.bound.value == pytest.approx(0.09 / 0.05, rel=0.02)
    assert "in 6 steps: 1.2" in found.what
    facts.compiles = {"in_steps": 0, "at": []}
    assert not names([facts])


def _compiles(at, seconds, noise=0.001):
    facts = made(noise=noise, compiles={"in_steps": len(at), "at": list(at)})
    for i in at:
        facts.step_s[i] += seconds
        facts.spans_s["forward"][i] += seconds
    return facts


@pytest.mark.parametrize("at", [(29,), (1, 2, 3)], ids=["a last batch", "soon over"])
def test_compiling_that_may_be_over_is_told_with_its_seconds_and_has_no_bound(at):
    """3 s of compiling in 30 steps of 50 ms would be three times the training's time, if it went on."""
    (found,) = diagnose([_compiles(at, 3.0)])
    assert (found.name, found.kind, found.bound) == ("recompiles", READING, None)
    assert f"one-off: {3 * len(at)}" in found.what


def test_what_is_switched_on_and_could_not_be_priced_is_read():
    facts = made(not_tried={"no anomaly detection": "40 s are too short for it"})
    facts.training |= {"anomaly": True, "dtypes": ["float64"]}
    assert [(f.name, f.kind, f.bound) for f in diagnose([facts])] == [
        ("anomaly", READING, None),
        ("float64", READING, None),
    ]
    noisy = made(modes={"no anomaly detection": STEP_S}, noise=0.4)
    noisy.training["anomaly"] = True
    assert [f.name for f in diagnose([noisy])] == ["anomaly"]
    priced = made(modes={"no anomaly detection": STEP_S})
    priced.training["anomaly"] = True
    assert not diagnose([priced])  # it is on, and costs nothing


def test_ranks_between_which_no_exchange_is_seen_are_told():
    def told(parts=None, ranks=2, **training):
        facts = [made(parts, rank=rank, ranks=ranks) for rank in range(ranks)]
        for f in facts:
            f.training |= training
        return any("train one model" in text for text in unknown(facts))

    assert told()
    assert not told(ddp=True) and not told(fsdp=True) and not told(ranks=1)
    assert not told(WELL | {"exchange": 0.02})


def test_no_facts_no_steps_nothing():
    empty = made(steps=0, rounds=0)
    for facts in ([], [empty]):
        assert diagnose(facts) == [] and healthy(facts) == []
    assert unknown([empty]) == []


# Before and after


def _report(facts, **provenance):
    from labs.doctor import report

    return report.Report(facts, diagnose(facts), healthy(facts), unknown(facts), provenance)


def test_savings_add_up_and_bounds_do_not_multiply():
    """Two parts of 40 % of a step: 1.67 x each, 5 x together, and not 2.8."""
    each = Estimate(1 / 0.6, 1 / 0.7, 1 / 0.55, 8, "x")
    both = compare.together([each, each])
    assert both.value == pytest.approx(5) and both.low == pytest.approx(2.5) and both.high == pytest.approx(10)
    assert compare.together([each] * 3).value == math.inf and compare.together([]) is None
    assert compare.together([each]).value == pytest.approx(each.value)


def test_a_cure_that_gives_what_was_promised():
    before = _report([made(STARVED, {"same batch again": STEP_S / 2})])
    after = _report([made(modes={"same batch again": STEP_S / 2}, step_s=STEP_S / 2)])
    found = compare.compare(before, after)
    assert [f.name for f in found.cured] == ["slow_loader"] and not found.left and not found.warnings
    assert found.gain.low <= 2 <= found.gain.high
    text = compare.page(before, after)
    assert "as promised" in text.lower() and "as fast as before: 640" in text.splitlines()[0]
    assert "slower than before" in compare.page(after, before).splitlines()[0]


@pytest.mark.parametrize("turns", [[], [[0.02], [0.2]] * 4], ids=["not reached", "noise"])
def test_what_the_second_run_did_not_come_to_try_is_not_called_cured(turns):
    before = _report([made(modes={"larger batch": STEP_S}, samples_factor={"larger batch": 2.0})])
    assert "tiny_batches" in [f.name for f in before.findings]
    facts = made(modes={"larger batch": STEP_S}, samples_factor={"larger batch": 2.0})
    facts.turns_s["larger batch"] = turns
    after = _report([facts])
    found = compare.compare(before, after)
    assert [f.name for f in found.untold] == ["tiny_batches"] and not found.cured
    text = compare.page(before, after)
    assert "NOT SHOWN TO BE CURED" in text and "\nCURED" not in text


def test_a_cure_that_leaves_half_of_it_is_told_so():
    before = _report([made(STARVED, {"same batch again": STEP_S / 2})])
    after = _report([made(STARVED, {"same batch again": STEP_S / 2}, step_s=0.8 * STEP_S)])
    found = compare.compare(before, after)
    assert not found.cured and [(a.name, b.name) for a, b in found.left] == [("slow_loader", "slow_loader")]
    assert compare.verdict(Estimate(2, 1.9, 2.1, 8), Estimate(1.2, 1.1, 1.3, 30)).startswith("less than the bound")
    assert compare.verdict(Estimate(2, 1.9, 2.1, 8), Estimate(3, 2.9, 3.1, 30)).startswith("more than promised")
    assert compare.verdict(Estimate(2, 1.9, 2.1, 8), Estimate(1.8, 1.7, 1.9, 30)).endswith("within 20 %")


def test_samples_per_second_count_where_the_batch_has_changed():
    before, after = _report([made()]), _report([made(step_s=2 * STEP_S, samples=128.0)])
    found = compare.compare(before, after)
    assert found.gain.value == pytest.approx(2, rel=0.02)
    assert any("32 samples" in w and "128" in w for w in found.warnings)


def test_an_option_is_cured_only_if_the_training_has_it_now():
    option = made(modes={"half precision": 0.03})
    used = made(step_s=0.03, not_tried={"half precision": "it is on"}, gone=["half precision"])
    assert [f.name for f in compare.compare(_report([option]), _report([used])).cured] == ["half_precision"]
    late = made(step_s=0.03, left_out={"half precision": "5 s are too short for it: --seconds 9"})
    assert not compare.compare(_report([option]), _report([late])).cured, "that it had no turn shows nothing"
    gone = made(modes={"half precision": STEP_S})
    assert not compare.compare(_report([option]), _report([gone])).cured
