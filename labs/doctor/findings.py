"""Findings: wrong results first, then what is slow, by estimated gain; what is fine, and what isn't known.

A sentence says what was measured and no more: a gain has the interval of its rounds, and a bottleneck that this run
can't show is no finding. What two fixes give together isn't the product of their gains.
"""

from __future__ import annotations

import ast
import linecache
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labs.doctor import bottlenecks, trainers
from labs.doctor import estimated_gain as gains
from labs.doctor.bottlenecks import BOTTLENECKS, OPTION, RISK, SECTIONS, SLOW, UNPRICED, WRONG, Bottleneck
from labs.doctor.estimated_gain import NO_EXCHANGE, part_s, standing
from labs.doctor.probes import merge
from labs.doctor.profile import Line, Profile, not_reached, rare_kinds, share_of_steps
from labs.kit.measure import Estimate, estimate

if TYPE_CHECKING:
    from labs.doctor.static_rules import Match

INTERLEAVED, FROM_PARTS, BY_READING = "steps measured in turn", "from the step's parts", "read in the source"
SEEN, BY_PROBE = "seen in the running script", "measured while it ran"
MOSTLY_FIXED, CERTAINLY_FIXED = 0.75, 0.5
"""Batches are tiny if this share of a step doesn't depend on their size, by its value and by its lower end."""
SLOW_FROM = 1.15  # A fix that gives less is an option, for a healthy script as well
ROWS_FROM, ROWS_FROM_ON_GPU, FASTER_BY_BATCH = 1.25, 1.5, 2.0
"""Rows of small tensors cost the host a little: only such gains are a fault. By the batch is so many times as fast."""
SMALL_BUCKET, MANY_BUCKETS = 2**20, 8
"""Bytes: DDP's first bucket, and the others are 25 times as large; so many buckets of less are too many."""
OWN, OWN_CODE = ("prepare", "rest"), 1.15
"""The loss and zero_grad are the script's own code as well: only more than this is reported."""
IDLE_FROM = 0.3  # Of a GPU's step: then Python is too slow for it
COST_SAID = 0.03
LONG_TRAINING = 1e6  # Steps: memory that lasts longer than that may grow
ONE_IN_TWO = 0.5  # Tensors more in each step: a loss that is kept is one
WIDE = 1.3  # The upper end of an interval, in lower ends
GOES_ON = 3  # Steps that compile, spread over half of those that were measured: fewer of them end


@dataclass(frozen=True)
class Finding:
    """One thing that can be fixed."""

    name: str
    what: str  # One sentence with its numbers, without a full stop
    gain: Estimate | None
    """How many times as fast, per sample, by estimate; None if it wasn't measured, or is about results."""
    where: str  # "file:line  code"; "" if no line stands for it
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
    """Of all ranks, the most severe first."""
    ranks = with_steps(profiles)
    found = [*_probed(profiles), *map(_read, matches)]
    found += [_with_trainer(_or_option(f), ranks[0]) for f in _slow(ranks)] if ranks else []
    return sorted(found, key=_severity)


def _severity(finding: Finding) -> tuple[int, float, float]:
    low, value = (finding.gain.low, finding.gain.value) if finding.gain else (0.0, 0.0)
    return bottlenecks.KINDS.index(finding.kind), -low, -value


def _or_option(finding: Finding) -> Finding:
    little = finding.kind == SLOW and finding.gain is not None and finding.gain.value < SLOW_FROM
    return replace(finding, kind=OPTION) if little else finding


def _with_trainer(finding: Finding, profile: Profile) -> Finding:
    of = profile.training
    return replace(
        finding, fix=finding.fix + trainers.option(of.get("trainer", ""), finding.name, of.get("half", "bfloat16"))
    )


def _probed(profiles: Sequence[Profile]) -> Iterator[Finding]:
    """What the probes of wrong results have seen, merged over ranks."""
    for f in merge([p.probes for p in profiles]):
        kind = WRONG if f.wrong else RISK
        yield Finding(f.probe, f.title, None, f.where, f.fix, "", BY_PROBE, kind, tuple(f.also))


def _read(match: Match) -> Finding:
    file = os.path.basename(match.file)
    where = f"{file}:{match.line}  {match.code}" if match.line else file
    kind = WRONG if match.certainty == "wrong" else RISK
    return Finding(match.rule, match.why, None, where, match.fix, match.notebook, BY_READING, kind)


def with_steps(profiles: Sequence[Profile]) -> list[Profile]:
    """Of the ranks whose steps were measured, by rank."""
    return sorted((f for f in profiles if f.step_s), key=lambda f: f.rank)


# What is slow


