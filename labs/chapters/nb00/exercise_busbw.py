"""Exercise 00.3: measure an all-reduce on ranks. The checker slows the collective down and keeps its own times.

First on a made clock, on which nothing but an all-reduce takes time: no neighbour disturbs it, so that a percent tells
GiB/s from GB/s. An answer that is not right on it may have read another clock, and is judged by real times.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from labs.common.timing import collectives
from labs.kit.answers import number, on_ranks
from labs.kit.check import Mistake
from labs.kit.failure import RankFailed

CASES = ((3, 3 * 2**18, 1.0), (2, 2**20, 0.4))
"""(ranks, bytes, what the checker adds to the first all-reduce on a rank in s).

The first is not in one proportion to the others in both: else its part in a mean could be taken for a wrong factor.
"""
CALL_S = 0.02  # what the checker adds to each of the others
LAST_RANK = 5  # times CALL_S on the last rank, which is the slowest
NEAR = 1.15  # a clock around a call sees a little more than the call
GIB = 2**30 / 1e9  # GB in a GiB: less than NEAR, so it is looked for by itself
NEAR_MADE = 1.01  # on the made clock
TICK_S = 1e-7  # by which the made clock goes on when it is read: a loop that waits for it ends
CLOCKS = ("perf_counter", "monotonic", "time")
IN_GIB = "this is in GiB/s, which are 2^30 bytes per second", "divide by 10^9 to get GB/s"
EXACT = 0.01  # how near an answer in GiB/s must be to a mean or the median of the slowest rank, in all cases
STEADY = 1.1  # mean over median of a rank's calls: above it, a neighbour's moment is in them, and mean and median part
AGAIN_S = 10.0  # so long a disturbed measurement is made again, whatever it would say; then it is judged as it is
Log = list[tuple[int, float, float]]
"""(bytes, when it began, when it ended) of each all-reduce on this rank."""
Slips = dict[str, str]
"""Of mistakes that explain an answer: what it is, and a hint."""


class _Waited:
    """What an asynchronous all-reduce returns: done when `wait` has added the checker's time."""

    def __init__(self, work: Any, end: Callable[[], None]) -> None:
        self.work, self.end = work, end

    def wait(self, *args: Any) -> Any:
        done = self.work.wait(*args)
        self.end()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


class _Clock:
    """By which the checker's calls take their time: the real one."""

    sleep = staticmethod(time.sleep)

    def meet(self) -> None:
        """After a collective, in which the ranks have waited for each other."""

    def installed(self, function: Callable[..., Any]) -> AbstractContextManager[None]:
        """In place of the function's own clocks."""
        return nullcontext()


class _MadeClock(_Clock):
    """Goes on when a call of the checker sleeps; stands in for those of `time`, also under names of a function's own.

    Each rank has its own. An all-reduce and a barrier set them to that of the rank which came last, as waiting would.
    """

    def __init__(self) -> None:
        self.passed_s = 0.0
        self.all_reduce, self.barrier = dist.all_reduce, dist.barrier

    def sleep(self, seconds: float) -> None:
        self.passed_s += seconds

    def meet(self) -> None:
        last = torch.tensor(self.passed_s, dtype=torch.float64)
        self.all_reduce(last, dist.ReduceOp.MAX)
        self.passed_s = last.item()

    def stand_in(self, real: Callable[[], float]) -> Callable[[], float]:
        begun = real()

        def read() -> float:
            self.passed_s += TICK_S
            in_unit = self.passed_s * 1e9 if isinstance(begun, int) else self.passed_s
            return type(begun)(begun + in_unit)

        return read

    def waiting(self, *args: Any, **kwargs: Any) -> Any:
        done = self.barrier(*args, **kwargs)
        self.meet()
        return done

    def installed(self, function: Callable[..., Any]) -> AbstractContextManager[None]:
        reals = [vars(time)[name + unit] for name in CLOCKS for unit in ("", "_ns")]
        return replaced(function, [(real, self.stand_in(real)) for real in reals] + [(self.barrier, self.waiting)])


@contextmanager
def replaced(function: Callable[..., Any], pairs: list[tuple[Any, Any]]) -> Iterator[None]:
    """Of each pair the second in place of the first, in time, in torch.distributed and under any name in `function`."""
    places = (vars(time), vars(dist), getattr(function, "__globals__", {}))
    found = [
        (names, name, real, mine)
        for real, mine in pairs
        for names in places
        for name, value in names.items()
        if value is real
    ]
    for names, name, _, mine in found:
        names[name] = mine
    try:
        yield
    finally:
        for names, name, real, _ in found:
            names[name] = real


