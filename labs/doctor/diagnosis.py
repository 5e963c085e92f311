"""What holds a training back, ranked by what a cure gives at most; what is healthy; what is not known.

A sentence says what the facts hold and no more: a bound has the interval of its rounds, and a cause that this run
cannot show is no finding. What two cures give together is not the product of their bounds: it is measured after them.
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

from labs.doctor import bounds, causes, trainers
from labs.doctor.bounds import NO_EXCHANGE, part_s, standing
from labs.doctor.causes import CAUSES, HOLDS_BACK, OPTION, READING, SECTIONS, Cause
from labs.doctor.facts import AS_IS, Facts, Line, not_reached, rare_kinds, share_of_steps
from labs.doctor.turns import MOST_ROUNDS
from labs.kit.measure import Estimate, estimate

if TYPE_CHECKING:
    from labs.doctor.static_rules import Match

IN_TURN, FROM_PARTS, BY_READING = "measured in turn", "from the step's parts", "by reading"
MOSTLY_FIXED, CERTAINLY_FIXED = 0.75, 0.5
"""Batches are tiny if this share of a step is paid whatever their size is, by its value and by its lower end."""
ILL = 1.15
"""What a cure gives at least for its lack to be an illness: less is an option, also for a training that is well."""
SMALL_BUCKET, MANY_BUCKETS = 2**20, 8
"""Bytes: DDP's first bucket, and the others are 25 times as large; so many buckets of less are too many."""
OWN, OWN_CODE = ("prepare", "rest"), 1.15
"""The loss and zero_grad are the script's own code, too: only more than this is told."""
BUSY_PERCENT = 70
"""Of the time a GPU has work, or Python is too slow for it."""
COST_SAID = 0.03
LONG_TRAINING = 1e6
"""Steps: memory that lasts longer than that may grow."""
ITERABLE = "_InfiniteConstantSampler"
"""What torch calls the sampler of a DataLoader over an IterableDataset: each worker has a copy of all of that."""
RUNNING = "certain: the running training has it"


@dataclass(frozen=True)
class Finding:
    """One thing that can be cured."""

    name: str
    what: str
    """One sentence with its numbers."""
    bound: Estimate | None
    """How many times as fast at most, per sample; None if it was not measured."""
    where: str
    """file:line and the code; "" if no line stands for it."""
    cure: str
    """What to type."""
    notebook: str
    by: str
    """ "measured in turn", "from the step's parts" or "by reading"."""
    kind: str = HOLDS_BACK
    """ "holds back", "option" (a healthy training may use it, too), "reading" (not priced)."""
    certainty: str = ""
    """Of what was read."""


def diagnose(facts: list[Facts], hits: Sequence[Match] = ()) -> list[Finding]:
    """Of all ranks: what holds back and then options, each by the lower end of its bound; then what was read."""
    seen = with_steps(facts)
    found = [_with_trainer(_or_option(f), seen[0]) for f in _all(seen)] if seen else []
    return sorted(found, key=_rank) + list(map(_read, hits))


def _or_option(finding: Finding) -> Finding:
    little = finding.kind == HOLDS_BACK and finding.bound is not None and finding.bound.value < ILL
    return replace(finding, kind=OPTION) if little else finding


def _with_trainer(finding: Finding, facts: Facts) -> Finding:
    of = facts.training
    there = trainers.cure(of.get("trainer", ""), finding.name, of.get("half", "bfloat16"))
    return replace(finding, cure=finding.cure + there)


def _rank(finding: Finding) -> tuple[int, float, float]:
    low, value = (finding.bound.low, finding.bound.value) if finding.bound else (0.0, 0.0)
    return (HOLDS_BACK, OPTION, READING).index(finding.kind), -low, -value


def with_steps(facts: Sequence[Facts]) -> list[Facts]:
    """Of the ranks whose steps were looked at, by rank."""
    return sorted((f for f in facts if f.step_s), key=lambda f: f.rank)


def line_of(finding: Finding) -> str:
    """Its "file:line"."""
    return finding.where.split("  ")[0]


def _all(facts: Sequence[Facts]) -> Iterator[Finding]:
    named = set()
    for cause, bound, by, of in _judged(facts):
        if _standing(bound, by) == "gain" and cause.name not in named:
            named.add(cause.name)
            yield _finding(cause, bound, by, facts, of)
    yield from _straggler(facts)
    yield from _own_code(facts)
    yield from _growing(facts)
    yield from _recompiles(facts)
    yield from _copies(facts)
    yield from _switched_on(facts, named)