def _slow(ranks: Sequence[Profile]) -> Iterator[Finding]:
    named = set()
    for bottleneck, gain, by, of in _priced(ranks):
        if _standing(gain, by) == "gain" and bottleneck.name not in named:
            named.add(bottleneck.name)
            rows = _rows_one_by_one(ranks, of) if bottleneck.name == "slow_loader" else None
            yield rows or _finding(bottleneck, gain, by, ranks, of)
    yield from _workers_restart(ranks)
    yield from _straggler(ranks)
    yield from _own_code(ranks)
    yield from _growing(ranks)
    yield from _recompiles(ranks)
    yield from _copies(ranks)
    yield from _switched_on(ranks, named)


def _priced(ranks: Sequence[Profile]) -> Iterator[tuple[Bottleneck, Estimate, str, Profile]]:
    """Each that has a price: gain, how it is known, of which rank."""
    for bottleneck in BOTTLENECKS:
        if bottleneck.name == "exchange" and (ranks[0].ranks == 1 or gains.split(ranks)):
            continue  # they wait for each other by design: see _split
        parted, most = gains.from_parts(ranks, *bottleneck.parts) if bottleneck.parts else (None, ranks[0])
        gain = gains.interleaved(ranks, bottleneck.mode)
        noisy = parted is not None and gains.enough(gain) and standing(gain) == "unclear"
        exposed = bottleneck.name == "exchange" and parted is not None and _standing(parted, FROM_PARTS) == "gain"
        if bottleneck.name == "slow_loader" and gain is not None and _hardly_waits(most):
            yield bottleneck, Estimate(1.0, 1.0, 1.0, gain.n, "x"), FROM_PARTS, most
        elif exposed or (noisy and standing(parted, gains.WORTH_INSTEAD) == "gain"):
            yield bottleneck, parted, FROM_PARTS, most
        elif gains.enough(gain) and not any(k in rare_kinds(most) for k in bottleneck.parts):
            yield bottleneck, *_within(bottleneck, gain, ranks)
        elif parted is not None and part_s(most, *bottleneck.parts):
            yield bottleneck, parted, FROM_PARTS, most
        elif gain is not None:
            yield bottleneck, gain, INTERLEAVED, most


def _hardly_waits(profile: Profile) -> bool:
    """Whether the host is hardly in the loader at all: no loader gives more, whatever some noise shows.

    Workers may cost a step more than its wait, since they use the same cores.
    """
    alone = profile.loader is not None and not profile.loader.workers
    return alone and part_s(profile, "data") < (1 - 1 / gains.WORTH) * statistics.fmean(profile.step_s)


def _within(bottleneck: Bottleneck, gain: Estimate, ranks: Sequence[Profile]) -> tuple[Estimate, str, Profile]:
    """A fix of the optimizer gives no more than a step without one, whatever a noisy machine shows.

    A GPU's parts are longer than the host's clock says: of those nothing is known from here.
    """
    most, of = gains.from_parts(ranks, *bottleneck.within) if bottleneck.within else (None, ranks[0])
    if of.device != "cpu" or not gains.enough(most):
        return gain, INTERLEAVED, of
    too_much = standing(gain) == "gain" and most.high < gain.value
    little = standing(gain) == "unclear" and standing(most, gains.WORTH_BY_PARTS) == "fine"
    return (most, FROM_PARTS, of) if too_much or little else (gain, INTERLEAVED, of)


def _standing(gain: Estimate, by: str) -> str:
    return standing(gain, gains.WORTH_BY_PARTS if by == FROM_PARTS else gains.WORTH)


def _finding(bottleneck: Bottleneck, gain: Estimate, by: str, ranks: Sequence[Profile], of: Profile) -> Finding:
    name, kind, what = _named(bottleneck, gain, of)
    if name == "exchange" and by == INTERLEAVED and not _needless_exchange(of):
        kind = OPTION  # the price of ranks that train one model, be it high: larger batches or a hook lower it
    words = numbers(bottleneck, ranks, of)
    if bottleneck.name == "exchange" and by == FROM_PARTS:
        what += ", waiting for late ranks among it"
    what = what.format(**words) + (f" (rank {of.rank})" if len(ranks) > 1 and by == FROM_PARTS else "")
    fix = bottleneck.fix.format(**words)
    return Finding(name, what, gain, _where(bottleneck, of, words), fix, bottleneck.notebook, by, kind)