@contextmanager
def slowed(log: Log, function: Callable[..., Any], first_s: float, clock: _Clock) -> Iterator[None]:
    """dist.all_reduce takes `first_s` or CALL_S longer, and is noted; also under a name of its own in `function`."""
    original = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        added = CALL_S * (LAST_RANK if dist.get_rank() == dist.get_world_size() - 1 else 1) if log else first_s
        place = len(log)
        log.append((tensor.numel() * tensor.element_size(), begun, math.inf))

        def end() -> None:
            clock.sleep(added)
            log[place] = (*log[place][:2], time.perf_counter())

        work = original(tensor, *args, async_op=async_op, **kwargs)
        clock.meet()
        if async_op:
            return _Waited(work, end)
        end()
        return work

    with replaced(function, [(original, all_reduce)]):
        yield


def _measured(f: Callable[[int], float], size: int, first_s: float, made: bool = False) -> tuple[Any, Log]:
    log: Log = []
    clock = _MadeClock() if made else _Clock()
    with clock.installed(f), slowed(log, f, first_s, clock):
        answer = f(size)
    return (answer.item() if isinstance(answer, torch.Tensor) and answer.numel() == 1 else answer), log


def check_busbw(f: Callable[[int], float]) -> None:
    """On 3 and on 2 ranks the answer is size / time x 2 (n - 1) / n, with the slowest rank's time after a warm-up."""
    if (slips := _on_a_made_clock(f)) is not None:
        for what, hint in slips.items():
            raise Mistake(what, hint)
        return
    slips = {}
    in_gib = True
    for ranks, size, first_s in CASES:
        deadline = time.monotonic() + AGAIN_S
        while True:
            found = on_ranks(_measured, ranks, f, size, first_s, when="in your measurement")
            logs = [log for _, log in found]
            if not _disturbed(logs, size) or time.monotonic() > deadline:
                break
        answers = [number(answer, "0.05, in GB/s") for answer, _ in found]
        fitting = _judge(answers, logs, ranks, size)
        in_gib &= _in_gib(min(answers), logs, ranks, size)
        slips = {what: hint for what, hint in slips.items() if what in fitting} or slips or fitting
        if len(slips) == 1:
            break  # of two that explain the first case, the second tells which it is
    for what, hint in slips.items():
        raise Mistake(what, hint)
    if in_gib:
        raise Mistake(*IN_GIB)


def _on_a_made_clock(f: Callable[[int], float]) -> Slips | None:
    """{} if the answers are right on it, the slip that explains all of them; None if real times have to tell."""
    found: list[Slips] = []
    try:
        for ranks, size, first_s in CASES:
            answers, logs = zip(*on_ranks(_measured, ranks, f, size, first_s, True, when=""), strict=True)
            found.append(_judge([number(a, "0.05, in GB/s") for a in answers], list(logs), ranks, size, NEAR_MADE))
    except (Mistake, RankFailed):
        return None
    if not (wrong := [slips for slips in found if slips]):
        return {}
    # Of 2 ranks, where the factor is 1, some are right by chance
    return {what: hint for what, hint in wrong[0].items() if what in wrong[-1]} or None


def _disturbed(logs: list[Log], size: int) -> bool:
    """Whether a few calls of a rank, or pauses between them, took so long that mean and median tell other speeds."""
    for log in logs:
        calls = [(begun, end) for seen, begun, end in log if seen == size]
        if len(calls) < 4 or any(end == math.inf for _, end in calls):  # a mistake, however long they took
            return False
        times = [end - begun for begun, end in calls[1:]]
        pauses = [after - end for (_, end), (after, _) in pairwise(calls[1:])]
        middle = statistics.median(times)
        late_s = sum(max(0.0, p - statistics.median(pauses)) for p in pauses)
        if statistics.fmean(times) + late_s / len(times) > STEADY * middle:
            return True
    return False


