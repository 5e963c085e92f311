"""Exercises of notebook 06: reading a timeline, where to cut; 06.1 and 06.4 have files of their own."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from itertools import accumulate, combinations, islice, pairwise
from operator import index
from typing import Any

from labs.chapters.nb06 import solutions as solution
from labs.chapters.nb06.exercise_fsdp import check_sharded_linear
from labs.chapters.nb06.exercise_pipeline import check_order
from labs.kit.answers import Question, Slip, number, on_ranks
from labs.kit.check import Exercise, Mistake
from labs.kit.failure import RankFailed
from labs.parts.pipelines import schedules

Function = Callable[..., Any]

# -- 06.2: a timeline

Timeline = tuple[tuple[solution.Event, ...], int]


def _timeline(work: Sequence[float], micro_batches: int, message_s: float, begin_s: float) -> Timeline:
    """(events, stages) of a 1F1B step whose stages compute for `work` seconds each; the clock does not begin at 0."""
    p, m = len(work), micro_batches
    found = schedules.simulate(schedules.one_f_one_b, m, [w / m / 3 for w in work], [2 * w / m / 3 for w in work],
                               [message_s] * (p - 1))  # fmt: skip
    events = [(e.stage, e.kind, e.micro_batch, begin_s + e.start_s, begin_s + e.end_s) for e in found]
    return tuple(sorted(events, key=lambda e: (e[0], e[3]))), p  # rank by rank, as ranks hand them in


TIMELINES: list[Timeline] = [
    _timeline((0.4, 0.4, 0.4), 2, 0.004, 7.0), _timeline((0.2, 0.5), 8, 0.001, 100.0),
    _timeline((0.3, 0.3, 0.3, 0.3), 16, 0.015, 3.0), _timeline((0.3, 0.6, 0.3), 6, 0.01, 12.5),
    _timeline((0.25, 0.35), 4, 0.0, 1.0),
]  # fmt: skip
"""In turn: few micro-batches, an uneven cut, messages, all of them, no message at all."""
TERMS = ("cut", "messages", "waiting")


def _terms(case: Timeline, *, kinds: Sequence[str] = ("forward", "backward"),
           passed: Sequence[str] = ("send", "receive"), mean: Function = lambda w: sum(w) / len(w),
           slowest: Function = max, message: Function = max,
           step: Function = lambda e: max(x[4] for x in e) - min(x[3] for x in e)) -> dict[str, float]:  # fmt: skip
    """The answer, with faults."""
    events, p = case
    work, sent = ([sum(e[4] - e[3] for e in events if e[0] == s and e[1] in those) for s in range(p)]
                  for those in (kinds, passed))  # fmt: skip
    cut, messages = slowest(work) - mean(work), message(sent)
    return {"cut": cut, "messages": messages, "waiting": step(events) - mean(work) - cut - messages}


def _slip(term: str, what: str, hint: str, change: Callable[[float], float] = float, **faults: Function) -> Slip:
    return lambda c: _zero(change(_terms(c, **faults)[term])), what, hint


PARTS = "of each stage: work = forward + backward seconds, messages = send + receive seconds"
BY_TERM: dict[str, list[Slip]] = {
    "cut": [
        _slip("cut", "your work has the forward passes alone", PARTS, kinds=("forward",)),
        _slip("cut", "your work has the messages in it", PARTS, kinds=("forward", "backward", "send", "receive")),
        _slip("cut", "you take the fastest stage for the mean", "the mean over all stages", mean=min),
        _slip("cut", "this is the slowest stage's whole work, not what it has beyond the mean", "less it",
              mean=lambda w: 0),
        _slip("cut", "these are milliseconds", "seconds", change=lambda s: 1e3 * s),
    ],
    "messages": [
        _slip("messages", "you add up the messages of all stages, which pass them at the same time",
               "of the stage that spends most on them", message=sum),
        _slip("messages", "you take the mean over the stages", "of the stage that spends most on them",
               message=lambda s: sum(s) / len(s)),
        _slip("messages", "you count what is sent or what is received, not both", PARTS, passed=("send",)),
        _slip("messages", "these are milliseconds", "seconds", change=lambda s: 1e3 * s),
    ],
    "waiting": [
        _slip("waiting", "your step lasts from 0 on the clock: it begins with its first event",
               "the last end less the first start", step=lambda e: max(x[4] for x in e)),
        _slip("waiting", "your step ends with the last event of the list, which need not be the last to end",
               "the last end less the first start", step=lambda e: e[-1][4] - e[0][3]),
        _slip("waiting", "these are milliseconds", "seconds", change=lambda s: 1e3 * s),
    ],
}  # fmt: skip


def check_lost_time(f: Function) -> None:
    """Five timelines of two to four stages."""
    got = [_as_terms(f([*events], p)) for events, p in TIMELINES]
    right = [solution.lost_time(*case) for case in TIMELINES]
    for term in TERMS:
        question = Question(term, TIMELINES, BY_TERM[term], _facts, PARTS + "; waiting is the rest of the step")
        question.judge([a[term] for a in got], [_zero(r[term]) for r in right])


def _as_terms(answer: Any) -> dict[str, float]:
    if not isinstance(answer, dict) or set(answer) != set(TERMS):
        raise Mistake(f"you return {answer!r:.60}", 'a dict: {"cut": ..., "messages": ..., "waiting": ...}, in seconds')
    return {term: _zero(number(answer[term], "0.02")) for term in TERMS}


def _zero(value: float) -> float:
    """The value; 0 for what is rounding."""
    return 0.0 if abs(value) < 1e-9 else value


def _facts(case: Timeline) -> str:
    micro_batches = 1 + max(e[2] for e in case[0])
    return f"{case[1]} stages, {micro_batches} micro-batches, {len(case[0])} events from {case[0][0][3]:g} s on"


# -- 06.3: where to cut


# 06.3, the task: seconds of the layers, and a number of stages

Chain = tuple[tuple[float, ...], int]
CASES: list[Chain] = [
    ((2.0, 3.0, 1.0, 4.0, 2.0, 7.0, 1.0, 5.0), 2),
    ((9.0, 1.0, 1.0, 2.0, 1.0, 1.0, 3.0), 3),
    ((1.0, 2.0, 2.0, 1.0, 8.0, 2.0, 1.0, 6.0, 3.0), 3),
    ((0.5, 4.0, 0.25, 4.0, 0.5, 3.0, 5.0, 1.5, 2.5, 6.0), 4),
    ((1.0, 6.0, 2.0, 1.0, 1.0, 12.0), 3),
    ((1.0, 9.0, 4.0, 5.0, 4.0, 2.0), 4),
    ((5.0, 5.0, 1.0, 10.0, 1.0, 12.0, 1.0), 4),
    ((3.0, 1.0, 2.0), 3),
    ((2.0, 5.0, 4.0), 1),
    ((4.0, 3.0, 1.0, 6.0, 2.0, 5.0, 1.0, 1.0, 7.0, 2.0, 3.0), 5),
]
"""(layer_s, stages), on which each of the slips below is wrong somewhere; also one stage only, and a layer for each."""
LONG: Chain = (tuple(1.0 + (37 * k) % 23 / 7 for k in range(25)), 13)
"""C(24, 12) = 2.7 million ways: too many to try, few enough that a list of them all still fits into memory."""
LIMIT_S = 1.0

# 06.3, the run: in a process of its own


def check_cuts(f: Function) -> None:
    """Small chains, all ways known; then a long one, which needs a search that does not try them all."""
    try:
        *answers, long_answer = _answers(f, [*CASES, LONG])
    except Late:
        _check_short(
            _answers(f, CASES, Mistake(f"your code did not finish within {LIMIT_S:g} s", "a loop never ends?"))
        )
        raise Mistake(
            f"right for short chains, but {len(LONG[0])} layers in {LONG[1]} stages took more than {LIMIT_S:g} s: "
            "there are 2.7 million ways to cut them, and 10^10 for 96 layers in 8 stages",
            "the best way to cut what is left depends on the layer where it begins and on the stages left: compute it "
            "once for each such pair, for example with functools.cache",
        ) from None
    _check_short(answers)
    if _wrong(LONG, cut := _indices(*long_answer)):
        raise Mistake(_told(LONG, cut), SEARCH)


class Late(Exception):
    """The answers took too long."""


Answer = tuple[Any, str, int]
"""The answer as a list, or None if it is none; as text; the number of stages."""


def _answers(f: Function, cases: Sequence[Chain], late: Exception | None = None) -> list[Answer]:
    try:
        return on_ranks(_answer_in_time, 1, f, cases, when="")[0]
    except RankFailed as e:
        if "SIGPROF" not in str(e):
            raise
        raise late or Late from None


def _answer_in_time(f: Function, cases: Sequence[Chain]) -> list[Answer]:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the system then ends this process, also inside of a C function
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # of computing: a busy machine does not count
    answers = [_as_list(f(list(layer_s), stages), stages) for layer_s, stages in cases]
    signal.setitimer(signal.ITIMER_PROF, 0)
    return answers


def _as_list(answer: Any, stages: int) -> Answer:
    try:
        found = list(islice(answer, 1000))  # an endless generator would fill the memory
    except TypeError:
        return None, f"{answer!r:.60}", stages
    if any(isinstance(a, list | tuple | range) for a in found):
        return found, f"{found!r:.60}", stages
    try:
        return [index(a) for a in found], f"{found!r:.60}", stages
    except TypeError:
        return [], f"{found!r:.60}", stages


# 06.3, the checks


def _check_short(answers: Sequence[Answer]) -> None:
    cuts = [_indices(*answer) for answer in answers]
    wrong = [(case, cut) for case, cut in zip(CASES, cuts, strict=True) if _wrong(case, cut)]
    if not wrong:
        return
    for slip, what, hint in SLIPS:
        if [slip(list(layer_s), stages) for layer_s, stages in CASES] == cuts:
            raise Mistake(f"{what}: {_told(*wrong[0])}", hint)
    raise Mistake(_told(*wrong[0]), BEGIN if _invalid(*wrong[0]) else SEARCH)


def _indices(found: list[Any] | None, text: str, stages: int) -> list[int]:
    """The answer as plain whole numbers."""
    if found is None:
        raise Mistake(f"you return {text}, not a list of cuts", "for two stages such as [3]")
    if any(isinstance(a, list | tuple | range) for a in found):
        raise Mistake(f"for {stages} stages you return {text}: these are the stages themselves",
                      "the number of the layer with which each stage but the first begins")  # fmt: skip
    if not found and text != "[]":
        raise Mistake(f"{text} are no numbers of layers", "whole numbers, counted from 0")
    return found


def _wrong(case: Chain, cut: Sequence[int]) -> bool:
    return bool(_invalid(case, cut)) or _slower(case, cut)


def _invalid(case: Chain, cut: Sequence[int]) -> str:
    """Why these are no cuts at all, in words; "" if they are."""
    layer_s, stages = case
    if len(cut) != stages - 1:
        return f"{stages} stages need {stages - 1} cut{'s' * (stages != 2)}, and you return {list(cut)}"
    for stage, (begin, end) in enumerate(pairwise([0, *cut, len(layer_s)])):
        if not 0 <= begin <= len(layer_s):
            return f"your cuts are {list(cut)}, and there are {len(layer_s)} layers"
        if end <= begin:
            return f"with cuts {list(cut)} stage {stage} of {stages} would be empty"
    return ""


def _slower(case: Chain, cut: Sequence[int]) -> bool:
    return max(_sums(case[0], cut)) > max(_sums(case[0], solution.cuts(*case))) + 1e-9


def _sums(layer_s: Sequence[float], cut: Sequence[int]) -> list[float]:
    return [sum(layer_s[a:b]) for a, b in pairwise([0, *cut, len(layer_s)])]


def _told(case: Chain, cut: Sequence[int]) -> str:
    """The case and what is wrong with the answer, with the sums of all stages."""
    layer_s, stages = case
    layers = ", ".join(f"{s:g}" for s in layer_s) if len(layer_s) < 20 else f"{len(layer_s)} layers"
    if problem := _invalid(case, cut):
        return f"layers of {layers} s: {problem}"
    best = solution.cuts(*case)
    own, other = (" + ".join(f"{s:.4g}" for s in _sums(layer_s, c)) for c in (cut, best))
    slow, fast = (max(_sums(layer_s, c)) for c in (cut, best))
    return (f"layers of {layers} s in {stages} stages: your cuts {list(cut)} make stages of {own} s, the slowest "
            f"{slow:.4g} s; there is a way with {other} s, the slowest {fast:.4g} s")  # fmt: skip


# 06.3, what typical mistakes give


def _by(objective: Callable[[list[float]], float]) -> Function:
    """The cuts with the least `objective` of the stages' sums."""

    def choose(layer_s: list[float], stages: int) -> list[int]:
        ways = combinations(range(1, len(layer_s)), stages - 1)
        return list(min(ways, key=lambda cut: objective(_sums(layer_s, cut))))

    return choose