def _named(bottleneck: Bottleneck, gain: Estimate, profile: Profile) -> tuple[str, str, str]:
    """Name, kind and sentence: some of what can be gained is no fault."""
    fixed = _mostly_fixed(gain, profile.samples_factor.get(bottleneck.mode, 1.0))
    paid_otherwise = oversubscribed(profile) or profile.ranks > 1  # threads and the exchange cost each step as much
    if bottleneck.name == "tiny_batches" and (paid_otherwise or not fixed):
        return "larger_batch", OPTION, bottlenecks.LARGER
    if bottleneck.name == "threads" and not oversubscribed(profile):
        return "threads", OPTION, bottleneck.what + ": fewer are faster"
    loop = any(o.get("foreach") is False and not o.get("fused") for o in profile.training.get("optimizers", ()))
    if bottleneck.name == "optimizer_loop" and not loop:  # torch's default: lists on a GPU, a loop on a CPU
        return "fused_optimizer", OPTION, bottlenecks.NOT_FUSED
    if bottleneck.name == "compile" and idle_share(profile) > IDLE_FROM:
        return "python_overhead", SLOW, bottlenecks.STARVED
    return bottleneck.name, OPTION if bottleneck.option else SLOW, bottleneck.what


def idle_share(profile: Profile) -> float:
    """Of a GPU's step, what is none of its own parts; 0 on other devices."""
    busy = sum(statistics.fmean(s) for s in profile.device_s.values() if s)
    return max(0.0, 1 - busy / statistics.fmean(profile.step_s)) if busy else 0.0


def _needless_exchange(profile: Profile) -> bool:
    """Whether DDP exchanges more often, or in smaller pieces, than it has to. Some of what it must do nothing hides."""
    of = profile.training
    pieces = of.get("bucket_bytes") and profile.memory.get("parameters", 0) / of["bucket_bytes"] > MANY_BUCKETS
    small = of.get("bucket_bytes", SMALL_BUCKET) < SMALL_BUCKET
    return bool(of.get("exchanges", 1) > 1 or (pieces and small) or of.get("sync_batchnorm"))


def _mostly_fixed(gain: Estimate, factor: float) -> bool:
    """t(k B) = fixed + k rest: per sample that is k / (k - share (k - 1)) times as fast, share being fixed / t(B)."""
    if factor <= 1:
        return False
    share, certain = ((factor - factor / x) / (factor - 1) for x in (gain.value, gain.low))
    return share >= MOSTLY_FIXED and certain >= CERTAINLY_FIXED


def oversubscribed(profile: Profile) -> bool:
    """Whether there are more threads of torch's than cores."""
    threads, cores = profile.machine.get("threads"), profile.machine.get("cores")
    return bool(threads and cores and threads * profile.local_ranks > cores and threads > 1)


