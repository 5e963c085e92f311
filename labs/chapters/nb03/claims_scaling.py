"""Verdicts of notebook 03 on time: speed-up, efficiency, start-up, and the articles' own table of seconds."""

from __future__ import annotations

import itertools
import math

from labs import crossover, data_parallel
from labs.kit.claims import Verdict, verdict, word
from labs.kit.measure import paired_ratio
from labs.kit.record import Records
from labs.parts import models
from labs.parts.sources.published import rtx_3090_images, rtx_4090_epochs
from labs.parts.timing.roofline import training_step_work

NOTICED_S = 0.1  # J. Nielsen, Usability Engineering (1993), chapter 5: up to here an answer seems instantaneous


def launched(evidence: Records, lab: str, **config: object) -> Records:
    """Records of `lab` whose config holds these values; LookupError when that launch is missing."""
    found = Records(r for r in evidence if r.lab == lab and all(r.config.get(k) == v for k, v in config.items()))
    if not len(found):
        raise LookupError(f"launch({lab!r}{''.join(f', {k}={v!r}' for k, v in config.items())}) has not been run")
    return found


def ranks_of(records: Records) -> int:
    """World size of a launch."""
    return records[0].layout["world_size"]


@verdict("A02")
def _(evidence: Records) -> Verdict:
    step = launched(evidence, "data_parallel", model="mlp").one("step_s", mode="single")
    stated = rtx_4090_epochs()[0].value
    ratio = stated / step.value
    word = "does not hold" if ratio > 100 else "depends"
    return Verdict(word, f"an 'epoch' of the listing is one step: {1e3 * step.value:.1f} ms on one device here, "
                         f"{ratio:,.0f} times less than the table's {stated} s")  # fmt: skip


@verdict("A13")
def _(evidence: Records) -> Verdict:
    weak = launched(evidence, "data_parallel", split="weak", model="mlp")
    n = ranks_of(weak)
    ratio = paired_ratio(weak.one("step_s", mode="ddp", ranks=n).samples, weak.one("step_s", mode="single").samples)
    readings = (ratio, ratio.scaled(1 / n))  # an epoch is one step, as in the listing; or one pass over a fixed dataset
    decided = word([r.high < 1 for r in readings], [r.low > 1 for r in readings])
    return Verdict(decided, f"with a batch of its own on each of {n} ranks a step takes {ratio} as long, and a step is "
                            f"what the listing calls an epoch; a pass over a fixed dataset has {n} times fewer of "
                            f"them, and takes {readings[1]} as long")  # fmt: skip


@verdict("A17")
def _(evidence: Records) -> Verdict:
    step = launched(evidence, "data_parallel", model="mlp", split="weak").one("step_s", mode="single")
    flop = training_step_work(models.mlp(), step.case["batch_per_rank"]).flop
    stated = rtx_4090_epochs()[0].value
    word = "does not hold" if flop / step.value > 100 * flop / stated else "depends"
    return Verdict(word, f"the listing's epoch is {flop / 1e6:.0f} MFLOP: {flop / stated / 1e6:.0f} MFLOP/s on a card, "
                         f"if it took {stated} s; one device here reaches {flop / step.value / 1e6:,.0f}")  # fmt: skip


@verdict("A18")
def _(evidence: Records) -> Verdict:
    """`evidence` is not asked: both tables are published ones."""
    times, rates = (
        [r.value for r in rtx_4090_epochs()],
        rtx_3090_images().where("images_per_s", model="VGG-16", batch=64),
    )
    gains = [a / b for a, b in itertools.pairwise(times)], [b.value / a.value for a, b in itertools.pairwise(rates)]
    every = [all(g > 1 for g in table) for table in gains]
    return Verdict(word(every, [not e for e in every]),
                   f"time: in that table the last card still gains {gains[0][-1]:.2f} x; in another, VGG-16 on RTX "
                   f"3090, 8 cards do {gains[1][-1]:.2f} times the work of 4. Cost: {times[0]:.1f} to "
                   f"{len(times) * times[-1]:.1f} GPU-seconds per epoch", "published")  # fmt: skip


@verdict("A20")
def _(evidence: Records) -> Verdict:
    cells = [r["measured"] for r in crossover.crossover_map(launched(evidence, "crossover"))]
    least, most = (f(c.value for c in cells) for f in (min, max))
    return Verdict(word([c.low > 1 for c in cells], [c.high < 1 for c in cells]),
                   f"DDP trains {least:.2f} to {most:.2f} times as fast as one rank, by model and batch")  # fmt: skip


