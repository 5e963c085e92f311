"""What notebook 01's records say of each part of a method of timing, of the batch and of the learning rate."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from typing import NamedTuple

from labs.kit.claims import GAIN, last, model_of, percent, ratio, runs
from labs.kit.measure import Estimate, differs, estimate
from labs.kit.record import Record, Records

SLOW = 0.1  # of the best rate: an order of magnitude is missing
BUSY = 0.9  # of the share for which the large products look busy: from here a job looks as busy
APART = 100 * (GAIN - 1)  # % by which times differ that are not the same
RUNGS = ("as printed", "data outside", "synchronise", "warm up", "median of steps")
DRAWS = 999
ARTICLES_STEPS = 100
AS_THE_ARTICLE = ("x.to(device)", ARTICLES_STEPS)
"""What a step of its loop waits for, and its number of steps."""


def any_differs(found: dict[str, Estimate]) -> bool:
    """Whether one of these ratios leaves out 1."""
    return any(map(differs, found.values()))


def in_words(found: dict[str, Estimate]) -> str:
    """Ratios with their models, and which of them show no difference."""
    return ", ".join(f"{r} ({m}{'' if differs(r) else ': no difference shown'})" for m, r in found.items())


# -- labs.utilisation


def counter(run: Records) -> str:
    """What was read, in brackets: a CPU has no utilization.gpu."""
    name = next((r.case["counter"] for r in run if "counter" in r.case), "a counter of busy time")
    return f"(read here: {name}{'' if name.startswith('NVML') else ', not the counter of a GPU'})"


class Jobs(NamedTuple):
    """What a counter of busy time says of each job, and how fast it is; names of jobs."""

    slow: list[str]
    """Surely look as busy as the large products, and surely are slow."""
    idle: list[str]
    """Surely look idle."""
    untold: list[str]
    """May be slow, and not be seen to be."""
    said: str
    """All of them in words."""


def jobs(run: Records) -> Jobs:
    """Every job of this run."""
    full = percent(run.one("busy_share", job="large products")).value
    slow, idle, untold, said = [], [], [], []
    for r in run.where("busy_share"):
        job, busy, speed = r.case["job"], percent(r), percent(run.one("share_of_peak", job=r.case["job"]))
        if busy.high < BUSY * full:
            idle.append(job)
        elif speed.low < 100 * SLOW:
            (slow if speed.high < 100 * SLOW and busy.low >= BUSY * full else untold).append(job)
        said.append(f"{job}: busy {busy.value:.0f} %, speed {speed.value:.3g} %")
    return Jobs(slow, idle, untold, "; ".join(said))


# -- labs.timing


def repaired(evidence: Records, rung: str, before: str = "") -> dict[str, Estimate]:
    """{model and steps: the benchmark's answer after this repair over the one `before`; by default that without it}."""
    before = before or RUNGS[RUNGS.index(rung) - 1]
    found = runs(evidence, "timing", "answer_s", rung=rung)
    names = [
        f"{model_of(r)}, {r[0].config['loop_steps']} steps" if "loop_steps" in r[0].config else model_of(r)
        for r in found
    ]
    both = (ratio(r.one("answer_s", rung=rung), r.one("answer_s", rung=before)) for r in found)
    return dict(zip(names, both, strict=True))


def on_gpu(evidence: Records) -> bool:
    """Whether the benchmark's answers are those of a GPU; on a CPU its queue of work is emulated."""
    return kind(evidence) != "modelled"


def kind(evidence: Records) -> str:
    """Of which kind the benchmark's answers are: "modelled" where the queue of work is emulated."""
    return last(evidence, "timing", "answer_s").where("answer_s")[0].kind


def seen(evidence: Records, way: str, steps: int | None = None) -> Estimate:
    """The share of the work, in %, that a clock without a wait at the end sees of a loop; of one with `steps` steps.

    What is missing is what is in the queue at the end: its number of steps does not grow with that of the loop.
    """
    run = last(evidence, "timing", "seen_share", way=way).one("seen_share", way=way)
    scale = run.case["steps"] / (steps or run.case["steps"])
    return estimate([100 * (1 - (1 - share) * scale) for share in run.samples], "%")


def seen_early(evidence: Records) -> dict[str, tuple[Estimate, Estimate, str]]:
    """{model and batch: `seen` with the data on the device, and with a copy in each of the article's steps, and how
    that was got if the loop was another}."""
    found = {}
    for run in runs(evidence, "timing", "seen_share"):
        case = run.where("seen_share")[0].case
        name = model_of(run) + (f", batches of {case['batch']}" if "batch" in case else "")
        how = "" if case["steps"] == ARTICLES_STEPS else f" (calculated from loops of {case['steps']})"
        found[name] = seen(run, "data on the device"), seen(run, *AS_THE_ARTICLE), how
    return found


def between_ranks(evidence: Records) -> dict[str, Estimate]:
    """{model: by how many % the slowest rank's own step times exceed the fastest's}. LookupError with one rank."""
    found = {}
    for run in runs(evidence, "timing", "rank_step_s"):
        # by the steps side by side: of two medians the larger can belong to the rank that is faster in most steps
        first, *_ = ranks = list(run.where("rank_step_s"))
        ranks.sort(key=lambda r: statistics.median(a / b for a, b in zip(r.samples, first.samples, strict=True)))
        if len(ranks) > 1:
            pairs = zip(ranks[-1].samples, ranks[0].samples, strict=True)  # all ranks take equally many steps
            found[model_of(run)] = estimate([100 * (a / b - 1) for a, b in pairs], "%")
    if not found:
        raise LookupError("launch('timing') on at least 2 ranks has not been run")
    return found


# -- labs.batch_size


def steps_alone(evidence: Records) -> dict[int, Record]:
    """{batch: step times of one rank alone}."""
    run = last(evidence, "batch_size", "step_s", mode="single")
    return {r.case["batch"]: r for r in sorted(run.where("step_s", mode="single"), key=lambda r: r.case["batch"])}


def faster(step: dict[int, Record], a: int, b: int) -> Estimate:
    """Samples per second with batch `a` over those with batch `b`. LookupError if one was not run, or a is b."""
    if a not in step or b not in step:
        raise LookupError(f"batches {a} and {b} are needed; launch('batch_size') ran {list(step)}")
    if a == b:
        raise LookupError(f"launch('batch_size') ran no batch but {a}")
    return ratio(step[b], step[a]).scaled(a / b)


def efficiency(run: Records, batch: int) -> list[float]:
    """Weak-scaling efficiency of each round: one rank's step time over that of DDP with as much per rank."""
    alone, ddp = (run.one("step_s", mode=m, batch=batch) for m in ("single", "ddp"))
    if len(alone.samples) != len(ddp.samples):
        raise LookupError(f"single and ddp have {len(alone.samples)} and {len(ddp.samples)} samples: no pairs")
    return [a / d for a, d in zip(alone.samples, ddp.samples, strict=True)]


# -- what a method needs


def _repeats(evidence: Records) -> bool:
    """Whether two single runs of the article's loop can be more than 5 % apart."""
    found = [r.one("answer_s", rung=RUNGS[0]).samples for r in runs(evidence, "timing", "answer_s", rung=RUNGS[0])]
    found = [samples for samples in found if len(samples) > 1]
    if not found:
        raise LookupError("launch('timing') with at least two repeats is needed")
    return any(max(s) > 1.05 * min(s) for s in found)


def _spread(evidence: Records) -> bool:
    """Whether more than one in twenty single comparisons of the same code with itself is more than 5 % off."""
    run = last(evidence, "measure_validation", "step_s", part="planted", arm="A again")
    a, again = (run.one("step_s", part="planted", arm=arm).samples for arm in ("A", "A again"))
    off = [abs(x / y - 1) > 0.05 for x, y in zip(again, a, strict=False)]
    return statistics.fmean(off) > 0.05


def ranks_apart(found: dict[str, Estimate]) -> bool:
    """Whether ranks print times that are more than APART apart, for what `between_ranks` found."""
    return any(more.low > APART for more in found.values())


def _in_turn(evidence: Records) -> bool:
    """Whether the same code differs from itself one after the other, and does not when it takes turns."""
    run = last(evidence, "measure_validation", "step_s", part="neighbour")
    apart = {}
    for order in ("one after the other", "in turn"):
        b, a = (run.one("step_s", part="neighbour", order=order, side=side) for side in "BA")
        apart[order] = differs(ratio(b, a))
    return apart["one after the other"] and not apart["in turn"]


def _baseline(evidence: Records) -> bool:
    """Whether a step on one rank without DDP takes another time than a DDP step, at the smallest batch."""
    run = last(evidence, "batch_size", "step_s", mode="ddp")
    first = min(r.case["batch"] for r in run.where("step_s", mode="ddp"))
    return differs(ratio(*(run.one("step_s", mode=m, batch=first) for m in ("ddp", "single"))))


SYNCHRONISATION = "synchronisation (in its own loop, which copies each batch: see C06)"
PARTS: dict[str, Callable[[Records], bool]] = {
    "a baseline on one rank": _baseline,
    "a warm-up": lambda evidence: any_differs(repaired(evidence, "warm up")),
    SYNCHRONISATION: lambda evidence: seen(evidence, *AS_THE_ARTICLE).high < 95,
    "repeats": _repeats,
    "a spread": _spread,
    "the slowest rank": lambda evidence: ranks_apart(between_ranks(evidence)),
    "taking turns": _in_turn,
}
"""What the article's method lacks: each says whether it changed an answer. LookupError if it was not tried."""


def tried(evidence: Records) -> dict[str, bool | None]:
    """{part: whether it changed an answer, or None if it was not tried}. LookupError if none was."""
    found: dict[str, bool | None] = dict.fromkeys(PARTS)
    for name, changes in PARTS.items():
        with contextlib.suppress(LookupError):
            found[name] = changes(evidence)
    if set(found.values()) == {None}:
        raise LookupError("nothing that the article's method lacks has been tried")
    return found
