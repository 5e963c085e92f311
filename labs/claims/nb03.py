"""Verdicts of notebook 03: what its records say of the articles' statements on data parallelism."""

from __future__ import annotations

import math

from labs import crossover, data_parallel, scaling
from labs.claims import Verdict, verdict
from labs.kit.measure import estimate, paired_ratio
from labs.kit.record import Records
from labs.published import rtx_4090_epochs

FLOP_PER_PARAMETER_AND_SAMPLE = 6  # forward 2, backward 4


def _of(evidence: Records, lab: str, **config: object) -> Records:
    """Records of `lab` whose config holds these values; LookupError when that launch is missing."""
    found = Records(r for r in evidence if r.lab == lab and all(r.config.get(k) == v for k, v in config.items()))
    if not len(found):
        raise LookupError(f"launch({lab!r}{''.join(f', {k}={v!r}' for k, v in config.items())}) has not been run")
    return found


def _ranks(records: Records) -> int:
    return records[0].layout["world_size"]


@verdict("A01")
def _(evidence: Records) -> Verdict:
    facts = _of(evidence, "ddp_facts")
    held, model = (facts.one("parameters", where=w).value for w in ("smallest rank", "model"))
    word = "does not hold" if held == model else "holds"
    return Verdict(word, f"every rank holds all {held:,.0f} of {model:,.0f} parameters: replicated, not split")


@verdict("A02")
def _(evidence: Records) -> Verdict:
    step = _of(evidence, "data_parallel", model="mlp").one("step_s", mode="single")
    stated = rtx_4090_epochs()[0].value
    ratio = stated / step.value
    word = "does not hold" if ratio > 100 else "depends"
    return Verdict(word, f"an 'epoch' of the listing is one step: {1e3 * step.value:.1f} ms on one device here, "
                         f"{ratio:,.0f} times less than the table's {stated} s")  # fmt: skip


@verdict("A04")
def _(evidence: Records) -> Verdict:
    n = _of(evidence, "ddp_facts").one("parameters", where="model").value
    return Verdict("holds", f"it trains; {n:,.0f} parameters, {4 * n / 1e6:.2f} MB of FP32 gradients per step")


@verdict("A08")
def _(evidence: Records) -> Verdict:
    r = _of(evidence, "ddp_facts").one("device_ids_refused", device_ids="1 device(s)")
    if r.layout["device"] == "cuda":
        return Verdict("does not hold" if r.value else "holds", f"one entry on a GPU: error {r.case['error']}")
    return Verdict("depends", f"on a CPU module it must be None: {r.case['error']}; on GPUs see the documentation")


@verdict("A09")
def _(evidence: Records) -> Verdict:
    r = _of(evidence, "ddp_training").one("raised", case="setup_twice")
    return Verdict("does not hold" if r.value else "holds", r.case["error"])


@verdict("A11")
def _(evidence: Records) -> Verdict:
    spread = _of(evidence, "ddp_facts").one("parameter_spread", when="after 5 steps").value
    word = "holds" if spread == 0 else "does not hold"
    return Verdict(word, f"after 5 steps of Adam the ranks' parameters differ by {spread:g}")


@verdict("A12")
def _(evidence: Records) -> Verdict:
    steps = _of(evidence, "ddp_training").one("steps_per_epoch", case="ddp").value
    return Verdict("does not hold", f"one pass over the images here is {steps:.0f} steps; the listing has no data set")


@verdict("A13")
def _(evidence: Records) -> Verdict:
    weak = _of(evidence, "data_parallel", split="weak", model="mlp")
    n = _ranks(weak)
    ratio = paired_ratio(weak.one("step_s", mode="ddp", ranks=n).samples, weak.one("step_s", mode="single").samples)
    word = "does not hold" if ratio.low > 1 else "depends"
    return Verdict(word, f"with a fixed batch per rank a step takes {ratio} as long on {n} ranks")