def numbers(bottleneck: Bottleneck, ranks: Sequence[Profile], of: Profile) -> dict[str, Any]:
    """What the texts of a bottleneck may hold."""
    noted = [n for n in of.lines if n.kind == bottleneck.lines]
    cores = of.machine.get("cores", 0)
    fair = max(1, cores // max(1, of.local_ranks))
    factor = of.samples_factor.get(bottleneck.mode, 1.0)
    batch = of.loader.batch_size if of.loader else None
    pairs = gains.pairs_s(ranks, NO_EXCHANGE)
    exposed = estimate([a - b for a, b in pairs], "s") if pairs else None
    optimizers = of.training.get("optimizers") or [{"kind": "Optimizer"}]
    half = of.training.get("half", "bfloat16")
    on_host = ms(part_s(of, "exchange")) if of.device == "cpu" else "an unknown part"
    return {
        "part": ms(statistics.fmean(gains.lost_s(of, *bottleneck.parts) or [0.0])),
        "half": half,
        "scaler": ", and a torch.amp.GradScaler for the gradients" if half == "float16" else "",
        "calls": f"{sum(n.calls for n in noted):.3g}",
        "idle": round(100 * idle_share(of)),
        "often": _often(of, bottleneck.parts[0]) if bottleneck.parts else "",
        "mean": ms(mean_step_s(ranks)),
        "loader": _loader(of),
        "loader_fix": _loader_fix(of, fair),
        "exchange_fix": _exchange_fix(of),
        "exposed": str(exposed) if exposed and exposed.low > 0 else on_host,  # noise may hide it in turn
        "buffers": count(of.training.get("buffers", 0), "buffer"),
        "threads": count(of.machine.get("threads", 0), "thread"),
        "cores": count(cores, "core"),
        "fair_threads": fair,
        "local_ranks": count(of.local_ranks, "rank"),
        "factor": f"{factor:g}",
        "device": of.device,
        "batch": batch or "its size",
        "larger_batch": round(batch * factor) if batch else f"{factor:g} * batch_size",
        "optimizer": optimizers[0]["kind"],
    }


def _often(profile: Profile, kind: str) -> str:
    steps, share = len(profile.step_s), share_of_steps(profile, kind)
    return "all steps" if share == 1 else f"{round(share * steps)} of {steps} steps"


# Loaders


def _rows_one_by_one(ranks: Sequence[Profile], of: Profile) -> Finding | None:
    """Where the dataset's rows are in memory: one index for a whole batch, and no workers."""
    loader, waits = of.loader, part_s(of, "data")
    if loader is None or loader.by_batch_ms is None or loader.by_batch_ms * FASTER_BY_BATCH > 1e3 * waits:
        return None
    by_batch, by = loader.by_batch_ms / 1e3, INTERLEAVED
    gain = gains.interleaved(ranks, "same batch again", by_batch)
    if not gains.enough(gain) or standing(gain) == "unclear":
        by, gain = FROM_PARTS, gains.without(gains.steps_s(ranks), [s - by_batch for s in gains.lost_s(of, "data")])
    what = (
        f"each step waits {ms(waits)} of its {ms(mean_step_s(ranks))} for rows that are in memory: a batch is "
        f"{loader.batch_size:,} calls of {loader.dataset}.__getitem__ and a collate, one index takes {ms(by_batch)}"
    )
    fault = gain.low > 1 and gain.value >= (ROWS_FROM if of.device == "cpu" else ROWS_FROM_ON_GPU)
    where, fix = loader.item or called(of.script, ["DataLoader"]), bottlenecks.BY_BATCH_FIX
    fix = fix.format(batch=loader.batch_size)
    return Finding(
        "rows_one_by_one", what, gain, where, fix, SECTIONS["rows_one_by_one"], by, SLOW if fault else OPTION
    )


def _workers_restart(ranks: Sequence[Profile]) -> Iterator[Finding]:
    """By how much the steps that begin an epoch, and start its workers, are longer than the others."""
    of = max(ranks, key=lambda f: len(f.restarts))
    longer = gains.longer_s(of.step_s, of.restarts)
    gain = gains.without(of.step_s, longer) if of.restarts else None
    if gain is not None and of.loader and _standing(gain, FROM_PARTS) == "gain":
        what = (
            f"{count(of.loader.workers, 'worker')} start anew in each epoch, {len(of.restarts)} times in "
            f"{len(of.step_s)} steps: {ms(sum(longer) / len(of.restarts))} each time"
        )
        where, fix = called(of.script, ["DataLoader"]), "DataLoader(..., persistent_workers=True)"
        yield Finding("workers_restart", what, gain, where, fix, SECTIONS["workers_restart"], FROM_PARTS)


def _loader(profile: Profile) -> str:
    if profile.loader is None:
        return "no DataLoader"
    workers = count(profile.loader.workers, "worker") if profile.loader.workers else "no worker"
    size = f"batches of {profile.loader.batch_size}" if profile.loader.batch_size else "batches by a sampler"
    return f"{size}, {workers}"


def _loader_fix(profile: Profile, fair: int) -> str:
    """More workers only where the loader alone was faster with them, and never for rows that are in memory."""
    tried = {int(n): statistics.median(s) for n, s in profile.loader_s.items() if s}
    loader = profile.loader
    now = loader.workers if loader else 0
    if loader is not None and loader.by_batch_ms is not None:
        return bottlenecks.BY_BATCH_FIX.format(batch=loader.batch_size)
    if now < fair and not any(n > now for n in tried):
        shares = loader is not None and loader.sampler == "_InfiniteConstantSampler"  # torch's, of an IterableDataset
        apart = ", each with its share of the samples (torch.utils.data.get_worker_info)" if shares else ""
        return f"decode once and keep it, or workers that load ahead (up to num_workers={fair}; not tried here){apart}"
    best = min(tried, key=tried.__getitem__, default=now)
    if best != now and tried[best] * gains.WORTH < tried.get(now, math.inf):
        alone = f"the loader alone then takes {ms(tried[best])} for a batch, now {ms(tried.get(now, math.nan))}"
        if not best:
            return f"num_workers=0: {alone}"
        return (
            f"DataLoader(..., num_workers={best}, persistent_workers=True) if there are cores for them ({alone}), or "
            "decode once and keep it"
        )
    known = " (more workers aren't faster)" if any(n > now for n in tried) else ""
    return f"do less for each sample, or decode once and keep it{known}: python -m labs.dataset_formats"


def _exchange_fix(profile: Profile) -> str:
    if profile.micro_batches > 1 and profile.training.get("exchanges", profile.micro_batches) > 1:
        return "with model.no_sync(): for all micro-batches but the last one"
    buckets = "buckets of 25 MB, " if profile.training.get("bucket_bytes", 0) < SMALL_BUCKET else ""
    return f"exchange less, or less often: larger batches per rank, {buckets}nothing that DDP has done already"


# Where it stands in the source


def _where(bottleneck: Bottleneck, profile: Profile, words: dict[str, Any]) -> str:
    noted = _noted(profile, bottleneck.lines)
    return noted or called(profile.script, [c.format(**words) for c in bottleneck.calls])


def _noted(profile: Profile, *kinds: str) -> str:
    """The costliest line of these kinds."""
    return next((_place(n) for n in profile.lines if n.kind in kinds and n.line), "")


def _place(noted: Line) -> str:
    return f"{os.path.basename(noted.file)}:{noted.line}  {noted.code}"


def called(script: str, names: Sequence[str]) -> str:
    """First line of the script that calls one of these names, as "file:line  code"; "" if none does."""
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    calls = (n for n in ast.walk(tree) if isinstance(n, ast.Call))
    lines = [n.lineno for n in calls if (getattr(n.func, "attr", "") or getattr(n.func, "id", "")) in names]
    if not lines:
        return ""
    return f"{os.path.basename(script)}:{min(lines)}  {linecache.getline(script, min(lines)).strip()}"


# Late ranks, own code, memory, graphs, copies


@dataclass(frozen=True)
class Late:
    """The slowest rank of several."""

    profile: Profile
    own_s: float
    others_s: float  # Of the slowest of the others
    ratio: Estimate
    gain: Estimate  # If it were as fast as that one
    by: str
    kind: str  # The part of its step that exceeds the others' most


def lateness(ranks: Sequence[Profile]) -> Late | None:
    """None where it isn't known. From parts, where rounds are missing or noise makes their interval wide."""
    if gains.split(ranks):
        return None
    measured, parts = (_late(ranks, own) for own in (gains.own_interleaved(ranks), gains.own_from_parts(ranks)))
    if measured is None or parts is None:
        return measured or parts
    noisy = measured.gain.high > WIDE * measured.gain.low and parts.gain.high / parts.gain.low < WIDE
    return parts if noisy else measured


def _late(ranks: Sequence[Profile], own: gains.Own | None) -> Late | None:
    if own is None:
        return None
    slow = max(range(len(ranks)), key=lambda r: statistics.median(own.ranks[r]))
    slow_s = own.ranks[slow]
    others = [max(of) for of in zip(*(o for r, o in enumerate(own.ranks) if r != slow), strict=True)]
    excess = [max(0.0, a - b) for a, b in zip(slow_s, others, strict=True)]
    ratios = [s / (s - min(e, 0.99 * s)) for s, e in zip(own.job, excess, strict=True) if s > 0]
    differs = {
        k: part_s(ranks[slow], k) - max(part_s(f, k) for r, f in enumerate(ranks) if r != slow)
        for k in ranks[slow].spans_s
    }
    return Late(
        ranks[slow],
        statistics.median(slow_s),
        statistics.median(others),
        gains.of_ratios([a / b for a, b in zip(slow_s, others, strict=True) if b > 0] or [1.0], gains.looks(ranks)),
        gains.of_ratios(ratios or [1.0], gains.looks(ranks)),
        INTERLEAVED if own.interleaved else FROM_PARTS,
        max(differs, key=differs.__getitem__, default="rest"),
    )


def _straggler(ranks: Sequence[Profile]) -> Iterator[Finding]:
    late = lateness(ranks)
    if late is None or standing(late.gain) != "gain" or standing(late.ratio) != "gain":
        return
    rank = late.profile.rank
    part = "what its device computes" if late.kind == "device" else bottlenecks.PARTS[late.kind]
    needs = "for a step of its own" if late.by == INTERLEAVED else "of a step outside of backward and exchange"
    what = f"the others wait for rank {rank}: it needs {ms(late.own_s)} {needs}, {late.ratio} the time of the next"
    what += f"; what takes it longer is {part}"
    fix = f"find out what rank {rank} does that others don't: {part}"
    yield Finding("straggler", what, late.gain, _noted(late.profile, late.kind), fix, SECTIONS["straggler"], late.by)


def _own_code(ranks: Sequence[Profile]) -> Iterator[Finding]:
    """The script's own lines before the first forward and after it: what they do, the doctor doesn't know.

    Of several ranks, the one that has least of them: what another one has on top makes it a straggler.
    """
    least = min(ranks, key=lambda f: part_s(f, *OWN))
    own, without_loss = own_lines_s(least)
    ours = least.cost.get("s", 0.0)  # seconds of the hooks in a step: all of them may be among these lines
    own = [max(0.0, s - ours) for s in own]
    gain = gains.without(least.step_s, own)
    seen = least.training.get("forward_seen", True)  # else most of these lines may be the model
    if gain is None or standing(gain) != "gain" or gain.low < OWN_CODE or not seen:
        return
    trainer, noted = least.training.get("trainer", ""), next((n for n in least.lines if n.kind in OWN and n.line), None)
    lines = f"lines of {trainer} and of the script" if trainer else "the script's own lines"
    what = f"{lines} take {ms(statistics.fmean(own))} of a step's {ms(mean_step_s(ranks))} on average"
    what += f", about {ms(noted.ms / 1e3)} of it this one" if noted else ""
    what += "" if without_loss else "; loss, zero_grad and batches that it makes itself are among them"
    fix = "log, check and sort every 50 steps only, and keep nothing that grows"
    if trainer:
        fix = f"log, check and call back every 50 steps only; what is left is {trainer}'s own: in long steps it is less"
    elif part_s(least, "prepare") > part_s(least, "rest"):
        fix = f"{bottlenecks.AHEAD}; {fix}"
    where = _noted(least, *OWN)
    yield _beside(Finding("own_code", what, gain, where, fix, SECTIONS["own_code"], FROM_PARTS), least)


def _beside(finding: Finding, profile: Profile) -> Finding:
    """The host's time has no price where a device works at the same time."""
    if profile.device == "cpu":
        return finding
    what = f"{finding.what}; the device may work meanwhile, and then it costs nothing"
    return replace(finding, what=what, gain=None, kind=UNPRICED)


def own_lines_s(profile: Profile) -> tuple[list[float], bool]:
    """Of each step, and whether its loss is left out: if samples of the stack show how much of "rest" that is.

    Models that they show in "prepare" are left out as well.
    """
    seen = {kind: sum(n.ms for n in profile.lines if n.kind == kind) for kind in (*OWN, "model", "loss")}
    of_prepare, of_rest = (
        seen[ours] / (seen[ours] + seen[not_ours]) if seen[not_ours] else 1.0
        for ours, not_ours in zip(OWN, ("model", "loss"), strict=True)
    )
    both = (profile.spans_s.get(kind, [0.0] * len(profile.step_s)) for kind in OWN)
    own = [of_prepare * before + of_rest * after for before, after in zip(*both, strict=True)]
    return own, bool(seen["loss"])


def _growing(ranks: Sequence[Profile]) -> Iterator[Finding]:
    """Memory that grows: of the first rank that shows it."""
    for f in ranks:
        grows = memory_growth(f)
        if not _fills(f) or _not_by_tensors(f):
            continue
        last = steps_until_full(f, grows.value)
        what = f"{f'rank {f.rank}: ' if len(ranks) > 1 else ''}memory grows by {grows} with each step"
        longer = gains.growth(f.step_s, "s")
        if gains.enough(longer) and longer.low > 0:
            what += f", and each step takes {ms(longer.value)} longer than the one before"
        what += f"; what is free now is full after {last:,.2g} steps" if last else ""
        fix = "keep numbers, not tensors (loss.item(), every 50 steps), and not those of all steps"
        yield Finding("growing", what, None, "", fix, SECTIONS["growing"], FROM_PARTS, RISK)
        return


def _fills(profile: Profile) -> bool:
    """Whether memory surely grows, and is full before a long training ends."""
    grows = memory_growth(profile)
    return gains.enough(grows) and grows.low > 0 and steps_until_full(profile, grows.low) <= LONG_TRAINING


def _not_by_tensors(profile: Profile) -> bool:
    """Whether a process grows, and its tensors neither in number (a graph keeps others) nor in bytes.

    Then it may be the C library, which keeps what was freed: the script need not be the cause.
    """
    m = profile.memory
    known = profile.device == "cpu" and "tensor_bytes_growth" in m
    return known and m["tensors_growth"] < ONE_IN_TWO and m["tensor_bytes_growth"] < 0.2 * memory_growth(profile).low


def memory_growth(profile: Profile) -> Estimate | None:
    """Bytes per step, with an interval from the run itself; None if it wasn't taken.

    Soon after a start memory may settle for as long as the steps as they are take: what doesn't go on in the rounds
    after them is no growth.
    """
    at_first = gains.growth(profile.memory.get("each_step", []), "B")
    steps, later = zip(*profile.memory.get("each_round") or [[0, 0]], strict=True)
    later = gains.growth(later, "B", steps)
    return min(filter(None, (at_first, later)), key=lambda e: e.low, default=None)


def steps_until_full(profile: Profile, growth: float) -> float:
    """Steps after which memory that grows by so many bytes in each has taken all that is free; 0 if that is unknown."""
    return profile.memory.get("free", 0) / growth if growth > 0 else math.inf


def _recompiles(ranks: Sequence[Profile]) -> Iterator[Finding]:
    """By how much the steps that compile are longer than the others."""
    f = next((f for f in ranks if f.compiles.get("in_steps")), None)
    if f is None:
        return
    at = f.compiles.get("at", [])
    longer = gains.longer_s(f.step_s, at)
    gain = gains.without(f.step_s, longer)
    goes_on = len(at) >= GOES_ON and at[-1] - at[0] >= len(f.step_s) / 2
    slow = goes_on and gain is not None and standing(gain) == "gain"
    graphs = count(f.compiles["in_steps"], "graph")
    what = f"torch.compile made {graphs} during {len(f.step_s)} steps, after the warm-up"
    if at:
        how = f"in {count(len(at), 'step')}" if goes_on else "one-off"
        what += f"; {how}: {ms(sum(longer))} in all"
    where, fix = called(f.script, ["compile"]), "batches of one shape (drop_last=True), or torch.compile(dynamic=True)"
    kind = SLOW if slow else UNPRICED
    yield Finding("recompiles", what, gain if slow else None, where, fix, SECTIONS["recompiles"], FROM_PARTS, kind)


def _copies(ranks: Sequence[Profile]) -> Iterator[Finding]:
    """Copies to the device, and what they would take from pinned memory."""
    most = max(ranks, key=lambda f: part_s(f, "copy"))
    gain, where = gains.without(gains.steps_s(ranks), gains.lost_s(most, "copy")), _noted(most, "copy")
    if gain is not None and where and _standing(gain, FROM_PARTS) == "gain":
        what = f"copies to the device take {ms(part_s(most, 'copy'))} of a step's {ms(mean_step_s(ranks))}"
        fix = "pin_memory=True, x.to(device, non_blocking=True), and no copy twice"
        yield _beside(Finding("copies", what, gain, where, fix, SECTIONS["copies"], FROM_PARTS), most)
    for f in ranks:
        took = {how: statistics.median(s) for how, s in f.copy_s.items() if s}
        if not {"pageable", "pinned"} <= set(took) or (f.loader and f.loader.pinned):
            continue
        saved = max(0.0, took["pageable"] - took["pinned"]) * f.micro_batches
        gain = gains.without(gains.steps_s(ranks), [saved] * len(f.step_s))
        if gain is not None and _standing(gain, FROM_PARTS) == "gain":
            what = f"a batch takes {ms(took['pageable'])} to the device, from pinned memory {ms(took['pinned'])}"
            where = where or called(f.script, ["DataLoader"])
            yield Finding("pageable", what, gain, where, bottlenecks.PIN, SECTIONS["pageable"], FROM_PARTS, OPTION)
        return


SWITCHED_ON = {"anomaly": SLOW, "float64": SLOW, "threads": SLOW, "find_unused": UNPRICED, "exchange": UNPRICED}
"""Kinds of what is on: DDP's search may be needed."""


def _switched_on(ranks: Sequence[Profile], named: set[str]) -> Iterator[Finding]:
    """What the running training has, and no measurement has priced."""
    f = ranks[0]
    has = {
        "anomaly": f.training.get("anomaly"),
        "find_unused": f.training.get("find_unused_parameters"),
        "float64": "float64" in f.training.get("dtypes", ()),
        "threads": oversubscribed(f),
        "exchange": len(ranks) > 1 and _needless_exchange(f) and not gains.split(ranks),
    }
    harmless = {bottleneck.name for bottleneck, gain, by, _ in _priced(ranks) if _standing(gain, by) == "fine"}
    for bottleneck in BOTTLENECKS:
        if has.get(bottleneck.name) and bottleneck.name not in named | harmless:
            named.add(bottleneck.name)
            words = numbers(bottleneck, ranks, f)
            what, fix = bottleneck.what.format(**words), bottleneck.fix.format(**words)
            where = _where(bottleneck, f, words)
            yield Finding(
                bottleneck.name, what, None, where, fix, bottleneck.notebook, SEEN, SWITCHED_ON[bottleneck.name]
            )
    if f.training.get("data_parallel"):
        what, fix = "DataParallel copies the model in each step", "DistributedDataParallel, a process for each device"
        where = called(f.script, ["DataParallel"])
        yield Finding("data_parallel", what, None, where, fix, SECTIONS["data_parallel"], SEEN)


# What is fine, and what isn't known


def healthy(profiles: Sequence[Profile]) -> list[str]:
    """What was tried or measured, and is fine, with its numbers."""
    ranks = with_steps(profiles)
    return list(_healthy(ranks)) if ranks else []


def _healthy(ranks: Sequence[Profile]) -> Iterator[str]:
    for bottleneck, gain, by, _ in _priced(ranks):
        if _standing(gain, by) == "fine":
            yield f"{bottleneck.mode or bottleneck.name}: {_little(gain, by)}"
    late = lateness(ranks)
    if late is not None and standing(late.gain) == "fine":
        yield f"ranks: the slowest takes {late.ratio} the time of the next one for a step of its own"
    grows = [memory_growth(f) for f in ranks]
    if all(gains.enough(g) for g in grows) and not list(_growing(ranks)):
        most = max(grows, key=lambda g: g.value)
        if most.low <= 0:
            yield f"memory: no growth that this run can show (growth {most} per step)"
        elif steps_until_full(ranks[grows.index(most)], most.high) > LONG_TRAINING:
            yield f"memory: it lasts for a million steps (growth {most} per step)"


def _little(gain: Estimate, by: str) -> str:
    if by == FROM_PARTS:
        return f"{gain} as fast, by arithmetic"
    if gain.low <= 1 <= gain.high:
        return f"no difference that this run can show ({gain})"
    return f"{gain} as fast" if gain.value > 1 else f"slower ({gain})"


def unknown(profiles: Sequence[Profile]) -> list[str]:
    """What this run can't say, what wasn't tried and why."""
    ranks = with_steps(profiles)
    texts = list(_unclear(ranks)) if ranks else []
    texts += [*(text for f in profiles for text in f.unseen), *_not_tried(profiles)]
    return list(dict.fromkeys([*texts, *(bottlenecks.NOT_DETECTED if ranks else ())]))


def _unclear(ranks: Sequence[Profile]) -> Iterator[str]:
    first = ranks[0]
    noisy = [f"{b.mode or b.name} {gain}" for b, gain, by, _ in _priced(ranks) if _standing(gain, by) == "unclear"]
    late = lateness(ranks)
    if late is not None and standing(late.gain) == "unclear":
        noisy.append(f"ranks as fast as each other {late.gain}")
    if noisy:
        more = f"--seconds {4 * first.seconds:g} on a quiet machine" if first.seconds else "a quiet machine"
        yield f"too few or too unsteady steps to say what these give ({more} tells more): {', '.join(noisy)}"
    if gains.split(ranks):
        yield "whether a rank is late: ranks hold different parts of the model, or weights of their own"
    if any(_fills(f) and _not_by_tensors(f) for f in ranks):
        yield "why the process grows: its tensors don't. It may be the C library, which settles: --steps 300 tells"
    models = [n for n in first.lines if n.kind == "model"]
    if models:
        took, part = ms(sum(n.ms for n in models) / 1e3), bottlenecks.PARTS["prepare"]
        yield f"what models cost that no optimizer trains, or whose forward() is called by name: {took} of '{part}'"
    if (cost := hooks_cost(first)) is not None and cost > COST_SAID:
        yield f"the doctor's hooks take {100 * cost:.0f} % of so short a step: its parts look longer than they are"


def _not_tried(profiles: Sequence[Profile]) -> Iterator[str]:
    modes: dict[str, list[str]] = {}
    reasons = [item for f in profiles for item in (f.not_tried | f.left_out).items()]
    named = {mode for mode, _ in reasons}
    for f in profiles:
        if f.step_s and f.ended != "done":
            why = f"the run ended after {count(f.steps, 'step')}: let it train longer, or --steps 10 --only NAME"
            reasons += [(mode, why) for mode in not_reached(f) if mode not in named]
    for mode, why in reasons:
        if mode not in modes.setdefault(why, []):
            modes[why].append(mode)
    if modes:
        yield "not tried: " + "; ".join(f"{', '.join(names)} ({why})" for why, names in modes.items())
    if profiles and profiles[0].seconds == 0:
        yield "what any fix gives: nothing was to be tried (without --seconds 0 it is)"


def hooks_cost(profile: Profile) -> float | None:
    """Share of a step that the doctor's own calls take, but for its wait for a device; None if it isn't known."""
    if not profile.step_s or "s" not in profile.cost:
        return None
    return profile.cost["s"] / statistics.median(profile.step_s)


# Words


def mean_step_s(ranks: Sequence[Profile]) -> float:
    """Of the job as it is. Parts are means too: some slow steps may make one of them longer than the median step."""
    return statistics.fmean(gains.steps_s(ranks))


def ms(seconds: float) -> str:
    """0.0123 -> "12.3 ms", in the unit that fits."""
    return str(Estimate(seconds, seconds, seconds, 1, "s")).split(" [")[0]


def count(n: float, noun: str) -> str:
    """ "1 step", "2 steps"."""
    return f"{n:g} {noun}{'' if n == 1 else 's'}"
