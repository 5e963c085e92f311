"""Turn profiles into findings: wrong results first, then what is slow, by gain; also what is fine and what isn't known.

Sentences state only what was measured: a gain has the interval of its rounds, and a bottleneck that this run can't show
is not reported. The gain of two fixes together isn't the product of their gains.
"""

from __future__ import annotations

import ast
import linecache
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from labs.doctor import estimated_gain as gains
from labs.doctor.bottlenecks import (
    BY_NAME,
    KINDS,
    OPTION,
    PARTS,
    RISK,
    SLOW,
    UNPRICED,
    WRONG,
    Bottleneck,
    Match,
    option,
)
from labs.doctor.estimated_gain import part_s, standing
from labs.doctor.probes import merge
from labs.doctor.probes.scene import name_in, parsed
from labs.doctor.profile import KINDS as SPANS
from labs.doctor.profile import Profile, rare_kinds, share_of_steps
from labs.kit.measure import Estimate

INTERLEAVED, FROM_PARTS, BY_READING = "steps measured in turn", "from the step's parts", "read in the source"
SEEN, BY_PROBE = "seen in the running script", "measured while it ran"
SLOW_FROM = 1.15  # A fix with a smaller gain is optional
ROWS_FROM, ROWS_FROM_ON_GPU, FASTER_BY_BATCH = 1.25, 1.5, 2.0  # Gains from which it's a fault; least speedup by batches
PARTS_SURE = 1.20  # A gain by arithmetic of this size replaces an interleaved one that shows none
SMALL_BUCKET, MANY_BUCKETS = 2**20, 8  # Bytes, as DDP's first bucket; more buckets below that are too many
OWN, OWN_CODE = ("prepare", "rest"), 1.15  # Only larger gains are reported: zero_grad is also own code
IDLE_FROM = 0.3  # Idle share of a GPU's step from which Python is too slow for it
LONG_TRAINING = 1e6  # Steps: slower growth of memory isn't reported
ONE_IN_TWO, OF_TENSORS = 0.5, 0.2  # Least new tensors per step, or their share in memory's growth
GOES_ON = 3  # Compiling doesn't end if this many steps compile, spread over half of those measured
NOT_DETECTED = "whether data, labels, loss and model are the right ones, and what comes later than these steps"


@dataclass(frozen=True)
class Finding:
    """One thing that can be fixed."""

    name: str
    what: str  # One sentence with its numbers, without a full stop
    gain: Estimate | None
    """Estimated speedup per sample; None if it wasn't measured, or the finding is about results."""
    where: str  # "file:line  code"; "" if no line is known
    fix: str  # What to type
    notebook: str
    by: str  # How it is known
    kind: str = SLOW  # One of bottlenecks.KINDS
    also: tuple[str, ...] = ()  # Further lines

    @property
    def line(self) -> str:
        """ "file:line"."""
        return self.where.split("  ")[0]


def find(profiles: Sequence[Profile], matches: Sequence[Match] = ()) -> list[Finding]:
    """Return the findings of all ranks, including `matches` from the source, most severe first."""
    ranks = with_steps(profiles)
    probed = merge([p.probes for p in profiles])
    same_order = any("set_epoch" in m.fix for m in probed)  # a probe saw it happen
    unused = ranks and not any(row["probe"] == "_sampled" for p in ranks for row in p.probes)  # no DistributedSampler
    read = [m for m in matches if not ((same_order or unused) and m.probe == "set-epoch-missing")]
    seen = [(m, BY_PROBE) for m in probed] + [(m, BY_READING) for m in read]
    found = [
        Finding(m.probe, m.what, None, m.where, m.fix, m.notebook, by, WRONG if m.wrong else RISK, tuple(m.also))
        for m, by in seen
    ]
    found += _slow(ranks) if ranks else []
    return sorted(found, key=lambda f: (KINDS.index(f.kind), -f.gain.low if f.gain else 0.0))


def with_steps(profiles: Sequence[Profile]) -> list[Profile]:
    """Return the profiles of the ranks whose steps were measured, by rank."""
    return sorted((f for f in profiles if f.step_s), key=lambda f: f.rank)


# What is slow