def _judged(facts: Sequence[Facts]) -> Iterator[tuple[Cause, Estimate, str, Facts]]:
    """Each cause that has a price: bound, how it is known, of which rank."""
    for cause in CAUSES:
        if cause.name == "exchange" and (facts[0].ranks == 1 or bounds.split(facts)):
            continue  # they wait for each other by design: see _split
        parted, most = bounds.from_parts(facts, *cause.parts) if cause.parts else (None, facts[0])
        bound = bounds.in_turn(facts, cause.mode)
        noisy = parted is not None and bounds.enough(bound) and standing(bound) == "unclear"
        own = cause.name == "exchange" and parted is not None and _standing(parted, FROM_PARTS) == "gain"
        if own or (noisy and standing(parted, bounds.WORTH_INSTEAD) == "gain") or _small(cause, parted, bound, facts):
            yield cause, parted, FROM_PARTS, most
        elif bounds.enough(bound) and not _now_and_then(cause, most):
            yield cause, *_within(cause, bound, facts)
        elif parted is not None and part_s(most, *cause.parts):
            yield cause, parted, FROM_PARTS, most
        elif bound is not None:
            yield cause, bound, IN_TURN, most


def _small(cause: Cause, parted: Estimate | None, bound: Estimate | None, facts: Sequence[Facts]) -> bool:
    """Whether a step hardly waits for data that its own process makes: no loader gives more, whatever some noise shows.

    Workers may cost a step more than its wait, for they use the same cores.
    """
    if bound is None or standing(bound) != "gain" or bound.low >= bounds.FINE:
        return False
    alone = all(f.device == "cpu" and f.loader is not None and not f.loader.workers for f in facts)
    return cause.name == "slow_loader" and alone and bounds.enough(parted) and parted.high < bounds.WORTH


def _within(cause: Cause, bound: Estimate, facts: Sequence[Facts]) -> tuple[Estimate, str, Facts]:
    """A cure of the optimizer gives no more than a step without one, whatever a noisy machine shows.

    A GPU's parts are longer than the host's clock says: of those nothing is known from here.
    """
    most, of = bounds.from_parts(facts, *cause.within) if cause.within else (None, facts[0])
    if of.device != "cpu" or not bounds.enough(most):
        return bound, IN_TURN, of
    too_much = standing(bound) == "gain" and most.high < bound.value
    little = standing(bound) == "unclear" and standing(most, bounds.WORTH_BY_PARTS) == "fine"
    return (most, FROM_PARTS, of) if too_much or little else (bound, IN_TURN, of)


def _standing(bound: Estimate, by: str) -> str:
    return standing(bound, bounds.WORTH_BY_PARTS if by == FROM_PARTS else bounds.WORTH)


def _now_and_then(cause: Cause, facts: Facts) -> bool:
    return any(k in rare_kinds(facts) for k in cause.parts)


def _finding(cause: Cause, bound: Estimate, by: str, facts: Sequence[Facts], of: Facts) -> Finding:
    name, kind, what = _named(cause, bound, of)
    if name == "exchange" and by == IN_TURN and not _needless_exchange(of):
        kind = OPTION  # the price of ranks that train one model, be it high: larger batches or a hook lower it
    words = numbers(cause, facts, of)
    if cause.name == "exchange" and by == FROM_PARTS:
        what += ", waiting for late ranks among it"
    what = what.format(**words) + (f" (rank {of.rank})" if len(facts) > 1 and by == FROM_PARTS else "")
    return Finding(name, what, bound, _where(cause, of, words), cause.cure.format(**words), cause.notebook, by, kind)


def _named(cause: Cause, bound: Estimate, facts: Facts) -> tuple[str, str, str]:
    """Name, kind and sentence: some of what can be gained is no illness."""
    fixed = _mostly_fixed(bound, facts.samples_factor.get(cause.mode, 1.0))
    paid_otherwise = oversubscribed(facts) or facts.ranks > 1  # threads, and the exchange, cost each step as much
    if cause.name == "tiny_batches" and (paid_otherwise or not fixed):
        return "larger_batch", OPTION, causes.LARGER
    if cause.name == "threads" and not oversubscribed(facts):
        return "threads", OPTION, causes.THREADS + ": fewer are faster"
    if cause.name == "optimizer_loop" and not _loops(facts):
        return "fused_optimizer", OPTION, causes.NOT_FUSED
    if cause.name == "compile" and facts.device != "cpu" and facts.machine.get("gpu_percent", 100) < BUSY_PERCENT:
        return "python_overhead", HOLDS_BACK, causes.STARVED
    return cause.name, OPTION if cause.option else HOLDS_BACK, cause.what


def _loops(facts: Facts) -> bool:
    """Whether the script has chosen the loop. By default torch takes lists of tensors on a GPU, and a loop on a CPU."""
    return any(o.get("foreach") is False and not o.get("fused") for o in facts.training.get("optimizers", ()))


def _needless_exchange(facts: Facts) -> bool:
    """Whether DDP exchanges more often, or in smaller pieces, than it has to. Some of what it must do nothing hides."""
    of = facts.training
    pieces = of.get("bucket_bytes") and facts.memory.get("parameters", 0) / of["bucket_bytes"] > MANY_BUCKETS
    small = of.get("bucket_bytes", SMALL_BUCKET) < SMALL_BUCKET
    return bool(of.get("exchanges", 1) > 1 or (pieces and small) or of.get("sync_batchnorm"))


