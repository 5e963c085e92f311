"""Exercise 11.1: whether the numbers in a reason are those that the records give, and what they are otherwise."""

from __future__ import annotations

import functools
import itertools
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from labs.kit.check import Mistake
from labs.kit.measure import Estimate, paired_ratio
from labs.kit.record import Record, Records

LEAST = 6
SECONDS = {"s": 1.0, "ms": 1e-3}
NUMBER = re.compile(r"(?:(?<![\w.])|(?<=\.\.)|(?<![\w.])x(?=\d+\.))(\d+(?:\.\d+)?(?:e[-+]?\d+)?)\s*(%?)", re.IGNORECASE)
"""Also in "x1.70" and "1.69..1.71"; not in names such as float64, x86 or v2."""
STATED = (0, 1, 2, 4, 1.05, 105, 5, LEAST, 95, 0.95, 2.5, 97.5)
"""Numbers of the statement and of the task, which any reason may hold: 4 workers, 2 records, 1.05 times, 95 %."""
OTHER_METHOD = 0.4
"""Of an interval's length: by so much its ends may differ from ours, by another method than the bootstrap."""


@dataclass(frozen=True)
class Printed:
    """A number as it stands in a text, with "%" behind it or not."""

    text: str
    percent: str

    @property
    def half(self) -> float:
        """Half a unit of the last digit: by so much rounding may have changed it."""
        digits, _, power = self.text.lower().partition("e")
        return 0.5000001 * 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))

    def is_near(self, x: float) -> bool:
        """Whether this is `x`, rounded as it is printed."""
        return abs(float(self.text) - x) <= self.half

    def is_ratio(self, ratio: float, within: float = 0.0) -> bool:
        """Whether this is a ratio: 1.7, or in percent 170 %, or 70 % for what is more. One digit is too few."""
        if self.percent:
            share = float(self.text) / 100
            return any(abs(x - ratio) <= within + self.half / 100 for x in (share, 1 + share, 1 - share))
        return len(re.sub(r"\D", "", self.text)) > 1 and abs(float(self.text) - ratio) <= within + self.half


@dataclass(frozen=True)
class Gain:
    """Two records of one data set, without workers and with 4, with as many samples: a pair for each round."""

    data: str
    without: Record
    with_4: Record

    @functools.cached_property
    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(in_seconds(self.without), in_seconds(self.with_4), strict=True)]

    @functools.cached_property
    def interval(self) -> Estimate:
        return paired_ratio(in_seconds(self.without), in_seconds(self.with_4))

    @property
    def counts(self) -> bool:
        return self.without.kind == self.with_4.kind in ("measured", "recorded") and len(self.ratios) >= LEAST

    def has_middle(self, number: Printed) -> bool:
        """Whether the number is the middle of the ratios: their median or a mean."""
        kinds_of_middle = (statistics.median, statistics.fmean, statistics.geometric_mean)
        return any(number.is_ratio(middle(self.ratios)) for middle in kinds_of_middle)

    def has_end(self, number: Printed, which: str) -> bool:
        """Whether the number can be the end "low" or "high" of an interval of the ratios, by whatever method."""
        other_method = OTHER_METHOD * (self.interval.high - self.interval.low)
        return number.is_ratio(getattr(self.interval, which), within=other_method)

    def has(self, number: Printed) -> bool:
        """Whether the number is of these ratios: their middle, an end of their interval, the least or the greatest."""
        return (
            self.has_middle(number)
            or any(self.has_end(number, which) for which in ("low", "high"))
            or any(number.is_ratio(extreme(self.ratios)) for extreme in (min, max))
        )


def in_seconds(record: Record) -> list[float]:
    return [s * SECONDS[record.unit] for s in record.samples]


def check_numbers(reason: str, records: Records, words: str, decided: bool) -> None:
    """Mistake if a number in `reason` is none that the records give, or if one that a verdict rests on is missing.

    `words` say which case it is; not `decided` is a case in which no data set counts.
    """
    printed = [Printed(*found) for found in NUMBER.findall(reason)]
    pairs = list(pairs_of(records))
    if decided and not printed:
        raise Mistake(
            f"{words}: your verdict is right, and its reason holds no number: {reason!r:.60}",
            "give the ratio it rests on, with its interval",
        )
    for gain in pairs:
        if decided and gain.counts:
            _require(gain, printed, pairs, words)
    known = [*STATED, *_facts(records, pairs)]
    for number in printed:
        if not any(map(number.is_near, known)) and not any(gain.has(number) for gain in pairs):
            raise Mistake(
                f"{words}: your verdict is right, and its reason holds {number.text}, which these records do not give. "
                f"{_what(number, pairs)}",
                "give the ratios of the data sets that count, each with its interval",
            )