@verdict("A21")
def _(evidence: Records) -> Verdict:
    rows = crossover.crossover_map(launched(evidence, "crossover"))
    lost = sum(r["measured"].high < 1 for r in rows)
    word = "holds" if lost else "depends"
    return Verdict(
        word,
        f"in {lost} of {len(rows)} cells of the map more ranks are slower than one: measure, then choose",
    )


@verdict("A28")
def _(evidence: Records) -> Verdict:
    warm = sum(r.value for r in launched(evidence, "data_parallel", split="weak", model="mlp").where("startup_s"))
    # a fork server has torch loaded: a short start of ours says nothing of torchrun's, which imports it in every rank
    return Verdict("holds" if warm > NOTICED_S else "depends",
                   f"{warm:.2f} s here with torch loaded already, which torchrun must do first. Up to "
                   f"{NOTICED_S:g} s seem instantaneous (Nielsen 1993)")  # fmt: skip


@verdict("A29")
def _(evidence: Records) -> Verdict:
    said, epochs = [], []
    for model in ("mlp", "cnn"):
        run = launched(evidence, "data_parallel", split="weak", model=model)
        epochs.append(found := data_parallel.break_even_epochs(run))
        unclear = "cannot be told" if math.isinf(found.high) else f"{found} epochs"
        said.append(f"{model}: {'never' if math.isinf(found.low) else unclear}")
        if found.value and math.isfinite(found.value):
            start_s = sum(r.value for r in run.where("startup_s"))
            said[-1] += f", and after 10 with a start of {start_s * 10 / found.value:.3g} s in place of {start_s:.2g} s"
    # our fork server has torch loaded, a start by torchrun takes longer: a short one of ours refutes nothing
    return Verdict("holds" if all(e.low > 10 for e in epochs) else "depends",
                   f"start-up is earned back on 60,000 samples after: {'; '.join(said)}")  # fmt: skip


@verdict("B03")
def _(evidence: Records) -> Verdict:
    rows = crossover.crossover_map(launched(evidence, "crossover"))
    right = sum((r["measured"].value > 1) == (r["modelled"] > 1) for r in rows)
    faster = sum(r["measured"].value > 1 for r in rows)
    commoner = max(faster, len(rows) - faster)  # what one names who knows neither
    return Verdict("holds" if right > commoner else "depends",
                   f"a model of these two alone names the faster side in {right} of {len(rows)} cells; always naming "
                   f"the commoner one would name {commoner}")  # fmt: skip


@verdict("B46")
def _(evidence: Records) -> Verdict:
    run = launched(evidence, "data_parallel", split="weak", model="cnn")
    n = ranks_of(run)
    cells = [r["measured"].scaled(100 / n) for r in crossover.crossover_map(launched(evidence, "crossover"))]
    found = [data_parallel.speedups(run)["ddp", n].scaled(100 / n, "%"), *cells]
    return Verdict(word([e.low >= 90 for e in found], [e.high < 90 for e in found]),
                   f"scaling efficiency on {n} ranks: {found[0]} for the CNN, {min(e.value for e in cells):.0f} to "
                   f"{max(e.value for e in cells):.0f} % over the map. Utilisation is another quantity")  # fmt: skip


@verdict("C27")
def _(evidence: Records) -> Verdict:
    rows = crossover.crossover_map(launched(evidence, "crossover"))
    widest = max(r["width"] for r in rows)
    by_batch = [r["measured"] for r in sorted(rows, key=lambda r: r["batch"]) if r["width"] == widest]
    least, most = by_batch[0], by_batch[-1]
    return Verdict(word([least.high < most.low], [least.low > most.high]),
                   f"width {widest}: {least} with the smallest batch, {most} with the largest")  # fmt: skip


@verdict("E14")
def _(evidence: Records) -> Verdict:
    run = launched(evidence, "data_parallel", split="weak", model="cnn")
    n = ranks_of(run)
    dp, ddp = (run.one("step_s", mode=mode, ranks=n) for mode in ("dp", "ddp"))
    ratio = paired_ratio(dp.samples, ddp.samples)
    if dp.layout["device"] != "cuda":
        return Verdict("needs N GPUs", f"as threads on {n} CPU cores its step takes {ratio} as long as DDP's")
    return Verdict("does not hold" if ratio.low > 1 else "depends", f"its step takes {ratio} as long as DDP's")