def _mostly_fixed(bound: Estimate, factor: float) -> bool:
    """t(k B) = fixed + k rest: per sample that is k / (k - share (k - 1)) times as fast, share being fixed / t(B)."""
    if factor <= 1:
        return False
    share, certain = ((factor - factor / gain) / (factor - 1) for gain in (bound.value, bound.low))
    return share >= MOSTLY_FIXED and certain >= CERTAINLY_FIXED


def oversubscribed(facts: Facts) -> bool:
    """Whether there are more threads of torch's than cores."""
    threads, cores = facts.machine.get("threads"), facts.machine.get("cores")
    return bool(threads and cores and threads * facts.local_ranks > cores and threads > 1)


def numbers(cause: Cause, facts: Sequence[Facts], of: Facts) -> dict[str, Any]:
    """What the texts of a cause may hold."""
    noted = [n for n in of.lines if n.kind == cause.lines]
    cores, threads = of.machine.get("cores", 0), of.machine.get("threads", 0)
    fair = max(1, cores // max(1, of.local_ranks))
    factor = of.samples_factor.get(cause.mode, 1.0)
    batch = of.loader.batch_size if of.loader else None
    pairs = bounds.pairs_s(facts, NO_EXCHANGE)
    exposed = estimate([a - b for a, b in pairs], "s") if pairs else None
    optimizers = of.training.get("optimizers") or [{"kind": "Optimizer"}]
    half = of.training.get("half", "bfloat16")
    return {
        "part": ms(statistics.fmean(bounds.lost_s(of, *cause.parts) or [0.0])),
        "half": half,
        "scaler": ", and a torch.amp.GradScaler for the gradients" if half == "float16" else "",
        "calls": f"{sum(n.calls for n in noted):.3g}",
        "gpu": of.machine.get("gpu_percent"),
        "often": _often(of, cause.parts[0]) if cause.parts else "",
        "mean": ms(mean_step_s(facts)),
        "loader": _loader(of),
        "loader_cure": _loader_cure(of, fair),
        "exchange_cure": _exchange_cure(of),
        "exposed": str(exposed) if exposed and exposed.low > 0 else _seen_exchange(of),  # noise may hide it in turn
        "threads": count(threads, "thread"),
        "cores": count(cores, "core"),
        "fair_threads": fair,
        "local_ranks": count(of.local_ranks, "rank"),
        "factor": f"{factor:g}",
        "device": of.device,
        "batch": batch or "its size",
        "larger_batch": round(batch * factor) if batch else f"{factor:g} * batch_size",
        "optimizer": optimizers[0]["kind"],
    }


def _seen_exchange(facts: Facts) -> str:
    """On a GPU the host only asks for it: its clock does not know how long it takes."""
    return ms(part_s(facts, "exchange")) if facts.device == "cpu" else "an unknown part"


def _often(facts: Facts, kind: str) -> str:
    steps = len(facts.step_s)
    share = share_of_steps(facts, kind)
    return "all steps" if share == 1 else f"{round(share * steps)} of {steps} steps"


def _loader(facts: Facts) -> str:
    if facts.loader is None:
        return "no DataLoader"
    workers = count(facts.loader.workers, "worker") if facts.loader.workers else "no worker"
    size = f"batches of {facts.loader.batch_size}" if facts.loader.batch_size else "batches by a sampler"
    return f"{size}, {workers}"


def _loader_cure(facts: Facts, fair: int) -> str:
    """Other numbers of workers were tried on the loader alone, if `loader_s` is there."""
    tried = {int(n): statistics.median(s) for n, s in facts.loader_s.items() if s}
    now = facts.loader.workers if facts.loader else 0
    others = {n: s for n, s in tried.items() if n and n != now}
    shares = facts.loader is not None and facts.loader.sampler == ITERABLE
    apart = ", each worker with its share of the samples (torch.utils.data.get_worker_info)" if shares else ""
    if now < fair and not any(n > now for n in others):
        return f"DataLoader(..., num_workers={fair}, persistent_workers=True){apart}, or decode once and keep it"
    best = min(others, key=others.__getitem__, default=now)
    if best != now and (not now or tried[best] * bounds.WORTH < tried.get(now, 0.0)):
        # Workers load while the rest of a step runs: that is what their time is held against, and not the time without
        beside = statistics.fmean(facts.step_s) - part_s(facts, "data")
        times = f"the loader alone then takes {ms(tried[best])} for a batch, the rest of a step {ms(beside)}"
        return (
            f"DataLoader(..., num_workers={best}, persistent_workers=True) if there are cores for them ({times}), "
            "or decode once and keep it"
        )
    alone = 0 in tried and now and tried[0] * bounds.WORTH < tried.get(now, 0.0)
    if alone and tried[0] + _without_waiting_s(facts) < mean_step_s([facts]):  # then nothing is loaded beside a step
        times = f"the loader alone then takes {ms(tried[0])} for a batch, now {ms(tried[now])}"
        return f"DataLoader(..., num_workers=0): {times}"
    known = " (more workers are not faster)" if any(n > now for n in tried) else ""
    return f"do less for each sample, or decode once and keep it{known}: python -m labs.dataset_formats"


def _without_waiting_s(facts: Facts) -> float:
    """What a step then takes in which its own process loads nothing: as it was tried, for workers take its cores."""
    tried = [s for turn in facts.turns_s.get("same batch again", ()) for s in turn]
    return statistics.median(tried) if tried else statistics.fmean(facts.step_s) - part_s(facts, "data")


def _exchange_cure(facts: Facts) -> str:
    if facts.micro_batches > 1 and facts.training.get("exchanges", facts.micro_batches) > 1:
        return "with model.no_sync(): for all micro-batches but the last one"
    buckets = "buckets of 25 MB, " if facts.training.get("bucket_bytes", 0) < SMALL_BUCKET else ""
    return f"exchange less, or less often: larger batches per rank, {buckets}nothing that DDP has done already"


# Where a cause stands in the source


def _where(cause: Cause, facts: Facts, words: dict[str, Any]) -> str:
    noted = next((n for n in facts.lines if cause.lines and n.kind == cause.lines and n.line), None)
    return _place(noted) if noted else called(facts.script, [c.format(**words) for c in cause.calls])


def _place(noted: Line) -> str:
    return f"{os.path.basename(noted.file)}:{noted.line}  {noted.code}"


def called(script: str, names: Sequence[str]) -> str:
    """First line of the script that calls one of these names, as "file:line  code"; "" if none does."""
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    lines = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Call) and _name(n.func) in names]
    if not lines:
        return ""
    return f"{os.path.basename(script)}:{min(lines)}  {linecache.getline(script, min(lines)).strip()}"


