"""Exercises of notebook 00: diagnose cards from a printout, count usable cores, measure an all-reduce."""

from __future__ import annotations

import contextlib
import inspect
import math
import operator
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist

from labs.kit.exercise import Exercise, KnownMistake
from labs.kit.launch import run_on_ranks

Card = dict[str, Any]


def _card(clock: int, watts: int, degrees: int, busy: int, *reasons: str) -> Card:
    return {
        "SM clock (MHz)": clock,
        "max SM clock (MHz)": 1980,
        "power (W)": watts,
        "power limit (W)": 700,
        "temperature (C)": degrees,
        "utilisation (%)": busy,
        "throttle reasons": list(reasons),
    }


CARDS = {
    "A": _card(1755, 699, 64, 100, "power cap"),
    "B": _card(345, 76, 31, 0),
    "C": _card(1980, 523, 79, 98),
    "D": _card(1110, 371, 88, 100, "software thermal slowdown"),
    "E": _card(1200, 402, 58, 100, "application clocks setting"),
}
"""Made-up NVML readings of five identical cards, one in each state."""
HIDDEN = {
    "a hot card without a throttle reason": _card(1980, 540, 86, 99),
    "an idle card with clocks set by hand": _card(345, 74, 30, 0, "application clocks setting"),
    "a card that its own hardware slows, for heat": _card(885, 290, 92, 100, "hardware thermal slowdown"),
    "a card at 42 % utilisation that runs at full clock": _card(1980, 210, 45, 42),
    "a card whose power supply asks for less": _card(990, 330, 60, 100, "hardware slowdown", "power brake"),
}


def diagnose(card: Card) -> str:
    """Return "idle", "heat", "power", "locked" or "fine"."""
    reasons = " ".join(card["throttle reasons"])
    if card["utilisation (%)"] == 0:
        return "idle"  # without work a card lowers its clocks, so they show nothing
    if "thermal" in reasons:
        return "heat"
    if "power" in reasons:
        return "power"
    return "locked" if "clocks setting" in reasons else "fine"


def observe_diagnosis(answer: Callable[[Card], str]) -> dict[str, Any]:
    """Return the answer's word for each of the notebook's cards, and for others."""
    found = {f"card {name}": answer(dict(card)) for name, card in CARDS.items()}
    return found | {what: answer(dict(card)) for what, card in HIDDEN.items()}


def _by_reasons_alone(card: Card) -> str:
    return "fine" if not card["throttle reasons"] else diagnose(card | {"utilisation (%)": 100})


def _by_temperature(card: Card) -> str:
    return "heat" if card["temperature (C)"] > 80 and card["utilisation (%)"] else diagnose(card)


def _software_only(card: Card) -> str:
    return "fine" if "hardware thermal slowdown" in card["throttle reasons"] else diagnose(card)


