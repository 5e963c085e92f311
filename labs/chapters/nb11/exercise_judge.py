"""Exercise 11.1: judge one statement by whatever records there are; each made case holds another trap."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from labs.chapters.nb11.reasons import check_numbers
from labs.chapters.nb11.solutions import judge
from labs.kit.check import Exercise, Mistake
from labs.kit.claims import Verdict
from labs.kit.errors import brief
from labs.kit.record import Record, Records

STATEMENT = "With 4 workers a DataLoader loads at least 1.05 times as fast as without."
WORDS = ("holds", "does not hold", "depends", "not tried yet")
METRIC = "load_time"
ROUNDS = 12
HERE, ELSEWHERE = {"cpu": "this machine"}, {"cpu": "another machine"}
WIDE = (0.7, 0.75, 0.8, 0.9, 0.95, 1.0, 1.25, 1.35, 1.4, 1.5, 1.6, 1.7)  # a median of 1.12 that shows nothing
LOW_AND_WIDE = (0.6, 0.65, 0.7, 0.75, 0.8, 0.93, 1.01, 1.2, 1.3, 1.4, 1.45, 1.5)  # the same with 0.97


@dataclass(frozen=True)
class Case:
    """Records, what they allow to say, and what a wrong verdict on them shows."""

    words: str
    records: Records
    verdict: str
    hint: str
    slips: dict[str, str] = field(default_factory=dict)
    """What somebody did who gives this other verdict, where it is known."""


def _record(
    data: str, workers: int, seconds: Sequence[float], kind: str = "measured", unit: str = "s", metric: str = METRIC
) -> Record:
    scale = {"s": 1, "ms": 1e3}[unit]
    return Record(
        "dataloader",
        metric,
        unit,
        [scale * s for s in seconds],
        kind,
        {"data": data, "workers": workers},
        provenance=HERE if kind == "measured" else ELSEWHERE,
    )


def _pair(
    data: str,
    gains: Sequence[float],
    base_s: Sequence[float] = (),
    kinds: tuple[str, str] = ("measured",) * 2,
    units: tuple[str, str] = ("s", "s"),
) -> list[Record]:
    """Times per batch without workers and with 4, round by round; the gain is the former divided by the latter."""
    draw = random.Random(f"{data} {gains}")
    base = base_s or [0.04 * draw.uniform(0.99, 1.01) for _ in gains]
    without = [b * g for b, g in zip(base, gains, strict=True)]
    return [_record(data, 0, without, kinds[0], units[0]), _record(data, 4, base, kinds[1], units[1])]


def _about(gain: float, by: float = 0.02, rounds: int = ROUNDS) -> list[float]:
    draw = random.Random(round(1000 * gain))
    return [gain * draw.uniform(1 - by, 1 + by) for _ in range(rounds)]


def _mixed(gains: Sequence[float]) -> list[float]:
    return random.Random(11).sample(gains, len(gains))


def _with_others(records: list[Record]) -> Records:
    """Among records that have nothing to do with the statement, but look alike."""
    more = []
    for data in dict.fromkeys(r.case["data"] for r in records):
        more += [_record(data, 2, [0.3] * ROUNDS), _record(data, 1, _about(0.01))]
        more += [_record(data, n, _about(0.02 + n), metric="start_time") for n in (0, 4)]
    return Records(random.Random(7).sample(records + more, len(records + more)))


POINT = "you go by a median alone, and the rounds scatter too far for that: the interval of the ratios holds 1.05"
GUESS = "you say so without a run that compares the two: that is a guess"
NO_RUN = "where no comparison is left there is no verdict, whatever one would expect"
MODEL = "you count a number that nobody measured: a model's, or a published one from another machine"
ROUND = "you judge by too few rounds; even when they agree there is no interval of 95 % from fewer than 6"
BOTH = "a data set for it and another one against it, each shown: it depends on the data"


@functools.cache
def cases() -> tuple[Case, ...]:
    """All of them; the clear ones come first."""
    fast, slow, none = _about(1.7), _about(0.6), "not tried yet"
    rising = [0.02 * 1.1**k for k in range(ROUNDS)]  # times of both grow nearly threefold during the run
    spells = [0.04 * (1 + k // 3 % 2) for k in range(ROUNDS)]  # both take twice as long in every other three rounds
    hint_ratio = "seconds without workers / seconds with 4, as often as there are rounds: above 1 means faster with 4"
    hint_pairs = "divide round by round first, then take the interval of these ratios: what slows both cancels"
    hint_kind = 'only records of kind "measured" or "recorded" are measurements, and only two of one kind are pairs'
    guessed = dict.fromkeys(WORDS[:3], GUESS)
    counted = dict.fromkeys(WORDS[:3], MODEL)
    few = dict.fromkeys(WORDS[:3], ROUND)
    made = [
        (
            "photos load 1.7 times as fast with 4 workers, in each of 12 rounds",
            _pair("photos", fast),
            "holds",
            hint_ratio,
            {"does not hold": "your ratio is upside down"},
        ),
        (
            "arrays load 0.6 times as fast with 4 workers, in each of 12 rounds",
            _pair("arrays", slow),
            "does not hold",
            hint_ratio,
            {"holds": "your ratio is upside down"},
        ),
        (
            "arrays load 0.6 times as fast, photos 1.7 times",
            _pair("arrays", slow) + _pair("photos", fast),
            "depends",
            BOTH,
            {"holds": "you take one data set for all of them", "does not hold": "you take one data set for all"},
        ),
        (
            "photos load 1.7 times as fast, arrays 0.6 times",
            _pair("photos", fast) + _pair("arrays", slow),
            "depends",
            BOTH,
            {
                "holds": "you take the first data set for all of them",
                "does not hold": "you take one data set for all of them",
            },
        ),
        (
            "photos and texts load 1.7 and 1.3 times as fast",
            _pair("photos", fast) + _pair("texts", _about(1.3)),
            "holds",
            "every data set that was compared shows it",
            {},
        ),
        (
            "photos load faster in 6 rounds of 12 and slower in 6, 1.12 times as fast by the median",
            _pair("photos", _mixed(WIDE)),
            "depends",
            "the interval decides: here it holds 1.05, so neither is shown",
            {"holds": POINT, "does not hold": "not shown is not refuted: the interval reaches well above 1.05, too"},
        ),
        (
            "arrays load faster in 6 rounds of 12 and slower in 6, 0.97 times as fast by the median",
            _pair("arrays", _mixed(LOW_AND_WIDE)),
            "depends",
            "the interval decides: here it holds 1.05, so neither is shown",
            {"does not hold": POINT, "holds": POINT},
        ),
        (
            "texts load 1.02 times as fast in each of 12 rounds",
            _pair("texts", _about(1.02, 0.006)),
            "does not hold",
            "the statement says at least 1.05 times: the whole interval is below that",
            {
                "holds": "you ask for any gain at all, not for one of 1.05",
                "depends": "the interval holds neither 1.05 nor anything above it",
            },
        ),
        (
            "photos load 1.7 times as fast, and the rounds of texts scatter around 1.12",
            _pair("photos", fast) + _pair("texts", _mixed(WIDE)),
            "depends",
            "it holds if every compared data set shows it, and one shows nothing",
            {"holds": "you leave out the data set that shows nothing"},
        ),
        (
            "photos load 1.15 times as fast in every round, while times grow threefold during the run, of both alike",
            _pair("photos", _about(1.15, 0.01), rising),
            "holds",
            hint_pairs,
            {
                "depends": "you compare all times of one with all times of the other: unpaired medians see the machine "
                "slow down, and nothing else",
                "does not hold": "you compare other things than the two times of one round",
            },
        ),
        (
            "arrays load 0.97 times as fast in every round, and in half of the rounds both take twice as long",
            _pair("arrays", _about(0.97, 0.01), spells),
            "does not hold",
            hint_pairs,
            {
                "depends": "you compare all times of one with all times of the other: unpaired medians see slow "
                "spells, and nothing else"
            },
        ),
        (
            "arrays load 0.6 times as fast; without workers it is noted in ms, with 4 in s",
            _pair("arrays", slow, units=("ms", "s")),
            "does not hold",
            "look at each record's unit before you divide",
            {"holds": "you divide milliseconds by seconds"},
        ),
        (
            "photos load 1.7 times as fast; without workers it is noted in s, with 4 in ms",
            _pair("photos", fast, units=("s", "ms")),
            "holds",
            "look at each record's unit before you divide",
            {"does not hold": "you divide seconds by milliseconds"},
        ),
        ("there is no record at all", [], none, NO_RUN, guessed),
        ("photos were loaded with 4 workers, and never without", _pair("photos", fast)[1:], none, NO_RUN, guessed),
        ("photos were loaded without workers, and never with 4", _pair("photos", fast)[:1], none, NO_RUN, guessed),
        (
            "photos were loaded without workers, texts with 4",
            _pair("photos", fast)[:1] + _pair("texts", fast)[1:],
            none,
            "only times of the same data can be compared",
            dict.fromkeys(WORDS[:3], "you compare photos with texts"),
        ),
        ("one round of photos, 1.9 times as fast", _pair("photos", [1.9]), none, "at least 6 rounds", few),
        (
            "three rounds of photos, 1.5 to 1.7 times as fast",
            _pair("photos", [1.5, 1.6, 1.7]),
            none,
            "at least 6 rounds",
            few,
        ),
        (
            "12 rounds of photos without workers, 11 with 4",
            [_pair("photos", fast)[0], _record("photos", 4, [0.04] * (ROUNDS - 1))],
            none,
            "one is missing, and nobody knows which: they are no pairs",
            dict.fromkeys(WORDS[:3], "you pair times although one of them is missing"),
        ),
        (
            "both numbers of photos are a model's",
            _pair("photos", fast, kinds=("modelled",) * 2),
            none,
            hint_kind,
            counted,
        ),
        (
            "both numbers of photos are published ones",
            _pair("photos", fast, kinds=("published",) * 2),
            none,
            hint_kind,
            counted,
        ),
        (
            "photos without workers are measured, with 4 a model's number",
            _pair("photos", fast, kinds=("measured", "modelled")),
            none,
            hint_kind,
            counted,
        ),
        (
            "arrays are measured, 0.6 times as fast, and modelled, 1.7 times as fast",
            _pair("arrays", slow) + _pair("arrays", fast, kinds=("modelled",) * 2),
            "does not hold",
            hint_kind,
            {"holds": MODEL, "depends": MODEL, none: "a model's number beside it does not undo a measurement"},
        ),
        (
            "photos were recorded on another machine, 1.7 times as fast in 12 rounds",
            _pair("photos", fast, kinds=("recorded",) * 2),
            "holds",
            "a recorded pair was measured, by somebody else",
            {none: "you leave out what was recorded"},
        ),
        (
            "photos without workers were recorded on another machine, and are measured here with 4",
            _pair("photos", fast, kinds=("recorded", "measured")),
            none,
            hint_kind,
            dict.fromkeys(WORDS[:3], "you compare two machines, not 4 workers with none"),
        ),
        (
            "photos load 1.7 times as fast; of texts there are only times with 4 workers",
            _pair("photos", fast) + _pair("texts", fast)[1:],
            "holds",
            "a data set without a comparison says nothing: the others decide",
            {none: "you give up although photos were compared"},
        ),
        (
            "arrays load 0.6 times as fast; of photos there is one round, 1.9 times as fast",
            _pair("arrays", slow) + _pair("photos", [1.9]),
            "does not hold",
            "a data set with fewer than 6 rounds says nothing: the others decide",
            {"depends": ROUND, none: "you give up although arrays were compared"},
        ),
    ]
    return tuple(Case(words, _with_others(r), verdict, hint, slips) for words, r, verdict, hint, slips in made)


def example() -> Records:
    """Records of one case, with those that have nothing to do with the statement."""
    return next(case.records for case in cases() if "modelled, 1.7" in case.words)


def check_judge(f: Callable[..., Any]) -> None:
    """All verdicts first, then the reasons, the clear cases first; a mistake is explained by what the records hold."""
    told = [(case, _answer(f, case)) for case in cases()]
    for case, (word, _) in told:
        if word != case.verdict:
            slip = case.slips.get(word, f'the verdict here is "{case.verdict}"')
            raise Mistake(f'{case.words}: you say "{word}". {slip[0].upper()}{slip[1:]}', case.hint)
    for case, (word, reason) in told:
        if not reason.strip():
            raise Mistake(f"{case.words}: your verdict is right and has no reason", "a text that others can check")
        check_numbers(reason, case.records, case.words, decided=word != "not tried yet")


def _answer(f: Callable[..., Any], case: Case) -> tuple[str, str]:
    """What the learner's function says: a verdict of WORDS, and the reason."""
    try:
        answer = f(case.records)
    except (LookupError, ValueError, ArithmeticError, StopIteration) as e:
        if case is cases()[0]:  # the plain one: a slip in the code, not in judging
            raise
        raise Mistake(
            f"{case.words}: your function raises {type(e).__name__} instead of a verdict",
            'missing evidence is no error: look whether it is there, or catch LookupError, and say "not tried yet"'
            if case.verdict == "not tried yet"
            else case.hint,
        ) from None
    if isinstance(answer, Verdict):
        answer = answer.word, answer.because
    if not isinstance(answer, tuple | list) or len(answer) != 2 or not all(isinstance(part, str) for part in answer):
        raise Mistake(f"you return {brief(answer)}", 'return (verdict, reason), such as ("holds", "1.7 x [1.6, 1.8]")')
    word = answer[0].strip().lower()
    if word not in WORDS:
        raise Mistake(f"{answer[0]!r:.60} is no verdict", f"say one of {', '.join(map(repr, WORDS))}")
    return word, answer[1]


EXERCISE = Exercise("judge a statement by the records there are", check_judge, judge)