def _name(function: ast.expr) -> str:
    return getattr(function, "attr", None) or getattr(function, "id", "")


# What no counterfactual prices


@dataclass(frozen=True)
class Late:
    """The slowest rank of several."""

    facts: Facts
    own_s: float
    others_s: float
    """Of the slowest of the others."""
    ratio: Estimate
    bound: Estimate
    """If it were as fast as that one."""
    by: str
    kind: str
    """The part of its step that exceeds the others' most."""


def lateness(facts: Sequence[Facts]) -> Late | None:
    """None where it cannot be told. From parts, where turns were too few or too noisy."""
    if bounds.split(facts):
        return None
    in_turn, parts = (_late(facts, own) for own in (bounds.own_in_turn(facts), bounds.own_from_parts(facts)))
    if in_turn is None or (standing(in_turn.bound) == "unclear" and parts is not None):
        return parts
    return in_turn


def _late(facts: Sequence[Facts], own: bounds.Own | None) -> Late | None:
    if own is None:
        return None
    slow = max(range(len(facts)), key=lambda r: statistics.median(own.ranks[r]))
    mine = own.ranks[slow]
    others = [max(of) for of in zip(*(o for r, o in enumerate(own.ranks) if r != slow), strict=True)]
    excess = [max(0.0, a - b) for a, b in zip(mine, others, strict=True)]
    gains = [s / (s - min(e, 0.99 * s)) for s, e in zip(own.job, excess, strict=True) if s > 0]
    differs = {
        k: part_s(facts[slow], k) - max(part_s(f, k) for r, f in enumerate(facts) if r != slow)
        for k in facts[slow].spans_s
    }
    return Late(
        facts[slow],
        statistics.median(mine),
        statistics.median(others),
        bounds.of_ratios([a / b for a, b in zip(mine, others, strict=True) if b > 0] or [1.0], bounds.looks(facts)),
        bounds.of_ratios(gains or [1.0], bounds.looks(facts)),
        IN_TURN if own.in_turn else FROM_PARTS,
        max(differs, key=differs.__getitem__, default="rest"),
    )


def _straggler(facts: Sequence[Facts]) -> Iterator[Finding]:
    late = lateness(facts)
    if late is None or standing(late.bound) != "gain" or standing(late.ratio) != "gain":
        return
    rank = late.facts.rank
    part = "what its device computes" if late.kind == "device" else causes.PARTS[late.kind]
    needs = "for a step of its own" if late.by == IN_TURN else "of a step outside of backward and exchange"
    what = f"the others wait for rank {rank}: it needs {ms(late.own_s)} {needs}, {late.ratio} the time of the next"
    what += f"; what takes it longer is {part}"
    where = next((_place(n) for n in late.facts.lines if n.kind == late.kind and n.line), "")
    cure = f"find out what rank {rank} does that others do not: {part}"
    yield Finding("straggler", what, late.bound, where, cure, SECTIONS["straggler"], late.by)


