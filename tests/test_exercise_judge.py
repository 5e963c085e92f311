"""Exercise 11.1: judges of other styles pass, every mistake has its name, the cases are what their words say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from mutants.nb11_judge import RARER
from scipy import stats
from speeds import first

from labs.chapters.nb11.exercise_judge import WORDS, cases, check_judge, example
from labs.chapters.nb11.reasons import NUMBER, Printed, in_seconds, pairs_of
from labs.chapters.nb11.solutions import judge
from labs.kit.check import Mistake
from labs.kit.claims import Verdict
from labs.kit.measure import paired_ratio


def by_t(records):
    """A table of all records; Student's interval of the mean of logarithms; a Verdict as the course's own."""
    table = {}
    for r in records:
        if r.metric == "load_time" and r.kind in ("measured", "recorded"):
            scale = 1e-3 if r.unit == "ms" else 1.0
            table[r.case["data"], r.kind, r.case["workers"]] = np.array(r.samples) * scale
    found = []
    for (data, kind, workers), seconds in table.items():
        other = table.get((data, kind, 4))
        if workers == 0 and other is not None and len(other) == len(seconds) > 5:
            logs = np.log(seconds / other)
            found.append(stats.t.interval(0.95, len(logs) - 1, logs.mean(), stats.sem(logs)))
    if not found:
        return Verdict("not tried yet", "no pairs")
    because = ", ".join(f"{math.exp((a + b) / 2):.2f}x ({math.exp(a):.2f} to {math.exp(b):.2f})" for a, b in found)
    if min(low for low, _ in found) >= math.log(1.05):
        return Verdict("holds", because)
    return Verdict("does not hold" if max(high for _, high in found) < math.log(1.05) else "depends", because)


def by_signs(records):
    """In how many rounds is it 1.05 times as fast? A sign test, and exceptions where evidence is missing."""
    verdicts, said = set(), []
    for data in {r.case["data"] for r in records}:
        for kind in ("measured", "recorded"):
            own = type(records)(r for r in records if r.kind == kind)
            try:
                a, b = (own.one("load_time", data=data, workers=n) for n in (0, 4))
                factor = {"s": 1000, "ms": 1}
                gains = [factor[a.unit] * x / (factor[b.unit] * y) for x, y in zip(a.samples, b.samples, strict=True)]
            except (LookupError, ValueError):
                continue
            if len(gains) < 6:
                continue
            wins = sum(g >= 1.05 for g in gains)
            low, *_, high = sorted(gains)[2:-2]  # of twelve, the third and the tenth: 96 %
            said.append(
                f"{np.mean(gains) - 1:.1%} faster [{low - 1:.1%}, {high - 1:.1%}], {wins} of {len(gains)} rounds"
            )
            sure = stats.binomtest(wins, len(gains)).pvalue < 0.05
            verdicts.add(("does not hold", "holds")[2 * wins > len(gains)] if sure else "depends")
    if not verdicts:
        return ["Not tried yet", "no pairs"]
    return [verdicts.pop() if len(verdicts) == 1 else "depends", ", ".join(said)]


@pytest.mark.parametrize("right", [by_t, by_signs])
def test_right_judges_of_any_style_pass(right):
    check_judge(right)


@pytest.mark.parametrize(
    ("text", "value", "same"),
    [
        ("1.7", 1.68, True),
        ("1.7", 1.76, False),
        ("1.70", 1.68, False),
        ("170 %", 1.704, True),
        ("70%", 1.7, True),
        ("40 %", 0.6, True),
        ("2", 1.7, False),
        ("1.7e0", 1.74, True),
        ("1.705x", 1.7049, True),
    ],
)
def test_a_printed_number_is_a_ratio_rounded_as_it_is_printed(text, value, same):
    [found] = NUMBER.findall(text)
    assert Printed(*found).is_ratio(value) is same


def test_names_of_types_and_of_data_hold_no_numbers():
    assert NUMBER.findall("np.float64(1.7) v2 x86_64") == [("1.7", "")]


@pytest.mark.parametrize("text", ["x1.70 [x1.69, x1.71]", "1.70 (1.69..1.71)", "X1.70, 1.69...1.71", "1.70: 1.69-1.71"])
def test_a_factor_and_a_range_may_be_written_in_several_ways(text):
    assert [number for number, _ in NUMBER.findall(text)] == ["1.70", "1.69", "1.71"]


@pytest.mark.parametrize(
    "said",
    [
        "{data}: x{g.value:.2f} [x{g.low:.2f}, x{g.high:.2f}]",
        "{data}: {g.value:.2f} ({g.low:.2f}..{g.high:.2f})",
        "{data}: {g}, level 0.95",
        "{data}: {g}, 2.5 % and 97.5 % of the resamples, against 105 %",
        "{data}: {g}, means {a:.1f} ms and {b:.1f} ms",
    ],
)
def test_right_reasons_in_other_words_pass(said):
    def told(records):
        word, _ = judge(records)
        counted = [gain for gain in pairs_of(records) if gain.counts]
        return word, "; ".join(
            said.format(
                data=gain.data,
                g=gain.interval,
                a=1e3 * np.mean(in_seconds(gain.without)),
                b=1e3 * np.mean(in_seconds(gain.with_4)),
            )
            for gain in counted
        ) or "no pairs"

    check_judge(told)


@pytest.mark.parametrize("name", first(6, RARER))
def test_rarer_mistakes_have_their_name(name):
    wrong, words = RARER[name]
    with pytest.raises(Mistake) as found:
        check_judge(wrong)
    assert any(w in str(found.value).lower() for w in words.split("|")), found.value


@pytest.mark.parametrize("word", WORDS)
def test_one_verdict_for_all_does_not_pass(word):
    with pytest.raises(Mistake):
        check_judge(lambda records: (word, "1.7 x"))


def test_each_slip_is_about_another_verdict_and_each_verdict_is_needed():
    assert {case.verdict for case in cases()} == set(WORDS)
    for case in cases():
        assert case.verdict not in case.slips and set(case.slips) <= set(WORDS), case.words


def test_what_the_words_say_of_intervals_is_so():
    """Far enough from 1.05 for any method; where the rounds scatter the median alone would decide."""
    for case in cases():
        timed = [r for r in case.records.where("load_time") if r.kind == "measured" and r.case["workers"] in (0, 4)]
        pairs = {r.case["data"]: [s for s in timed if s.case["data"] == r.case["data"]] for r in timed}
        for data, two in pairs.items():
            if len(two) != 2 or {len(r.samples) for r in two} != {12} or {r.unit for r in two} != {"s"}:
                continue
            without, with_4 = sorted(two, key=lambda r: r.case["workers"])
            gain = paired_ratio(without.samples, with_4.samples)
            if "6 rounds of 12" in case.words or (data == "texts" and "scatter" in case.words):
                assert gain.low < 0.99 and gain.high > 1.15
            else:
                assert gain.low > 1.1 or gain.high < 1.04, case.words


def test_the_example_holds_a_trap():
    """Measured it is slower with 4 workers, and by the model it is faster."""
    found = {(r.kind, r.case["workers"]): r.value for r in example().where("load_time", data="arrays") if r.unit == "s"}
    assert found["measured", 0] < found["measured", 4] and found["modelled", 0] > found["modelled", 4]
