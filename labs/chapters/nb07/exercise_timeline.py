"""Exercise 07.3: what a timeline of several ranks says, on twenty that are made from seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labs.chapters.nb07 import solutions as solution
from labs.chapters.nb07.timelines import (
    REMEDIES,
    RankTimeline,
    answer,
    exposed,
    job,
    shares,
    step_ms,
    timeline,
    with_remedy,
)
from labs.kit.answers import Question, Slip, number
from labs.kit.check import Mistake

SEEDS = range(100, 120)  # four timelines for each remedy

EXPOSED = "per rank: ms of all-reduces after its backward's end, over ms of all its all-reduces; then the largest"


def _worst(per_rank: Callable[[RankTimeline], float]) -> Callable[[int], float]:
    return lambda seed: max(map(per_rank, timeline(seed)))


def _total(seed: int) -> float:
    late, every = map(sum, zip(*map(exposed, timeline(seed)), strict=True))
    return late / every


SLIPS: list[Slip] = [
    (_worst(lambda r: exposed(r)[0] / r.buckets[-1].end), "this is the exposed share of the step",
     "of communication: divide by the time in all-reduces"),
    (_worst(lambda r: 100 * exposed(r)[0] / exposed(r)[1]), "this is in percent", "a share: 1 for all"),
    (_total, "this is the share of all ranks together", "of the rank on which it is largest"),
    (_worst(lambda r: 1 - exposed(r)[0] / exposed(r)[1]), "this is the hidden share", "1 minus it, and the largest"),
    (_worst(lambda r: sum(b.end - b.start for b in r.buckets if b.start >= r.backward[1]) / exposed(r)[1]),
     "an all-reduce that begins during backward and ends after it is exposed from backward's end on, and you count "
     "none of it", "end - max(start, backward's end), if that is positive"),
    (_worst(lambda r: sum(b.end - b.start for b in r.buckets if b.end > r.backward[1]) / exposed(r)[1]),
     "an all-reduce that begins during backward and ends after it is hidden until backward's end, and you count all "
     "of it", "end - max(start, backward's end), if that is positive"),
]  # fmt: skip


def check_diagnose(f: Callable[..., Any]) -> None:
    """The share, the rank, then the remedy."""
    got = [_three(f(timeline(seed), job(seed).latency_ms)) for seed in SEEDS]
    want = [solution.diagnose(timeline(seed), job(seed).latency_ms) for seed in SEEDS]
    Question("the exposed share", SEEDS, SLIPS, _facts, EXPOSED).judge([g[0] for g in got], [w[0] for w in want])
    for seed, (_, rank, _) in zip(SEEDS, got, strict=True):
        every = shares(timeline(seed))
        if not (0 <= rank < len(every) and every[rank] > max(every) - 1e-3):
            slowest = max(range(len(every)), key=lambda r, seed=seed: timeline(seed)[r].backward[1])
            raise Mistake(
                f"{_facts(seed)}: you name rank {rank}"
                + (", whose backward ends last: the others show the waiting" if rank == slowest else ""),
                "the rank with the largest exposed share",
            )
    for seed, (_, _, remedy) in zip(SEEDS, got, strict=True):
        _check_remedy(seed, remedy)


def _three(found: Any) -> tuple[float, int, str]:
    try:
        share, rank, remedy = found
    except (TypeError, ValueError):
        raise Mistake(f"you return {found!r:.60}, not three values", "return share, rank, remedy") from None
    if not isinstance(remedy, str) or remedy not in REMEDIES:
        raise Mistake(f"{remedy!r:.60} is no remedy of the list", ", ".join(REMEDIES))
    return number(share, "0.3"), int(number(rank, "0")), remedy


def _facts(seed: int) -> str:
    every = ", ".join(f"{100 * s:.1f} %" for s in shares(timeline(seed)))
    return f"timelines.timeline({seed}), in which {every} of the ranks' communication is exposed"


WHY = {
    "nothing": "communication is hidden already: less than a tenth of it is exposed",
    "mend the straggler": "most of the waiting is for one rank that still computes: the all-reduces are long on the "
    "other ranks, and short once the last rank has joined",
    "smaller buckets": "once all ranks have joined, the all-reduces together would fit into backward: the last one "
    "begins too late, because a bucket waits for its last gradient",
    "larger buckets": "most of the time on the wire is latency, paid once for each bucket",
    "faster wire": "the wire is busy from the first bucket on, with bytes and not with latency, and has more to do "
    "than backward can hide",
}


def _check_remedy(seed: int, remedy: str) -> None:
    right, made = answer(job(seed)), job(seed)
    if remedy == right:
        return
    gains = (
        ""
        if "nothing" in (remedy, right)
        else (
            f" In a model of this step it wins back {step_ms(made) - with_remedy(made, right):.1f} ms, yours "
            f"{step_ms(made) - with_remedy(made, remedy):.1f} ms."
        )
    )
    raise Mistake(f"{_facts(seed)}: you say {remedy!r}, and it is {right!r}.{gains}", WHY[right])