def _own_code(facts: Sequence[Facts]) -> Iterator[Finding]:
    """The script's own lines before the first forward and after it: what they do, the doctor does not know.

    Of several ranks, the one that has least of them: what another one has on top makes it a straggler.
    """
    least = min(facts, key=lambda f: part_s(f, *OWN))
    own, without_loss = own_lines_s(least)
    ours = least.cost.get("s", 0.0)  # seconds of the hooks in a step: all of them may be among these lines
    own = [max(0.0, s - ours) for s in own]
    bound = bounds.without(least.step_s, own)
    if bound is None or standing(bound) != "gain" or bound.low < OWN_CODE:
        return
    if not least.training.get("forward_seen", True):
        return  # most of these lines may be the model
    noted = next((n for n in least.lines if n.kind in OWN and n.line), None)
    trainer = least.training.get("trainer", "")
    lines = f"lines of {trainer} and of the script" if trainer else "the script's own lines"
    what = f"{lines} take {ms(statistics.fmean(own))} of a step's {ms(mean_step_s(facts))} on average"
    if noted:
        what += f", about {ms(noted.ms / 1e3)} of it this one"
    what += "" if without_loss else "; loss, zero_grad and batches that it makes itself are among them"
    cure = "log, check and sort every 50 steps only, and keep nothing that grows"
    if trainer:
        cure = (
            f"log, check and call back every 50 steps only; what is left is {trainer}'s own: in long steps it is less"
        )
    elif part_s(least, "prepare") > part_s(least, "rest"):
        cure = f"{causes.AHEAD}; {cure}"
    where = _place(noted) if noted else ""
    found = Finding("own_code", what, bound, where, cure, SECTIONS["own_code"], FROM_PARTS)
    yield found if least.device == "cpu" else _beside(found)


def _beside(finding: Finding) -> Finding:
    """The host's time, where a device works at the same time: it is seen, and has no price."""
    certainty = "the device may work meanwhile, and then it costs nothing"
    return replace(finding, bound=None, kind=READING, certainty=certainty)


def own_lines_s(facts: Facts) -> tuple[list[float], bool]:
    """Of each step, and whether its loss is left out: if it is known from looks how much of "rest" that is.

    Left out, too, is what looks have seen of models in "prepare".
    """
    seen = {kind: sum(n.ms for n in facts.lines if n.kind == kind) for kind in (*OWN, "model", "loss")}
    of_prepare, of_rest = (
        seen[ours] / (seen[ours] + seen[not_ours]) if seen[not_ours] else 1.0
        for ours, not_ours in zip(OWN, ("model", "loss"), strict=True)
    )
    both = (facts.spans_s.get(kind, [0.0] * len(facts.step_s)) for kind in OWN)
    own = [of_prepare * before + of_rest * after for before, after in zip(*both, strict=True)]
    return own, bool(seen["loss"])


def _growing(facts: Sequence[Facts]) -> Iterator[Finding]:
    """Memory that grows: of the first rank that shows it."""
    for f in facts:
        grows = memory_growth(f)
        if not _fills(f) or _not_by_tensors(f):
            continue
        last = steps_until_full(f, grows.value)
        what = f"{f'rank {f.rank}: ' if len(facts) > 1 else ''}memory grows by {grows} with each step"
        longer = bounds.growth(f.step_s, "s")
        if bounds.enough(longer) and longer.low > 0:
            what += f", and each step takes {ms(longer.value)} longer than the one before"
        what += f"; what is free now is full after {last:,.2g} steps" if last else ""
        cure = "keep numbers, not tensors (loss.item(), every 50 steps), and not those of all steps"
        yield Finding("growing", what, None, "", cure, SECTIONS["growing"], FROM_PARTS)
        return


def _fills(facts: Facts) -> bool:
    """Whether memory surely grows, and is full before a long training ends."""
    grows = memory_growth(facts)
    return bounds.enough(grows) and grows.low > 0 and steps_until_full(facts, grows.low) <= LONG_TRAINING


def _not_by_tensors(facts: Facts) -> bool:
    """Whether a process grows, and its tensors neither in number (a graph keeps others) nor in bytes.

    Then it may be the C library, which keeps what was freed: the script need not be to blame.
    """
    m = facts.memory
    known = facts.device == "cpu" and "tensor_bytes_growth" in m
    return known and m["tensors_growth"] < ONE_IN_TWO and m["tensor_bytes_growth"] < 0.2 * memory_growth(facts).low


ONE_IN_TWO = 0.5
"""Tensors more in each step: a loss that is kept is one."""


def memory_growth(facts: Facts) -> Estimate | None:
    """Bytes per step, with an interval from the run itself; None if it was not taken.

    Soon after a start memory may settle for as long as the steps as they are take: what does not go on in the rounds
    after them is no growth.
    """
    at_first = bounds.growth(facts.memory.get("each_step", []), "B")
    steps, later = zip(*facts.memory.get("each_round") or [[0, 0]], strict=True)
    later = bounds.growth(later, "B", steps)
    return min(filter(None, (at_first, later)), key=lambda e: e.low, default=None)


def steps_until_full(facts: Facts, growth: float) -> float:
    """Steps after which memory that grows by so many bytes in each has taken all that is free; 0 if that is unknown."""
    return facts.memory.get("free", 0) / growth if growth > 0 else math.inf


GOES_ON = 3
"""Steps that compile, spread over half of those that were looked at: fewer of them end, and a training is longer."""