@dataclass(frozen=True)
class Price:
    """What fixing a bottleneck would gain, how that is known, and the rank that shows it."""

    bottleneck: Bottleneck
    gain: Estimate | None
    by: str
    profile: Profile
    words: dict[str, Any] = field(default_factory=dict)  # Added to those of `_words`; may include `where`

    @property
    def standing(self) -> str:
        """The gain's standing: see estimated_gain.standing."""
        return standing(self.gain, gains.WORTH_BY_PARTS if self.by == FROM_PARTS else gains.WORTH)


def prices(ranks: Sequence[Profile]) -> Iterator[Price]:
    """Yield the price of each bottleneck that this run tried to remove, or whose part of a step it saw."""
    if late := _lateness(ranks):
        yield late
    for bottleneck in BY_NAME.values():
        if bottleneck.name == "exchange" and (ranks[0].ranks == 1 or gains.split(ranks)):
            continue  # one rank, or ranks that wait for each other by design
        parted, most = gains.from_parts(ranks, bottleneck.part) if bottleneck.part else (None, ranks[0])
        rest_s = 0.0
        if bottleneck.name == "slow_loader" and (rest_s := _by_batch_s(most)):
            bottleneck = replace(BY_NAME["rows_one_by_one"], mode=bottleneck.mode, part=bottleneck.part)
            parted = gains.without(gains.steps_s(ranks), [s - rest_s for s in gains.lost_s(most, "data")])
        gain = gains.interleaved(ranks, bottleneck.mode, rest_s)
        by_turns = gains.enough(gain) and bottleneck.part not in rare_kinds(most)
        if by_turns and standing(gain) != "gain" and parted is not None:
            by_turns = standing(parted, PARTS_SURE) != "gain"  # as with a script's own collectives, or much noise
        if not by_turns and parted is not None and part_s(most, bottleneck.part):
            yield Price(bottleneck, parted, FROM_PARTS, most)
        elif gain is not None:
            yield Price(bottleneck, gain, INTERLEAVED, most)


def _by_batch_s(profile: Profile) -> float:
    """Return the seconds to fetch a batch with one index, if rows are in memory and that is faster; otherwise 0."""
    by_batch_ms = profile.loader.by_batch_ms if profile.loader else None
    slower = by_batch_ms is not None and by_batch_ms * FASTER_BY_BATCH < 1e3 * part_s(profile, "data")
    return by_batch_ms / 1e3 if slower else 0.0


def _slow(ranks: Sequence[Profile]) -> Iterator[Finding]:
    priced = list(prices(ranks))
    for price in priced:
        if price.standing == "gain":
            small_model = price.gain.value < (ROWS_FROM if price.profile.device == "cpu" else ROWS_FROM_ON_GPU)
            needed = price.by == INTERLEAVED and not needless_exchange(price.profile)  # to train one model
            healthy_has = {"rows_one_by_one": small_model, "exchange": needed}.get(price.bottleneck.name, False)
            yield _finding(price, ranks, OPTION if healthy_has else SLOW)
    known = {price.bottleneck.name for price in priced if price.standing != "unclear"}
    yield from _switched_on(ranks, known)
    yield from _restarts(ranks)
    yield from _own_code(ranks)
    yield from _growing(ranks)
    yield from _recompiles(ranks)
    yield from _copies(ranks)


def _finding(price: Price, ranks: Sequence[Profile], kind: str = SLOW) -> Finding:
    """Return a finding with the bottleneck's texts, filled in."""
    row, gain = price.bottleneck, price.gain
    words = _words(row, ranks, price.profile) | price.words
    where = words.pop("where", "") or _where(price.profile, row)
    fix = row.fix.format(**words) + option(ranks[0].training.get("trainer", ""), row.name)
    kind = OPTION if kind == SLOW and gain and gain.value < SLOW_FROM else kind
    return Finding(row.name, row.what.format(**words), gain, where, fix, row.notebook, price.by, kind)