def pairs_of(records: Records) -> Iterator[Gain]:
    """Every two records of one data set that have a pair for each round, of whatever kinds and however few rounds."""
    for data in dict.fromkeys(r.case["data"] for r in records.where("load_time")):
        without, with_4 = (records.where("load_time", data=data, workers=n) for n in (0, 4))
        for a, b in itertools.product(without, with_4):
            if len(a.samples) == len(b.samples):
                yield Gain(data, a, b)


def _require(gain: Gain, printed: Sequence[Printed], pairs: Sequence[Gain], words: str) -> None:
    """Mistake if the ratio of a data set that counts, or an end of its interval, is not among the numbers."""
    told = f"{words}: your verdict is right, and its reason"
    if not any(map(gain.has_middle, printed)):
        other = [n for n in printed if not any(map(n.is_near, STATED)) and not any(g.has(n) for g in pairs if g.counts)]
        why = _what(other[0], [gain, *pairs]) if other else ""
        raise Mistake(
            f"{told} does not give the ratio of {gain.data}. {why}".rstrip(),
            "the median over the rounds of seconds without workers / seconds with 4",
        )
    ends = [any(gain.has_end(number, which) for number in printed) for which in ("low", "high")]
    if not all(ends) or sum(map(gain.has, printed)) < 3:
        missing = ("the upper end of " if ends[0] else "the lower end of ") if ends[0] != ends[1] else ""
        raise Mistake(
            f"{told} gives the ratio of {gain.data} without {missing}its interval: the verdict rests on it",
            f'as text, measure.paired_ratio gives "{gain.interval}"',
        )


def _facts(records: Records, pairs: Sequence[Gain]) -> Iterator[float]:
    """Counts of records, data sets and rounds, all of them and those that are faster; middle times in s and in ms."""
    timed = records.where("load_time")
    yield from (len(timed), len({r.case["data"] for r in timed}), sum(gain.counts for gain in pairs))
    for record in timed:
        yield len(record.samples)
        for middle in (statistics.median, statistics.fmean):
            yield from (middle(in_seconds(record)) / unit_s for unit_s in SECONDS.values())
    for gain, least in itertools.product(pairs, (1.0, 1.05)):
        won = sum(ratio >= least for ratio in gain.ratios)
        yield from (won, len(gain.ratios) - won)


def _what(number: Printed, pairs: Sequence[Gain]) -> str:
    """What somebody did who comes to this number, as far as it can be told."""
    for gain in pairs:
        if not gain.counts and gain.has(number):
            rounds, kinds = len(gain.ratios), dict.fromkeys((gain.without.kind, gain.with_4.kind))
            of = f"{rounds} rounds alone" if rounds < LEAST else f"numbers that are {' and '.join(kinds)}"
            return f"{number.text} is the ratio of {gain.data} by {of}"
    for gain in pairs:
        without_s, with_4_s = (statistics.median(in_seconds(r)) for r in (gain.without, gain.with_4))
        as_noted = [a / b for a, b in zip(gain.without.samples, gain.with_4.samples, strict=True)]
        if number.is_ratio(1 / gain.interval.value):
            return f"{number.text} is upside down: the time of {gain.data} with 4 workers over that without"
        if gain.without.unit != gain.with_4.unit and number.is_near(statistics.median(as_noted)):
            return f"{number.text} is milliseconds divided by seconds, or seconds by milliseconds"
        if number.is_ratio(without_s / with_4_s):
            return f"{number.text} is a ratio of two medians of {gain.data}: divide round by round first"
        for seconds in (without_s, with_4_s, without_s - with_4_s):
            if any(number.is_near(abs(seconds) / unit_s) for unit_s in SECONDS.values()):
                return f"{number.text} is a time of {gain.data}, or a difference of times, and no ratio"
    return f"{number.text} is neither a ratio of these rounds nor an end of its interval"