def _recompiles(facts: Sequence[Facts]) -> Iterator[Finding]:
    """By how much the steps that compile are longer than the others."""
    for f in facts:
        graphs, at = f.compiles.get("in_steps", 0), f.compiles.get("at", [])
        if not graphs:
            continue
        longer = bounds.longer_s(f.step_s, at)
        bound = bounds.without(f.step_s, longer)
        goes_on = len(at) >= GOES_ON and at[-1] - at[0] >= len(f.step_s) / 2
        gain = goes_on and bound is not None and standing(bound) == "gain"
        what = f"torch.compile made {count(graphs, 'graph')} during {len(f.step_s)} steps, after the warm-up"
        if at:
            how = f"in {count(len(at), 'step')}" if goes_on else "one-off"
            what += f"; {how}: {ms(sum(longer))} in all"
        cure = "batches of one shape (drop_last=True), or torch.compile(dynamic=True)"
        yield Finding(
            "recompiles",
            what,
            bound if gain else None,
            called(f.script, ["compile"]),
            cure,
            SECTIONS["recompiles"],
            FROM_PARTS,
            HOLDS_BACK if gain else READING,
        )
        return


def _copies(facts: Sequence[Facts]) -> Iterator[Finding]:
    """Copies to the device, and what they would take from pinned memory."""
    most = max(facts, key=lambda f: part_s(f, "copy"))
    bound = bounds.without(bounds.steps_s(facts), bounds.lost_s(most, "copy"))
    noted = next((n for n in most.lines if n.kind == "copy" and n.line), None)
    if bound is not None and noted is not None and _standing(bound, FROM_PARTS) == "gain":
        what = f"copies to the device take {ms(part_s(most, 'copy'))} of a step's {ms(mean_step_s(facts))}"
        cure = "pin_memory=True, x.to(device, non_blocking=True), and no copy twice"
        found = Finding("copies", what, bound, _place(noted), cure, SECTIONS["copies"], FROM_PARTS)
        yield found if most.device == "cpu" else _beside(found)
    for f in facts:
        took = {how: statistics.median(s) for how, s in f.copy_s.items() if s}
        if not {"pageable", "pinned"} <= set(took) or (f.loader and f.loader.pinned):
            continue
        saved = max(0.0, took["pageable"] - took["pinned"]) * f.micro_batches
        bound = bounds.without(bounds.steps_s(facts), [saved] * len(f.step_s))
        if bound is not None and _standing(bound, FROM_PARTS) == "gain":
            what = f"a batch takes {ms(took['pageable'])} to the device, from pinned memory {ms(took['pinned'])}"
            where = called(f.script, ["DataLoader"])
            yield Finding("pageable", what, bound, where, causes.PIN, SECTIONS["copies"], FROM_PARTS, OPTION)
        return


def _switched_on(facts: Sequence[Facts], named: set[str]) -> Iterator[Finding]:
    """What the running training has, and no counterfactual has priced."""
    f = facts[0]
    has = {
        "anomaly": f.training.get("anomaly"),
        "find_unused": f.training.get("find_unused_parameters"),
        "float64": "float64" in f.training.get("dtypes", ()),
        "threads": oversubscribed(f),
        "exchange": len(facts) > 1 and _needless_exchange(f) and not bounds.split(facts),
    }
    harmless = {cause.name for cause, bound, by, _ in _judged(facts) if _standing(bound, by) == "fine"}
    for cause in CAUSES:
        if has.get(cause.name) and cause.name not in named | harmless:
            named.add(cause.name)
            words = numbers(cause, facts, f)
            yield Finding(
                cause.name,
                cause.what.format(**words),
                None,
                _where(cause, f, words),
                cause.cure.format(**words),
                cause.notebook,
                BY_READING,
                READING,
                RUNNING,
            )
    if f.training.get("data_parallel"):
        what, cure = "DataParallel copies the model in each step", "DistributedDataParallel, a process for each device"
        yield Finding(
            "data_parallel",
            what,
            None,
            called(f.script, ["DataParallel"]),
            cure,
            SECTIONS["data_parallel"],
            BY_READING,
            READING,
            RUNNING,
        )


def _read(match: Match) -> Finding:
    where = f"{os.path.basename(match.file)}:{match.line}  {match.code}" if match.line else os.path.basename(match.file)
    return Finding(match.rule, match.why, None, where, match.fix, match.notebook, BY_READING, READING, match.certainty)


# What is healthy, and what is not known


def healthy(facts: list[Facts]) -> list[str]:
    """What was tried or looked at, and is fine, with its numbers."""
    seen = with_steps(facts)
    return list(_healthy(seen)) if seen else []