def _greedy(before: bool) -> Function:
    """Close a stage when it reaches the average of all, or `before` it would pass it."""

    def fill(layer_s: list[float], stages: int) -> list[int]:
        cut, now, average = [], 0.0, sum(layer_s) / stages
        for k, seconds in enumerate(layer_s):
            full = now + seconds > average if before else now >= average
            if now and full and len(cut) < stages - 1:
                cut.append(k)
                now = 0.0
            now += seconds
        return cut

    return fill


def _nearest_to_shares(layer_s: list[float], stages: int) -> list[int]:
    """Each cut where the running sum is nearest to its share of the total."""
    until = list(accumulate(layer_s, initial=0.0))
    return [min(range(len(until)), key=lambda c: abs(until[c] - k * until[-1] / stages)) for k in range(1, stages)]


BEGIN = "return the number of the layer with which each stage but the first begins, counted from 0"
SEARCH = "the slowest stage sets the pace: of all ways to cut, take the one whose largest stage sum is smallest"
EQUAL = "you give every stage as many layers, whatever they cost"
FILL = "you fill one stage after the other up to the average"
SLIPS: list[tuple[Function, str, str]] = [
    (lambda c, p: [i - 1 for i in solution.cuts(c, p)], "you return the last layer of each stage", BEGIN),
    (lambda c, p: [i + 1 for i in solution.cuts(c, p)], "you count layers from 1", BEGIN),
    (lambda c, p: [0, *solution.cuts(c, p)], "you begin with 0", "the first stage always begins there: leave it out"),
    (lambda c, p: [*solution.cuts(c, p), len(c)], "you end with the number of layers", "no stage begins there"),
    (lambda c, p: [b - a for a, b in pairwise([0, *solution.cuts(c, p), len(c)])], "you return how many layers each "
     "stage has", BEGIN),
    (lambda c, p: solution.cuts(c, min(2, len(c))), "you always cut in two", "there are `stages` stages"),
    (lambda c, p: [k * len(c) // p for k in range(1, p)], EQUAL, SEARCH),
    (lambda c, p: [round(k * len(c) / p) for k in range(1, p)], EQUAL, SEARCH),
    (_greedy(before=False), f"{FILL}, and a bit over", SEARCH),
    (_greedy(before=True), f"{FILL}, and what never fitted ends up in the last one", SEARCH),
    (_nearest_to_shares, "you cut where the running sum is at its share of the total, as near as can be", SEARCH),
    (lambda c, p: solution.cuts(sorted(c, reverse=True), p), "you sort the layers before you cut: a stage must hold "
     "layers that follow each other in the model", SEARCH),
    (_by(lambda sums: sum(s * s for s in sums)), "you minimise the sum of squares", SEARCH),
    (_by(lambda sums: max(sums) - min(sums)), "you minimise the difference between slowest and fastest stage: a "
     "faster stage costs nothing, it only waits", SEARCH),
    (_by(lambda sums: max(sums[:-1], default=0)), "you leave the last stage out of the comparison", SEARCH),
    (_by(lambda sums: -min(sums)), "you make the fastest stage as slow as can be", SEARCH),
    (_by(lambda sums: -max(sums)), "you make the slowest stage as slow as can be", "min(), not max(), of the ways"),
]  # fmt: skip


EXERCISES = {
    "06.1": Exercise("the order of a pipeline's stage, under a memory limit", check_order, solution.order),
    "06.2": Exercise("where a pipeline's milliseconds go", check_lost_time, solution.lost_time),
    "06.3": Exercise("where to cut the model", check_cuts, solution.cuts),
    "06.4": Exercise("a layer of FSDP by hand", check_sharded_linear, solution.sharded_linear),
}
