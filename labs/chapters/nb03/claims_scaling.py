"""Verdicts of notebook 03 on time: speed-up, efficiency, start-up, and the articles' own table of seconds."""

from __future__ import annotations

import math

from labs import crossover, data_parallel
from labs.kit.claims import Verdict, verdict
from labs.kit.measure import paired_ratio
from labs.kit.record import Records
from labs.parts.data_parallel import scaling
from labs.parts.sources.published import rtx_4090_epochs

FLOP_PER_PARAMETER_AND_SAMPLE = 6  # forward 2, backward 4


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
    word = "does not hold" if ratio.low > 1 else "depends"
    return Verdict(word, f"with a fixed batch per rank a step takes {ratio} as long on {n} ranks")


@verdict("A17")
def _(evidence: Records) -> Verdict:
    times = {r.case["ranks"]: r.value for r in rtx_4090_epochs()}
    params = launched(evidence, "ddp_facts").one("parameters", where="model").value
    flop = FLOP_PER_PARAMETER_AND_SAMPLE * params * 64
    fit = scaling.fit_amdahl(list(times), list(times.values()))
    return Verdict("does not hold", f"the listing's epoch is {flop / 1e6:.0f} MFLOP: at 12.5 s that is "
                   f"{flop / 12.5 / 1e6:.0f} MFLOP/s. As a shape it is plausible: Amdahl's fit has {fit.serial:.2f} s "
                   "serial, but a ring all-reduce fits as well", "published")  # fmt: skip


@verdict("A18")
def _(evidence: Records) -> Verdict:
    times = [r.value for r in rtx_4090_epochs()]
    return Verdict("depends", f"the fourth card gains {times[2] / times[3]:.2f} x in time; the cost rises from "
                   f"{times[0]:.1f} to {4 * times[3]:.1f} GPU-seconds", "published")  # fmt: skip


@verdict("A20")
def _(evidence: Records) -> Verdict:
    cells = [r["measured"].value for r in crossover.crossover_map(launched(evidence, "crossover"))]
    return _depends_on_cells(cells, "DDP trains")


def _depends_on_cells(cells: list[float], what: str) -> Verdict:
    word = "depends" if min(cells) < 1 < max(cells) else "holds" if min(cells) > 1 else "does not hold"
    return Verdict(word, f"{what} {min(cells):.2f} to {max(cells):.2f} times as fast as one rank, by model and batch")


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
    run = launched(evidence, "data_parallel", split="weak", model="mlp")
    total, step = _startup(run), run.one("step_s", mode="ddp", ranks=ranks_of(run)).value
    word = "holds" if total > step else "does not hold"
    return Verdict(
        word, f"{total:.2f} s here with torch already loaded, as long as {total / step:.0f} steps of the MLP"
    )


def _startup(run: Records) -> float:
    """Seconds of all start-up phases of the first launch among `run`."""
    phases: dict[str, float] = {}
    for r in run.where("startup_s"):
        phases.setdefault(r.case["phase"], r.value)
    return sum(phases.values())


@verdict("A29")
def _(evidence: Records) -> Verdict:
    said = []
    for model in ("mlp", "cnn"):
        run = launched(evidence, "data_parallel", split="weak", model=model)
        n = ranks_of(run)
        single, ddp = run.one("step_s", mode="single"), run.one("step_s", mode="ddp", ranks=n)
        b = single.case["batch_per_rank"]
        epochs = scaling.break_even_epochs(_startup(run), 6e4 / b * single.value, 6e4 / b / n * ddp.value)
        said.append(f"{model}: never" if math.isinf(epochs) else f"{model}: {epochs:.2f} epochs")
    return Verdict("depends", f"start-up is earned back on 60,000 samples after: {'; '.join(said)}")


@verdict("B03")
def _(evidence: Records) -> Verdict:
    rows = crossover.crossover_map(launched(evidence, "crossover"))
    right = sum((r["measured"].value > 1) == (r["modelled"] > 1) for r in rows)
    word = "holds" if right >= 0.75 * len(rows) else "depends"
    return Verdict(word, f"a model of these two alone names the faster side in {right} of {len(rows)} cells")


@verdict("B46")
def _(evidence: Records) -> Verdict:
    run = launched(evidence, "data_parallel", split="weak", model="cnn")
    n = ranks_of(run)
    share = data_parallel.speedups(run)["ddp", n].scaled(100 / n, "%")
    cells = [100 * r["measured"].value / n for r in crossover.crossover_map(launched(evidence, "crossover"))]
    word = "does not hold" if min(cells) < 90 else "holds"
    return Verdict(word, f"scaling efficiency on {n} ranks: {share} for the CNN, {min(cells):.0f} to {max(cells):.0f} %"
                         " over the map; 'utilisation' is another quantity")  # fmt: skip


@verdict("C27")
def _(evidence: Records) -> Verdict:
    rows = crossover.crossover_map(launched(evidence, "crossover"))
    widest = max(r["width"] for r in rows)
    by_batch = [r["measured"].value for r in sorted(rows, key=lambda r: r["batch"]) if r["width"] == widest]
    word = "holds" if by_batch[0] < by_batch[-1] else "does not hold"
    return Verdict(
        word,
        f"width {widest}: {by_batch[0]:.2f} x with the smallest batch, {by_batch[-1]:.2f} x with the largest",
    )


@verdict("E14")
def _(evidence: Records) -> Verdict:
    run = launched(evidence, "data_parallel", split="weak", model="cnn")
    n = ranks_of(run)
    dp, ddp = (run.one("step_s", mode=mode, ranks=n) for mode in ("dp", "ddp"))
    ratio = paired_ratio(dp.samples, ddp.samples)
    if dp.layout["device"] != "cuda":
        return Verdict("needs N GPUs", f"as threads on {n} CPU cores its step takes {ratio} as long as DDP's")
    return Verdict("does not hold" if ratio.low > 1 else "depends", f"its step takes {ratio} as long as DDP's")