def _healthy(facts: Sequence[Facts]) -> Iterator[str]:
    for cause, bound, by, _ in _judged(facts):
        if _standing(bound, by) == "fine":
            yield f"{cause.mode or cause.name}: {_little(bound, by)}"
    late = lateness(facts)
    if late is not None and standing(late.bound) == "fine":
        yield f"ranks: the slowest takes {late.ratio} the time of the next one for a step of its own"
    grows = [memory_growth(f) for f in facts]
    if all(bounds.enough(g) for g in grows) and not list(_growing(facts)):
        most = max(grows, key=lambda g: g.value)
        if most.low <= 0:
            yield f"memory: no growth that this run can show (growth {most} per step)"
        elif steps_until_full(facts[grows.index(most)], most.high) > LONG_TRAINING:
            yield f"memory: it lasts for a million steps (growth {most} per step)"
    if all(f.training.get("compiled") and not f.compiles.get("in_steps") for f in facts):
        yield "torch.compile: no graph was made after the warm-up"
    f = facts[0]
    if f.machine.get("threads") and f.machine.get("cores") and not oversubscribed(f):
        each = " in each rank" if f.local_ranks > 1 else ""
        yield f"threads: {f.machine['threads']}{each}, for {count(f.machine['cores'], 'core')}"
    cost = hooks_cost(f)
    if cost is not None and cost <= COST_SAID:
        yield f"the doctor's own cost: {100 * cost:.2g} % of a step"


def _little(bound: Estimate, by: str) -> str:
    if by == FROM_PARTS:
        return f"at most {bound} as fast, by arithmetic"
    if bound.low <= 1 <= bound.high:
        return f"no difference that this run can show ({bound})"
    return f"at most {bound} as fast" if bound.value > 1 else f"slower ({bound})"


def unknown(facts: list[Facts]) -> list[str]:
    """What this run cannot tell, what was not tried and why, and what the doctor never sees."""
    seen = with_steps(facts)
    texts = [*_no_exchange(seen), *(_unclear(seen) if seen else ()), *(_beside_the_device(seen) if seen else ())]
    texts += _models(seen[0]) if seen else ()
    texts += [*(text for f in facts for text in f.unseen), *_not_tried(facts)]
    return list(dict.fromkeys([*texts, *(causes.NEVER_SEEN if seen else ())]))


def _no_exchange(facts: Sequence[Facts]) -> Iterator[str]:
    """Of ranks that seem to train for themselves: what they exchange may be hidden, in a library or in DTensors."""
    wrapped = any(f.training.get(how) for f in facts for how in ("ddp", "fsdp"))
    if len(facts) < 2 or wrapped or any(part_s(f, "exchange") for f in facts):
        return
    yield (
        f"whether {count(len(facts), 'rank')} train one model: no exchange between them was seen in these steps, no "
        "DistributedDataParallel, no fully_shard and no call of torch.distributed. Without one each trains its own"
    )


def _models(facts: Facts) -> Iterator[str]:
    """Where they run, if not by a call that the hooks see."""
    lines = [n for n in facts.lines if n.kind == "model"]
    if lines:
        where = next((f" ({os.path.basename(n.file)}:{n.line})" for n in lines if n.line), "")
        yield (
            f"what models cost that no optimizer trains, or whose forward() is called by name{where}: "
            f"{ms(sum(n.ms for n in lines) / 1e3)} of '{causes.PARTS['prepare']}'"
        )


def _beside_the_device(facts: Sequence[Facts]) -> Iterator[str]:
    """What parts of a step are worth, where the device works beside the host."""
    if not part_s(facts[0], "device"):
        return
    rounds = bounds.beside_s(facts)
    without = f", without that wait it takes {ms(statistics.median(rounds))}" if rounds else ""
    yield (
        "which of a step's parts the device's work hides: at the end of each of these steps the doctor waits for the "
        f"device, as the script does not. Such a step takes {ms(mean_step_s(facts))} on average{without}"
    )


def _unclear(facts: Sequence[Facts]) -> Iterator[str]:
    unclear = [(c.mode or c.name, bound, by) for c, bound, by, _ in _judged(facts) if _standing(bound, by) == "unclear"]
    late = lateness(facts)
    if late is not None and standing(late.bound) == "unclear":
        unclear.append(("ranks as fast as each other", late.bound, late.by))
    by_reason: dict[str, list[str]] = {}
    for mode, bound, by in unclear:
        by_reason.setdefault(_cannot_tell(bound, by, facts[0]), []).append(f"{mode} {bound}")
    for why, modes in by_reason.items():
        yield f"{why}: {', '.join(modes)}"
    if bounds.split(facts):
        yield _split(facts)
    for f in facts:
        if _fills(f) and _not_by_tensors(f):
            whose = f" of rank {f.rank}" if len(facts) > 1 else ""
            yield (
                f"why the process{whose} grows by {memory_growth(f)} with each step: its tensors do not. It may be "
                "the C library, which settles: --steps 300 tells more"
            )
            break
    cost = hooks_cost(facts[0])
    if cost is not None and cost > COST_SAID:
        yield f"the doctor's hooks take {100 * cost:.0f} % of so short a step: its parts look longer than they are"
    if not all(bounds.enough(memory_growth(f)) for f in facts):
        yield f"whether memory grows: {count(min(len(f.step_s) for f in facts), 'step')} do not tell"