@verdict("A14")
def _(evidence: Records) -> Verdict:
    facts = _of(evidence, "ddp_facts")
    losses, floor = facts.one("random_label_loss").samples, facts.one("random_label_floor").value
    last = estimate(losses[len(losses) // 2 :], "nats")
    return Verdict("does not hold" if last.high > floor - 0.05 else "holds",
                   f"random labels: loss {last.value:.3f} after {len(losses)} steps; ln 10 = {floor:.3f}")  # fmt: skip


@verdict("A15")
def _(evidence: Records) -> Verdict:
    loss = _of(evidence, "ddp_training").one("loss", case="ddp").samples
    start, end = estimate(loss[:8]).value, estimate(loss[-8:]).value
    return Verdict("holds" if end < start else "does not hold", f"so trained, the loss falls: {start:.2f} to {end:.2f}")


@verdict("A16")
def _(evidence: Records) -> Verdict:
    local = _of(evidence, "ddp_facts").one("last_loss").samples
    said = ", ".join(f"{x:.3f}" for x in local)
    word = "does not hold" if len(set(local)) > 1 else "depends"
    return Verdict(word, f"each rank prints the loss of its own rows: {said}; the job's is their mean")


@verdict("A17")
def _(evidence: Records) -> Verdict:
    times = {r.case["ranks"]: r.value for r in rtx_4090_epochs()}
    params = _of(evidence, "ddp_facts").one("parameters", where="model").value
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
    cells = [r["measured"].value for r in crossover.crossover_map(_of(evidence, "crossover"))]
    return _depends_on_cells(cells, "DDP trains")


def _depends_on_cells(cells: list[float], what: str) -> Verdict:
    word = "depends" if min(cells) < 1 < max(cells) else "holds" if min(cells) > 1 else "does not hold"
    return Verdict(word, f"{what} {min(cells):.2f} to {max(cells):.2f} times as fast as one rank, by model and batch")


@verdict("A21")
def _(evidence: Records) -> Verdict:
    rows = crossover.crossover_map(_of(evidence, "crossover"))
    lost = sum(r["measured"].high < 1 for r in rows)
    word = "holds" if lost else "depends"
    return Verdict(
        word,
        f"in {lost} of {len(rows)} cells of the map more ranks are slower than one: measure, then choose",
    )


@verdict("A28")
def _(evidence: Records) -> Verdict:
    run = _of(evidence, "data_parallel", split="weak", model="mlp")
    total, step = _startup(run), run.one("step_s", mode="ddp", ranks=_ranks(run)).value
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
        run = _of(evidence, "data_parallel", split="weak", model=model)
        n = _ranks(run)
        single, ddp = run.one("step_s", mode="single"), run.one("step_s", mode="ddp", ranks=n)
        b = single.case["batch_per_rank"]
        epochs = scaling.break_even_epochs(_startup(run), 6e4 / b * single.value, 6e4 / b / n * ddp.value)
        said.append(f"{model}: never" if math.isinf(epochs) else f"{model}: {epochs:.2f} epochs")
    return Verdict("depends", f"start-up is earned back on 60,000 samples after: {'; '.join(said)}")


@verdict("B01")
def _(evidence: Records) -> Verdict:
    facts = _of(evidence, "ddp_facts")
    before, after, later = (
        facts.one("parameter_spread", when=w).value for w in ("before DDP", "after DDP", "after 5 steps")
    )
    word = "depends" if before > after == later == 0 else "does not hold"
    return Verdict(word, f"parameters once: they differ by {before:.2g} before DDP, {after:g} after its constructor, "
                         f"{later:g} five steps later; after that only gradients travel")  # fmt: skip


@verdict("B02")
def _(evidence: Records) -> Verdict:
    facts = _of(evidence, "ddp_facts")
    plain, view = (facts.one("bucket_bytes", gradient_as_bucket_view=v).value for v in (False, True))
    return Verdict("depends", "parameters, gradients, optimizer state, activations and DDP's buckets: these alone add "
                              f"{plain / 1e6:.2f} MB here, {view / 1e6:.2f} with gradient_as_bucket_view")  # fmt: skip


@verdict("B03")
def _(evidence: Records) -> Verdict:
    rows = crossover.crossover_map(_of(evidence, "crossover"))
    right = sum((r["measured"].value > 1) == (r["modelled"] > 1) for r in rows)
    word = "holds" if right >= 0.75 * len(rows) else "depends"
    return Verdict(word, f"a model of these two alone names the faster side in {right} of {len(rows)} cells")


@verdict("B26")
def _(evidence: Records) -> Verdict:
    facts = _of(evidence, "ddp_facts")
    even, slow = facts.where("step_s_of_fastest_rank")
    spread = facts.one("parameter_spread", when=f"slow {slow.case['slow_ms'] / 1e3:g}").value
    word = "does not hold" if spread == 0 else "depends"
    return Verdict(word, f"unequal ranks train one model: all steps take {1e3 * slow.value:.0f} ms beside one rank"
                   f" that is {slow.case['slow_ms']:.0f} ms slower ({1e3 * even.value:.0f} ms without); replicas differ"
                   f" by {spread:g}")  # fmt: skip


@verdict("B34")
def _(evidence: Records) -> Verdict:
    run = _of(evidence, "gradient_accumulation")
    right, wrong = (run.one("gradient_scale", way=w).value for w in ("no_sync", "loss_not_divided"))
    reduces = [run.one("all_reduces_per_step", way=w).value for w in ("no_sync", "sync_every")]
    batch = run.where("step_s")[0].case["effective_batch"]
    return Verdict(
        "depends",
        f"effective batch = micro-batch x m x ranks, {batch} here, if the loss is divided by m (otherwise the gradient"
        f" is {wrong:.1f} times as long, not {right:.1f}); no_sync saves {reduces[1] - reduces[0]:.0f} of"
        f" {reduces[1]:.0f} all-reduces",
    )


@verdict("B36")
def _(evidence: Records) -> Verdict:
    r = _of(evidence, "ddp_facts").one("device_ids_refused", device_ids="4 device(s)")
    return Verdict("does not hold" if r.value else "holds", r.case["error"])


@verdict("B37")
def _(evidence: Records) -> Verdict:
    training = _of(evidence, "ddp_training")
    same = training.one("same_order_next_epoch", case="no_set_epoch").value
    return Verdict("depends" if same else "holds", "it splits; without set_epoch every epoch has the same order")


@verdict("B46")
def _(evidence: Records) -> Verdict:
    run = _of(evidence, "data_parallel", split="weak", model="cnn")
    n = _ranks(run)
    share = data_parallel.speedups(run)["ddp", n].scaled(100 / n, "%")
    cells = [100 * r["measured"].value / n for r in crossover.crossover_map(_of(evidence, "crossover"))]
    word = "does not hold" if min(cells) < 90 else "holds"
    return Verdict(word, f"scaling efficiency on {n} ranks: {share} for the CNN, {min(cells):.0f} to {max(cells):.0f} %"
                         " over the map; 'utilisation' is another quantity")  # fmt: skip


@verdict("C27")
def _(evidence: Records) -> Verdict:
    rows = crossover.crossover_map(_of(evidence, "crossover"))
    widest = max(r["width"] for r in rows)
    by_batch = [r["measured"].value for r in sorted(rows, key=lambda r: r["batch"]) if r["width"] == widest]
    word = "holds" if by_batch[0] < by_batch[-1] else "does not hold"
    return Verdict(
        word,
        f"width {widest}: {by_batch[0]:.2f} x with the smallest batch, {by_batch[-1]:.2f} x with the largest",
    )


@verdict("D07")
def _(evidence: Records) -> Verdict:
    parity = _of(evidence, "ddp_parity")
    plain, norm = (parity.one("gradient_relative_error", model=m, dtype="float64", sync_batchnorm=False).value
                   for m in ("cnn", "cnn_batchnorm"))  # fmt: skip
    word = "holds" if plain < 1e-6 else "does not hold"
    return Verdict(
        word, f"the averaged gradient is the whole batch's to {plain:.0e}; with BatchNorm to {norm:.0e} only"
    )


@verdict("D08")
@verdict("E13")
def _(evidence: Records) -> Verdict:
    facts = _of(evidence, "ddp_facts")
    rows, given = facts.one("rows_in_forward").samples, facts[0].config["batch_size"]
    word = "does not hold" if all(r == given for r in rows) else "holds"
    return Verdict(
        word, f"each rank passes {given} rows to DDP, and its forward sees {rows[0]:.0f}: the sampler splits"
    )


@verdict("D12")
def _(evidence: Records) -> Verdict:
    best = _of(evidence, "ddp_facts").one("relu_mse", output="the best possible, >= 0").value
    return Verdict(
        "does not hold", f"no non-negative output gets below {best:.2f}; half of the labels are out of reach"
    )


@verdict("E14")
def _(evidence: Records) -> Verdict:
    run = _of(evidence, "data_parallel", split="weak", model="cnn")
    n = _ranks(run)
    dp, ddp = (run.one("step_s", mode=mode, ranks=n) for mode in ("dp", "ddp"))
    ratio = paired_ratio(dp.samples, ddp.samples)
    if dp.layout["device"] != "cuda":
        return Verdict("needs N GPUs", f"as threads on {n} CPU cores its step takes {ratio} as long as DDP's")
    return Verdict("does not hold" if ratio.low > 1 else "depends", f"its step takes {ratio} as long as DDP's")


@verdict("E15")
def _(evidence: Records) -> Verdict:
    run = _of(evidence, "data_parallel", split="weak", model="cnn")
    if _ranks(run) == 1:
        raise LookupError("needs a launch of data_parallel on at least 2 ranks")
    moved = run.one("bytes_per_step", way="dp replicate")
    where = "" if moved.layout["device"] == "cuda" else " (its algorithm, on CPU threads)"
    return Verdict("holds" if moved.value > 0 else "does not hold",
                   f"at every step, not once: {moved.value / 1e6:.2f} MB per step for the CNN{where}")  # fmt: skip
