"""Verdicts of notebook 03 on time: speed-up, efficiency, start-up, and the articles' own table of seconds."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Sequence

from labs import crossover, data_parallel
from labs.common import models
from labs.common.sources.published import rtx_4090_epochs
from labs.common.timing.collectives import LatencyBandwidth, fit
from labs.common.timing.roofline import training_step_work
from labs.kit.claims import Verdict, cannot_tell, depends, in_general, judged, only_on, verdict
from labs.kit.measure import Estimate, paired_ratio, unpaired_ratio
from labs.kit.record import Records

MOSTLY, MORE = 0.5, 0.05  # of the differences between speed-ups: explained by both, and more than by one of the two


def launched(evidence: Records, lab: str, **config: object) -> Records:
    """Records of `lab` whose config holds these values; LookupError when that launch is missing."""
    found = Records(r for r in evidence if r.lab == lab and all(r.config.get(k) == v for k, v in config.items()))
    if not len(found):
        raise LookupError(f"launch({lab!r}{''.join(f', {k}={v!r}' for k, v in config.items())}) has not been run")
    return found


def ranks_of(records: Records) -> int:
    """World size of a launch."""
    return records[0].layout["world_size"]


def mapped(evidence: Records) -> Records:
    """The map of models and batches. LookupError if it was not made, or on one rank, which is no faster than itself."""
    run = launched(evidence, "crossover")
    if ranks_of(run) < 2:
        raise LookupError("launch('crossover') on at least 2 ranks is needed")
    return run


@verdict("A02")
def _(evidence: Records) -> Verdict:
    step = launched(evidence, "data_parallel", model="mlp").one("step_s", mode="single")
    stated = rtx_4090_epochs()[0].value
    ratio = stated / step.value
    word = "does not hold" if ratio > 100 else "depends"
    return Verdict(
        word,
        f"an 'epoch' of the listing is one step: {1e3 * step.value:.1f} ms on one device here, "
        f"{ratio:,.0f} times less than the table's {stated} s",
    )


@verdict("A13")
def _(evidence: Records) -> Verdict:
    steps, n = {}, 0
    for model in ("mlp", "cnn"):
        with contextlib.suppress(LookupError):
            weak = launched(evidence, "data_parallel", split="weak", model=model)
            n = ranks_of(weak)
            ddp, single = weak.one("step_s", mode="ddp", ranks=n), weak.one("step_s", mode="single")
            steps[model] = paired_ratio(ddp.samples, single.samples)
    passes = {model: ratio.scaled(1 / n) for model, ratio in steps.items()}
    readings = [*steps.values(), *passes.values()]  # an epoch is a step, as in the listing; or a pass over a dataset
    if not readings:
        raise LookupError("launch('data_parallel', split='weak') of 'mlp' or 'cnn' has not been run")
    step, whole = (", ".join(f"{r} ({model})" for model, r in by.items()) for by in (steps, passes))
    return judged(
        [r.high < 1 for r in readings],
        [r.low > 1 for r in readings],
        f"with a batch of its own on each of {n} ranks a step takes {step} as long, and a step is what the "
        f"listing calls an epoch; a pass over a fixed dataset has {n} times fewer of them, and takes "
        f"{whole} as long",
    )


@verdict("A17")
def _(evidence: Records) -> Verdict:
    step = launched(evidence, "data_parallel", model="mlp", split="weak").one("step_s", mode="single")
    flop = training_step_work(models.mlp(), step.case["batch_per_rank"]).flop
    stated = rtx_4090_epochs()[0].value
    word = "does not hold" if flop / step.value > 100 * flop / stated else "depends"
    return Verdict(
        word,
        f"the listing's epoch is {flop / 1e6:.0f} MFLOP: {flop / stated / 1e6:.0f} MFLOP/s on a card, "
        f"if it took {stated} s; one device here reaches {flop / step.value / 1e6:,.0f}",
    )


@verdict("A20")
def _(evidence: Records) -> Verdict:
    run = mapped(evidence)
    cells = [r["measured"] for r in crossover.crossover_map(run)]
    least, most = (f(cells, key=lambda c: c.value) for f in (min, max))
    return judged(
        [c.low > 1 for c in cells],
        [c.high < 1 for c in cells],
        f"DDP on {ranks_of(run)} ranks trains {least} to {most} as fast as one rank, by model and batch"
        f"{only_on(run, 'MLPs')}",
    )


@verdict("A21")
def _(evidence: Records) -> Verdict:
    rows = crossover.crossover_map(mapped(evidence))
    lost, gained = sum(r["measured"].high < 1 for r in rows), sum(r["measured"].low > 1 for r in rows)
    because = f"in {lost} of {len(rows)} cells of the map more ranks are slower than one: measure, then choose"
    if lost:
        return Verdict("holds", because)
    return depends(gained == len(rows), because)


@verdict("B03")
def _(evidence: Records) -> Verdict:
    run = mapped(evidence)
    cells = [r["measured"] for r in crossover.crossover_map(run)]
    shares = [explained(run, *of) for of in ((True, True), (True, False), (False, True))]
    (both, *others), (alone, *_), (link, *_) = shares
    because = (
        f"a step's computing and the link explain {both:.0%} of the differences between {len(cells)} speed-ups, "
        f"{min(others):.0%} to {max(others):.0%} with one left out; without the link's bandwidth {alone:.0%}, "
        f"without the computing {link:.0%}{only_on(run, 'MLPs')}"
    )
    if min(c.high for c in cells) >= max(c.low for c in cells):
        return cannot_tell(f"no speed-up of the map surely differs from another; {because}")
    right = [both > max(MOSTLY, alone + MORE, link + MORE) for both, alone, link in zip(*shares, strict=True)]
    if any(right) and not all(right):
        return cannot_tell(f"one speed-up decides; {because}")
    return Verdict("holds" if all(right) else "depends", because)


def explained(run: Records, computing: bool, bandwidth: bool) -> list[float]:
    """Share of the variance of log speed-ups over the map that `crossover.predict` explains from these two; 0 if less.

    First of the whole map, then with each of its cells left out: how much hangs on one.
    Without `computing` every step is taken for the median one, without `bandwidth` a message costs its latency only.
    """
    sizes, rows = run.where("all_reduce_s"), crossover.crossover_map(run)
    link = fit([r.case["size"] for r in sizes], [r.value for r in sizes])
    cases = [{k: row[k] for k in ("width", "batch", "gradient_bytes")} for row in rows]
    steps = [run.one("step_s", mode="single", **case).value for case in cases]
    usual, link = statistics.median(steps), link if bandwidth else LatencyBandwidth(link.latency_s, math.inf)
    found = [
        crossover.predict(s if computing else usual, case["gradient_bytes"], link, ranks_of(run))
        for s, case in zip(steps, cases, strict=True)
    ]
    measured = [math.log(row["measured"].value) for row in rows]
    left = [m - math.log(p) for m, p in zip(measured, found, strict=True)]
    return [_share(measured, left), *(_share(_but(measured, i), _but(left, i)) for i in range(len(measured)))]


def _but(numbers: Sequence[float], i: int) -> list[float]:
    return [*numbers[:i], *numbers[i + 1 :]]


def _share(numbers: Sequence[float], left: Sequence[float]) -> float:
    variance = statistics.pvariance(numbers) if len(numbers) > 1 else 0.0
    return max(0.0, 1 - statistics.pvariance(left) / variance) if variance else 0.0


@verdict("B46")
def _(evidence: Records) -> Verdict:
    run = launched(evidence, "data_parallel", split="weak", model="cnn")
    n = ranks_of(run)
    cells = [r["measured"].scaled(100 / n) for r in crossover.crossover_map(mapped(evidence))]
    found = [data_parallel.speedups(run)["ddp", n].scaled(100 / n, "%"), *cells]
    return in_general(
        [e.low >= 90 for e in found],
        [e.high < 90 for e in found],
        f"scaling efficiency on {n} ranks: {found[0]} for the CNN, {min(e.value for e in cells):.0f} to "
        f"{max(e.value for e in cells):.0f} % over the map. Utilisation is another quantity",
    )


@verdict("C27")
def _(evidence: Records) -> Verdict:
    run = mapped(evidence)
    n, rows = ranks_of(run), sorted(crossover.crossover_map(run), key=lambda r: r["batch"])
    widths = {w: [r["measured"] for r in rows if r["width"] == w] for w in sorted({r["width"] for r in rows})}
    if any(len(by_batch) < 2 for by_batch in widths.values()):
        raise LookupError("launch('crossover') with at least two batches is needed")
    ends = [(by_batch[0], by_batch[-1]) for by_batch in widths.values()]
    half = n / 2  # at half of the ideal speed-up exchanging and waiting take as long as computing
    high = [small.high < half for small, _ in ends]
    grows = [unpaired_ratio(large, small) for small, large in ends]  # more speed-up: the rest is less of a step
    wrong = [small.low > half or g.high < 1 for (small, _), g in zip(ends, grows, strict=True)]
    said = [
        f"{_beside(small, n)} with the smallest batch, {_beside(large, n)} with the largest (width {w})"
        for w, (small, large) in zip(widths, ends, strict=True)
    ]
    shown = all(high) and any(g.low > 1 for g in grows) and not any(g.high < 1 for g in grows)
    because = f"beside computing a DDP step spends {'; '.join(dict.fromkeys((said[0], said[-1])))}"
    if shown or all(wrong):
        return Verdict("holds" if shown else "does not hold", because)
    return depends(any(wrong), because)


def _beside(speedup: Estimate, ranks: int) -> str:
    """What a step on so many ranks takes beside one rank's step, in % of it."""
    shares = (100 * (1 - x / ranks) for x in (speedup.value, speedup.high, speedup.low))
    return str(Estimate(*shares, speedup.n, "%"))


@verdict("E14")
def _(evidence: Records) -> Verdict:
    runs = [launched(evidence, "data_parallel", split="weak", model=model) for model in ("cnn", "mlp")]
    cnn, mlp = map(dp_over_ddp, runs)
    because = f"DataParallel's step takes {cnn} as long as DDP's with a CNN, {mlp} with an MLP"
    if runs[0][0].layout["device"] != "cuda":
        return Verdict("needs N GPUs", f"as threads on {ranks_of(runs[0])} CPU cores {because}")
    if min(cnn.low, mlp.low) > 1:
        return Verdict("does not hold", because)
    return depends(min(cnn.high, mlp.high) < 1, because)


def dp_over_ddp(run: Records) -> Estimate:
    """Step time of DataParallel over that of DDP on as many ranks, in turn."""
    dp, ddp = (run.one("step_s", mode=mode, ranks=ranks_of(run)) for mode in ("dp", "ddp"))
    return paired_ratio(dp.samples, ddp.samples)