def _split(facts: Sequence[Facts]) -> str:
    waits = [part_s(f, "exchange") for f in facts]
    return (
        "whether a rank is late, and what exchange costs: ranks hold different parts of the model, or weights of their "
        f"own, so that each does other work and waits for others; of a step's {ms(mean_step_s(facts))} they wait "
        f"{ms(min(waits))} to {ms(max(waits))} in calls that send and receive. Stages of equal times wait least"
    )


def _cannot_tell(bound: Estimate, by: str, facts: Facts) -> str:
    if not bounds.enough(bound):
        few = f"{count(bound.n, 'round' if by == IN_TURN else 'step')} are too few for an interval"
        return few + (f" ({_ended_before(facts)})" if by == IN_TURN and facts.stage != "done" else "")
    if by == FROM_PARTS:
        return "too rare or too unsteady in these steps to say what it costs (--steps 200 tells)"
    if bound.low > 1 or bound.high < 1:
        return f"a difference, too small or too unsteady to say what it is worth ({_narrower(bound.n, facts)})"
    return f"no difference that this run can show, but too much noise to call it none ({_narrower(bound.n, facts)})"


def _narrower(rounds: int, facts: Facts) -> str:
    """What makes an interval narrower. Four times the rounds halve it; more than MOST_ROUNDS are never taken."""
    if rounds >= MOST_ROUNDS or not facts.seconds:
        return f"{rounds} rounds were taken: a machine with nothing else to do tells more"
    more = math.ceil(facts.seconds * min(4.0, MOST_ROUNDS / rounds))
    return f"--seconds {more} tells more, best with nothing else on this machine"


def _not_tried(facts: Sequence[Facts]) -> Iterator[str]:
    seen, modes = with_steps(facts), {}
    # One rank may print and another not: what the first one's printing is worth is told, and that there is none is not
    gone = {mode for f in facts for mode in f.gone}
    priced = gone & {cause.mode for cause, *_ in (_judged(seen) if seen else ())}
    for f in facts:
        for mode, why in (f.not_tried | f.left_out).items():
            if mode not in priced and mode not in modes.setdefault(why, []):
                modes[why].append(mode)
    if seen:
        for mode in _never_reached(facts, {mode for names in modes.values() for mode in names}):
            modes.setdefault(_ended_before(_first_to_end(facts)), []).append(mode)
    if modes:
        yield "not tried: " + "; ".join(f"{', '.join(names)} ({why})" for why, names in modes.items())
    if facts and facts[0].seconds == 0:
        yield "what any cure gives: no counterfactual was to be tried (without --seconds 0 they are)"


def _never_reached(facts: Sequence[Facts], told: set[str]) -> list[str]:
    """Counterfactuals without a round that all ranks have taken, and of which no reason is known."""
    left = {name for f in facts for name in not_reached(f)}
    left |= {name for f in facts for name in f.turns_s if name != AS_IS and not bounds.pairs_s(facts, name)}
    planned = dict.fromkeys(name for f in facts for name in (*f.planned, *f.turns_s))
    over = any(f.stage != "done" or f.ended != "done" for f in facts)
    return [name for name in planned if name in left - told] if over else []


def _first_to_end(facts: Sequence[Facts]) -> Facts:
    """The rank that ended the run: of several the one that neither failed for another's sake nor was ended by us."""
    early = [f for f in facts if f.ended != "done"] or list(facts)
    return min(early, key=lambda f: (f.steps, f.ended not in ("exit", "killed", "stopped"), f.rank))


def _ended_before(facts: Facts) -> str:
    """Why a run was over before the counterfactuals' turn, and what to type."""
    steps = count(facts.steps, "step")
    rank = f" of rank {facts.rank}" if facts.ranks > 1 else ""
    longer = "let it train longer, or look at less: --steps 10 --only NAME"
    return {
        "script ended": f"the script{rank} ended after {steps}: {longer}",
        "exit": f"the script{rank} left after {steps}: {longer}",
        "error": f"the script{rank} failed after {steps}",
        "silent": f"the script{rank} took no step for too long after {steps}: --patience N waits longer",
    }.get(facts.ended, f"the run{rank} was ended after {steps}")


def hooks_cost(facts: Facts) -> float | None:
    """Share of a step that the doctor's own calls take, but for its wait for a device; None if it is not known."""
    if not facts.step_s or "s" not in facts.cost:
        return None
    return facts.cost["s"] / statistics.median(facts.step_s)


# Words


def mean_step_s(facts: Sequence[Facts]) -> float:
    """Of the job as it is. Parts are means too: some slow steps may make one of them longer than the median step."""
    return statistics.fmean(bounds.steps_s(facts))


def ms(seconds: float) -> str:
    """0.0123 -> "12.3 ms", in the unit that fits."""
    return str(Estimate(seconds, seconds, seconds, 1, "s")).split(" [")[0]


def count(n: float, noun: str) -> str:
    """ "1 step", "2 steps"."""
    return f"{n:g} {noun}{'' if n == 1 else 's'}"