def usable_cores(affinity: Collection[int], cpu_max: str) -> int:
    """Return how many threads can run all the time: the affinity's cores, cut by the quota, at least 1."""
    quota, period = cpu_max.split()
    if quota == "max":
        return len(affinity)
    return max(1, min(len(affinity), int(quota) // int(period)))


CORES = (
    ({0, 1, 2, 3}, "max 100000"),
    ({5}, "max 50000"),
    ({5}, "400000 100000"),
    (set(range(8)), "200000 100000"),
    (set(range(8)), "100000 50000"),
    (set(range(8)), "50000 100000"),
    (set(range(8)), "270000 100000"),
)


def observe_usable_cores(answer: Callable[[set[int], str], int]) -> dict[str, Any]:
    """Return how many cores the answer counts for each affinity and quota."""
    return {f'affinity {cores}, cpu.max "{text}"': _whole(answer(set(cores), text)) for cores, text in CORES}


def _whole(count: Any) -> Any:
    """Return an int, even from NumPy or torch, or a description of anything else."""
    try:
        return operator.index(count)
    except TypeError:
        return f"{count!r:.40}, not a whole number"


def _without_quota(affinity: Collection[int], cpu_max: str) -> int:
    return len(affinity)


def _without_affinity(affinity: Collection[int], cpu_max: str) -> int:
    return usable_cores(affinity if "max" in cpu_max else range(10**6), cpu_max)


def _rounded_up(affinity: Collection[int], cpu_max: str) -> int:
    quota, period = cpu_max.split()
    return len(affinity) if quota == "max" else min(len(affinity), math.ceil(int(quota) / int(period)))


def _down_to_none(affinity: Collection[int], cpu_max: str) -> int:
    quota, period = cpu_max.split()
    return len(affinity) if quota == "max" else min(len(affinity), int(quota) // int(period))


def measured_busbw_gb_s(size_bytes: int) -> float:
    """Return the bus bandwidth of an all-reduce of `size_bytes`, in 10^9 byte/s; the same number on every rank."""
    buffer, ranks = torch.zeros(size_bytes // 4), dist.get_world_size()
    dist.all_reduce(buffer)  # the first one opens the connections
    seconds = []
    for _ in range(5):
        dist.barrier()  # all ranks start together
        start = time.perf_counter()
        dist.all_reduce(buffer)
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(seconds))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return size_bytes / slowest.item() * 2 * (ranks - 1) / ranks / 1e9


RANKS, SIZE = 3, 3 * 2**18
CALL_S, LAST_RANK_S, FIRST_S = 0.03, 0.12, 0.6
"""Seconds that the checker adds to an all-reduce, to one on the last rank, and to each rank's first one."""
NEAR = 1.2  # tolerance, because a clock around a call measures more than the call
Log = list[tuple[int, float]]
"""(bytes, seconds) of each all-reduce of a rank; inf seconds if it was never waited for."""


def observe_busbw(answer: Callable[[int], float]) -> dict[str, Any]:
    """Return what the answer measures on three ranks, where the checker slows every all-reduce by known times."""
    found = run_on_ranks(_slowed, RANKS, answer)
    numbers, logs = [number for number, _ in found], [[s for size, s in log if size == SIZE] for _, log in found]
    if not all(isinstance(number, float) for number in numbers):
        return {"what it returns": numbers[0]}
    calls = min(map(len, logs))
    observed = {
        "what it returns": "a number",
        "all-reduces of the size asked for": "4 or more" if calls >= 4 else calls,
    }
    if calls < 4:
        return observed
    observed["it waits for every all-reduce"] = all(math.isfinite(s) for log in logs for s in log)
    same = max(numbers) <= 1.001 * min(numbers)
    observed["the ranks' answers"] = "the same number" if same else "different numbers"
    return observed | {"the time behind the answer": _time_behind(numbers[0], logs)}


def _time_behind(gb_s: float, logs: list[list[float]]) -> str:
    """Say which time in the checker's log, and which formula, give this answer."""
    after = [log[1:] for log in logs]
    slowest = max(after, key=statistics.median)
    factor = 2 * (RANKS - 1) / RANKS
    right = [statistics.median(slowest), *(statistics.fmean(slowest[k:]) for k in range(len(slowest) - 2))]
    seconds = SIZE / 1e9 / gb_s * factor if gb_s > 0 else math.inf
    if min(right) / NEAR <= seconds <= max(right) * NEAR:
        return "the slowest rank's, after a warm-up"
    others = {
        "the first call is in the mean": statistics.fmean(max(logs, key=statistics.fmean)),
        "the fastest rank's": min(map(statistics.median, after)),
        "size / time, without 2 (n - 1) / n": statistics.median(slowest) * factor,
    }
    name = min(others, key=lambda name: abs(math.log(seconds / others[name])))
    return name if others[name] / NEAR <= seconds <= others[name] * NEAR else f"{seconds:.2g} s, none that was taken"


def _slowed(answer: Callable[[int], float]) -> tuple[Any, Log]:
    """Return a rank's answer as a float (or described in words) and the checker's log."""
    log: Log = []
    with _slow_all_reduce(answer, log):
        found = answer(SIZE)
    try:
        return float(found), log
    except (TypeError, ValueError):
        return f"{found!r:.40}", log


class _Waited:
    """The work of an asynchronous all-reduce. It has finished once `wait` has added the checker's time."""

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        self.work, self.finish = work, finish

    def wait(self, *args: Any) -> Any:
        done = self.work.wait(*args)
        self.finish()
        return done


@contextlib.contextmanager
def _slow_all_reduce(answer: Callable[..., Any], log: Log) -> Iterator[None]:
    """Slow dist.all_reduce down, under every name that `answer` has for it, and log its calls."""
    original = dist.all_reduce
    last = dist.get_rank() == dist.get_world_size() - 1

    def all_reduce(tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        place, start = len(log), time.perf_counter()
        log.append((tensor.numel() * tensor.element_size(), math.inf))
        added = (LAST_RANK_S if last else CALL_S) if place else FIRST_S

        def finish() -> None:
            time.sleep(added)
            log[place] = (log[place][0], time.perf_counter() - start)

        work = original(tensor, *args, async_op=async_op, **kwargs)
        return _Waited(work, finish) if async_op else finish()

    places = (vars(dist), getattr(inspect.unwrap(answer), "__globals__", {}))
    named = [(names, name) for names in places for name, value in names.items() if value is original]
    for names, name in named:
        names[name] = all_reduce
    try:
        yield
    finally:
        for names, name in named:
            names[name] = original


def _timed(
    size_bytes: int, calls: int = 5, warm: bool = True, op: Any = dist.ReduceOp.MAX, busbw: bool = True
) -> float:
    """Run the reference with one thing changed."""
    buffer, ranks = torch.zeros(size_bytes // 4), dist.get_world_size()
    if warm:
        dist.all_reduce(buffer)
    start = time.perf_counter()
    for _ in range(calls):
        dist.barrier()
        dist.all_reduce(buffer)
    seconds = torch.tensor((time.perf_counter() - start) / calls)
    if op is not None:
        dist.all_reduce(seconds, op=op)
    return size_bytes / seconds.item() / 1e9 * (2 * (ranks - 1) / ranks if busbw else 1)


def _first_call_too(size_bytes: int) -> float:
    return _timed(size_bytes, warm=False)


def _each_rank_its_own(size_bytes: int) -> float:
    buffer, ranks = torch.zeros(size_bytes // 4), dist.get_world_size()
    dist.all_reduce(buffer)
    seconds = []
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(buffer)
        seconds.append(time.perf_counter() - start)
    return size_bytes / statistics.median(seconds) * 2 * (ranks - 1) / ranks / 1e9


def _algbw(size_bytes: int) -> float:
    return _timed(size_bytes, busbw=False)


def _one_call(size_bytes: int) -> float:
    return _timed(size_bytes, calls=1)


EXERCISES = {
    "00.1": Exercise(
        "00.1",
        10,
        "find the card that throttles, and why",
        observe_diagnosis,
        diagnose,
        (
            KnownMistake(
                "an idle card was judged by its throttle reasons",
                "look at the utilisation first: without work, a card lowers its clocks",
                _by_reasons_alone,
            ),
            KnownMistake(
                "a hot card counts as throttled even if it runs at full clock",
                "the driver says whether heat slows it: look for a thermal reason",
                _by_temperature,
            ),
            KnownMistake(
                "heat was found only where software slows the card",
                'there is a hardware thermal slowdown as well: look for "thermal" in each reason',
                _software_only,
            ),
        ),
    ),
    "00.2": Exercise(
        "00.2",
        10,
        "count usable cores from affinity and cpu.max",
        observe_usable_cores,
        usable_cores,
        (
            KnownMistake(
                "the quota is ignored", '"200000 100000" grants 2 cores, whatever the affinity', _without_quota
            ),
            KnownMistake(
                "the affinity is ignored where there is a quota", "take the smaller of the two", _without_affinity
            ),
            KnownMistake(
                "a part of a core was counted as a whole one", "round down: that thread would often stop", _rounded_up
            ),
            KnownMistake("half a core became 0 cores", "one thread can always run: return at least 1", _down_to_none),
        ),
    ),
    "00.3": Exercise(
        "00.3",
        20,
        "measure the bus bandwidth of an all-reduce",
        observe_busbw,
        measured_busbw_gb_s,
        (
            KnownMistake("the first all-reduce was timed", "it makes the connections: run one first", _first_call_too),
            KnownMistake(
                "each rank answers with its own time",
                "dist.all_reduce(seconds, op=dist.ReduceOp.MAX) gives every rank the longest",
                _each_rank_its_own,
            ),
            KnownMistake("this is algbw, size / time", "multiply it by 2 (n - 1) / n", _algbw),
            KnownMistake("one all-reduce was timed", "a single call can be slow by chance: time at least 3", _one_call),
        ),
    ),
}