def _words(bottleneck: Bottleneck, ranks: Sequence[Profile], of: Profile) -> dict[str, Any]:
    """Return the values that a bottleneck's texts may use."""
    cores, loader, part = of.machine.get("cores", 0), of.loader, bottleneck.part
    pairs = gains.pairs_s(ranks, "no exchange")
    exposed = statistics.median([a - b for a, b in pairs]) if pairs else 0.0
    return {
        "part": ms(statistics.fmean(gains.lost_s(of, part) or [0.0])),
        "calls": f"{sum(n.calls for n in of.lines if n.kind == part):.3g}",
        "idle": round(100 * idle_share(of)),
        "often": f"{round(share_of_steps(of, part) * len(of.step_s))} of {len(of.step_s)} steps",
        "mean": ms(statistics.fmean(gains.steps_s(ranks))),
        "loader": f"batches of {loader.batch_size or 'its sampler'}, {loader.workers} workers" if loader else "",
        "dataset": loader.dataset if loader else "",
        "batch": (loader and loader.batch_size) or "its size",
        "by_batch": ms(_by_batch_s(of)),
        "exposed": ms(max(exposed, part_s(of, "exchange"))),
        "buffers": of.training.get("buffers", 0),
        "threads": of.machine.get("threads", 0),
        "cores": cores,
        "fair_threads": max(1, cores // max(1, of.local_ranks)),
        "local_ranks": of.local_ranks,
        "rank": of.rank,
        "steps": len(of.step_s),
    }


def idle_share(profile: Profile) -> float:
    """Return the share of a GPU's step that is in none of its parts; 0 on other devices."""
    busy = sum(s for [s] in profile.device_s.values())
    return max(0.0, 1 - busy / statistics.fmean(profile.step_s)) if busy else 0.0


def needless_exchange(profile: Profile) -> bool:
    """Return whether DDP exchanges more often or in smaller buckets than needed. Exposed exchange alone is no fault."""
    of = profile.training
    bucket = of.get("bucket_bytes") or math.inf
    small = bucket < SMALL_BUCKET and 4 * of.get("parameters", 0) / bucket > MANY_BUCKETS
    return of.get("exchanges", 1) > 1 or small


# Lines in the source


def _where(profile: Profile, bottleneck: Bottleneck) -> str:
    if bottleneck.name == "rows_one_by_one" and profile.loader and profile.loader.item:
        return profile.loader.item
    return _noted(profile, bottleneck.part) or _called(profile.script, bottleneck.calls)


def _noted(profile: Profile, *kinds: str) -> str:
    """Return the costliest line of these kinds, as "file:line  code"; "" if there is none."""
    found = (n for n in profile.lines if n.kind in kinds and n.line)
    return next((f"{os.path.basename(n.file)}:{n.line}  {n.code}" for n in found), "")


def _called(script: str, names: Sequence[str]) -> str:
    """Return the first line of the script that calls one of these names, as "file:line  code"; "" if none does."""
    calls = (n for n in ast.walk(parsed(script)) if isinstance(n, ast.Call))
    lines = [n.lineno for n in calls if name_in(n.func) in names]
    if not lines:
        return ""
    return f"{os.path.basename(script)}:{min(lines)}  {linecache.getline(script, min(lines)).strip()}"


# What no counterfactual removes


def _switched_on(ranks: Sequence[Profile], known: set[str]) -> Iterator[Finding]:
    """Yield findings about what the run uses and no measurement has priced."""
    f = ranks[0]
    starved = f.device_s and idle_share(f) > IDLE_FROM and not known & {"slow_loader", "rows_one_by_one"}
    threads = f.machine.get("threads", 1)
    kinds = {
        "anomaly": f.training.get("anomaly") and SLOW,
        "float64": "float64" in f.training.get("dtypes", ()) and SLOW,
        "threads": threads > 1 and threads * f.local_ranks > f.machine.get("cores", threads) and SLOW,
        "find_unused": f.training.get("find_unused_parameters") and UNPRICED,  # it may be needed
        "exchange": len(ranks) > 1 and needless_exchange(f) and not gains.split(ranks) and UNPRICED,
        "python_overhead": starved and OPTION,
    }
    for name, kind in kinds.items():
        if kind and name not in known:
            yield _finding(Price(BY_NAME[name], None, SEEN, f), ranks, kind)


def _restarts(ranks: Sequence[Profile]) -> Iterator[Finding]:
    """Yield a finding if the steps that start an epoch's workers are much longer than the others."""
    of = max(ranks, key=lambda f: len(f.restarts))
    longer = gains.longer_s(of.step_s, of.restarts)
    price = Price(BY_NAME["workers_restart"], gains.without(of.step_s, longer), FROM_PARTS, of)
    if of.restarts and of.loader and price.standing == "gain":
        n = len(of.restarts)
        words = {"workers": of.loader.workers, "restarts": n, "each": ms(sum(longer) / n)}
        yield _finding(replace(price, words=words), ranks)


def _lateness(ranks: Sequence[Profile]) -> Price | None:
    """Return the price of the slowest of several ranks: the gain if it were as fast as the second slowest.

    Compares steps without exchange, or the parts of a step in which no rank waits, whichever is less noisy. None if
    ranks wait by design, or neither is known.
    """
    if len(ranks) < 2 or gains.split(ranks):
        return None
    turns = [(max(job), own) for job, own in gains.turns_s(ranks, "no exchange")]
    found = [_late(ranks, *pair) for pair in ((turns, INTERLEAVED), (_outside_of_waits(ranks), FROM_PARTS)) if pair[0]]
    return min(found, key=lambda late: late.gain.high / late.gain.low, default=None)


def _outside_of_waits(ranks: Sequence[Profile]) -> list[tuple[float, list[float]]]:
    """Return for each step the job's seconds, and each rank's outside backward and exchange. Empty on a GPU."""
    if ranks[0].device != "cpu":
        return []
    alone = [k for k in SPANS if k not in ("backward", "exchange", "synchronise")]
    steps = min(len(f.step_s) for f in ranks)
    own = [[sum(f.spans_s[k][i] for k in alone if f.spans_s.get(k)) for f in ranks] for i in range(steps)]
    return [(max(f.step_s[i] for f in ranks), own[i]) for i in range(steps)]


def _late(ranks: Sequence[Profile], taken: list[tuple[float, list[float]]], by: str) -> Price:
    slow = max(range(len(ranks)), key=lambda r: statistics.median([own[r] for _, own in taken]))
    both = [(job, own[slow], max(s for r, s in enumerate(own) if r != slow)) for job, own in taken]
    ratios = [a / b for _, a, b in both if b > 0] or [1.0]
    less = [job / (job - min(max(0.0, a - b), 0.99 * job)) for job, a, b in both]
    ratio, gain = (gains.of_ratios(of, gains.looks(ranks)) for of in (ratios, less))
    of, others = ranks[slow], [f for f in ranks if f is not ranks[slow]]
    kind = max(of.spans_s, key=lambda k: part_s(of, k) - max(part_s(f, k) for f in others))
    longer = "what its device computes" if kind == "device" else PARTS[kind]
    own = ms(statistics.median([a for _, a, _ in both]))
    words = {"own": own, "ratio": ratio, "longer": longer, "where": _noted(of, kind)}
    return Price(BY_NAME["straggler"], gain, by, of, words)


def _own_code(ranks: Sequence[Profile]) -> Iterator[Finding]:
    """Yield a finding if the script's own lines, before and after the first forward, take a large part of a step.

    Uses the rank with the least of them: what another rank has on top makes it a straggler.
    """
    of = min(ranks, key=own_lines_s)
    own_s = own_lines_s(of)
    gain = gains.without(of.step_s, [own_s] * len(of.step_s))
    if standing(gain) != "gain" or gain.low < OWN_CODE or not of.training.get("forward_seen", True):
        return  # if no forward was seen, most of these lines may be the model
    noted = next((n for n in of.lines if n.kind in OWN and n.line), None)
    line = f", about {ms(noted.ms / 1e3)} of it this one" if noted else ""
    words = {"own": ms(own_s), "line": line, "where": _noted(of, *OWN)}
    priced = of.device == "cpu"  # a GPU may work meanwhile, so that it costs nothing
    price = Price(BY_NAME["own_code"], gain if priced else None, FROM_PARTS, of, words)
    yield _finding(price, ranks, SLOW if priced else UNPRICED)


def own_lines_s(profile: Profile) -> float:
    """Return the seconds per step in own lines, by stack sampling, without the loss and models the hooks don't see."""
    return sum(n.ms for n in profile.lines if n.kind in OWN) / 1e3


def _growing(ranks: Sequence[Profile]) -> Iterator[Finding]:
    """Yield a finding for the first rank whose memory surely grows, and would be full within LONG_TRAINING steps."""
    for f in ranks:
        grows, free = memory_growth(f), f.memory.get("free", 0)
        if gains.enough(grows) and grows.low > 0 and free / grows.low <= LONG_TRAINING:
            tensors, bytes_ = f.memory.get("tensors_growth", 1.0), f.memory.get("tensor_bytes_growth", 0.0)
            if tensors >= ONE_IN_TWO or bytes_ >= OF_TENSORS * grows.low:  # else the C library may hold freed memory
                words = {"grows": grows, "last": free / grows.value}
                yield _finding(Price(BY_NAME["growing"], None, SEEN, f, words), ranks, RISK)
                return


def memory_growth(profile: Profile) -> Estimate | None:
    """Return the memory's growth in bytes per step, with an interval; None if too few values were taken."""
    steps, series = zip(*profile.memory.get("series") or [[0, 0]], strict=True)
    return gains.growth(series, "B", steps)


def _recompiles(ranks: Sequence[Profile]) -> Iterator[Finding]:
    """Yield a finding if steps compiled: slow if that doesn't end and takes time, otherwise not priced."""
    f = next((f for f in ranks if any(f.compiles)), None)
    if f is None:
        return
    at = [i for i, graphs in enumerate(f.compiles) if graphs]
    longer = gains.longer_s(f.step_s, at)
    gain = gains.without(f.step_s, longer)
    slow = len(at) >= GOES_ON and at[-1] - at[0] >= len(f.step_s) / 2 and standing(gain) == "gain"
    words = {"graphs": sum(f.compiles), "at": len(at), "took": ms(sum(longer))}
    price = Price(BY_NAME["recompiles"], gain if slow else None, FROM_PARTS, f, words)
    yield _finding(price, ranks, SLOW if slow else UNPRICED)


def _copies(ranks: Sequence[Profile]) -> Iterator[Finding]:
    """Yield a finding for long copies to a GPU, by its clock. Not priced: kernels may have run at the same time."""
    of = max(ranks, key=lambda f: f.device_s.get("copy", [0.0]))
    [took] = of.device_s.get("copy", [0.0])
    gain = gains.without(of.step_s, [took] * len(of.step_s))
    if _noted(of, "copy") and standing(gain, gains.WORTH_BY_PARTS) == "gain":
        yield _finding(Price(BY_NAME["copies"], None, FROM_PARTS, of, {"part": ms(took)}), ranks, UNPRICED)


# What is fine, and what isn't known


def healthy(profiles: Sequence[Profile]) -> list[str]:
    """Return lines about what was tried or measured and is fine, with its numbers."""
    if not (ranks := with_steps(profiles)):
        return []
    fine = [p for p in prices(ranks) if p.standing == "fine"]
    return [f"{p.bottleneck.mode or p.bottleneck.name}: no gain that this run can show ({p.gain})" for p in fine]


def unknown(profiles: Sequence[Profile]) -> list[str]:
    """Return lines about what this run can't show, and what wasn't tried and why."""
    texts = list(dict.fromkeys(text for f in profiles for text in f.unseen))
    if not (ranks := with_steps(profiles)):
        return texts
    noisy = [f"{p.bottleneck.mode or p.bottleneck.name} {p.gain}" for p in prices(ranks) if p.standing == "unclear"]
    if noisy:
        texts.append(f"too few or too unsteady steps to say what these give (try --seconds S): {', '.join(noisy)}")
    if gains.split(ranks):
        texts.append("whether a rank is late: ranks hold different parts of the model, or weights of their own")
    if models := sum(n.ms for n in ranks[0].lines if n.kind == "model"):
        took, part = ms(models / 1e3), PARTS["prepare"]
        texts.append(f"what frozen models cost, and those whose forward() is called by name: {took} of '{part}'")
    if why := ranks[0].not_tried:
        texts.append("not tried: " + "; ".join(f"{mode} ({reason})" for mode, reason in why.items()))
    return [*texts, NOT_DETECTED]


# Words


def ms(seconds: float) -> str:
    """Format seconds in the unit that fits: 0.0123 -> "12.3 ms"."""
    return str(Estimate(seconds, seconds, seconds, 1, "s")).split(" [")[0]