def _judge(answers: list[float], logs: list[Log], ranks: int, size: int, near: float = NEAR) -> Slips:
    """The known slips that explain a wrong answer, {} for a right one. Any other mistake is raised."""
    case = f"{size:,} bytes on {ranks} ranks"
    if not any(seen == size for log in logs for seen, *_ in log):
        sizes = sorted({seen for log in logs for seen, *_ in log})
        if 4 * size in sizes:
            raise Mistake(
                f"you were asked for {size:,} bytes, and sent {4 * size:,}",
                "a float32 has 4 bytes: torch.zeros(size_bytes // 4)",
            )
        sent = f"your all-reduces had {', '.join(f'{s:,}' for s in sizes)} bytes" if sizes else "no all-reduce was seen"
        raise Mistake(f"{case}: {sent}", "dist.all_reduce(torch.zeros(size_bytes // 4)) sends what is asked for")
    per_rank = _times(logs, size)
    if any(math.inf in times for times in per_rank):
        raise Mistake(
            "an all-reduce with async_op=True was never waited for: only its start was timed",
            "call wait() on what it returns, before you read the clock, or leave async_op out",
        )
    if any(len(times) < 4 for times in per_rank):
        raise Mistake(
            f"{case}: only {min(map(len, per_rank))} all-reduces of this size were run",
            "warm up with at least one, and time at least three",
        )
    low, high = _right(logs, ranks, size)
    if not low / near <= min(answers) <= high * near and (slips := _slips(min(answers), per_rank, ranks, size, near)):
        return slips
    if max(answers) > 1.001 * min(answers):
        texts = ", ".join(f"{a:.3g}" for a in answers)
        raise Mistake(
            f"{case}: the ranks answer {texts} GB/s, each with a time of its own",
            "take the largest time of all ranks: dist.all_reduce(seconds, op=dist.ReduceOp.MAX)",
        )
    if not low / near <= answers[0] <= high * near:
        hint = "size / time x 2 (n - 1) / n, in 10^9 bytes/s; time the calls alone, after a warm-up"
        raise Mistake(f"{case}: you answer {answers[0]:.3g} GB/s; the checker's clock says {high:.2g} GB/s", hint)
    return {}


def _right(logs: list[Log], ranks: int, size: int) -> tuple[float, float]:
    """(lowest, highest) busbw in GB/s by the checker's clock."""
    low, high = (_gb_s(seconds, ranks, size) for seconds in _bounds(_times(logs, size)))
    return low, high


def _in_gib(got: float, logs: list[Log], ranks: int, size: int) -> bool:
    """Whether `got` is too low for GB/s, though not by NEAR, and GiB/s to the very percent."""
    slowest = max((times[1:] for times in _times(logs, size)), key=statistics.median)
    taken = [statistics.median(slowest), *(statistics.fmean(slowest[k:]) for k in range(len(slowest) - 2))]
    low, _ = _right(logs, ranks, size)
    exact = any(math.isclose(got * GIB, _gb_s(seconds, ranks, size), rel_tol=EXACT) for seconds in taken)
    return exact and got < low * (1 - 3 * EXACT)


def _times(logs: list[Log], size: int) -> list[list[float]]:
    return [[end - begun for seen, begun, end in log if seen == size] for log in logs]


def _gb_s(seconds: float, ranks: int, size: int) -> float:
    return size / seconds * collectives.bus_factor("all_reduce", ranks) / 1e9


def _bounds(per_rank: list[list[float]]) -> tuple[float, float]:
    """(longest, shortest) time that a right answer may take for one call.

    The fastest call of the rank that is slowest; the largest mean of all ranks, of whatever was left after warming up.
    """
    after = [times[1:] for times in per_rank]
    means = [statistics.fmean(times[k:]) for times in after for k in range(len(times) - 2)]
    slowest = max(after, key=statistics.median)
    return max(*means, statistics.median(slowest)), min(slowest)


def _slips(got: float, per_rank: list[list[float]], ranks: int, size: int, near: float) -> Slips:
    """Those that make `got` of the very calls that were run, the nearest first."""
    medians = [statistics.median(times[1:]) for times in per_rank]
    slow, fast = max(medians), min(medians)
    factor = collectives.bus_factor("all_reduce", ranks)
    want, send_once = size / slow * factor / 1e9, "an all-reduce sends everything twice: 2 (n - 1) / n"
    slips = [
        (
            size / max(map(statistics.fmean, per_rank)) * factor / 1e9,
            "the first all-reduce, which makes the connections, is in the mean",
            "run one before the clock starts",
        ),
        (want * slow / fast, "this is the fastest rank's time", "the slowest rank counts: nobody goes on before it"),
        (want / factor, "this is algbw, size / time", "multiply by 2 (n - 1) / n"),
        (want / 2, "the factor (n - 1) / n is that of all-gather", send_once),
        *[(want / GIB, *IN_GIB)] * (near < GIB),
    ]
    fitting = [slip for slip in slips if math.isclose(got, slip[0], rel_tol=near - 1)]
    return {what: hint for _, what, hint in sorted(fitting, key=lambda slip: abs(math.log(got / slip[0])))}
