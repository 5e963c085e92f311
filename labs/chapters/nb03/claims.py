"""Verdicts of notebook 03: what its records say of the articles' statements on data parallelism."""

from __future__ import annotations

import inspect

from torch import nn

from labs.chapters.nb03.claims_scaling import launched, ranks_of  # and the verdicts there
from labs.kit.claims import GAIN, Verdict, ends, judged, verdict
from labs.kit.measure import estimate, paired_ratio
from labs.kit.record import Records


def facts_of_ranks(evidence: Records) -> Records:
    """labs.ddp_facts on several ranks. LookupError for one, which is equal to itself."""
    facts = launched(evidence, "ddp_facts")
    if ranks_of(facts) < 2:
        raise LookupError("launch('ddp_facts') on at least 2 ranks is needed")
    return facts


@verdict("A01")
def _(evidence: Records) -> Verdict:
    facts = facts_of_ranks(evidence)
    held, model = (facts.one("parameters", where=w).value for w in ("smallest rank", "model"))
    word = "does not hold" if held == model else "holds"
    return Verdict(word, f"every rank holds all {held:,.0f} of {model:,.0f} parameters: replicated, not split")


@verdict("A04")
def _(evidence: Records) -> Verdict:
    facts = launched(evidence, "ddp_facts")
    losses, n = facts.one("learnable_loss").samples, facts.one("parameters", where="model").value
    start, end = estimate(losses[:8]), estimate(losses[-8:])
    because = (
        f"labels that follow a rule: loss {start.value:.2f} to {end.value:.2f}; {n:,.0f} parameters, "
        f"{4 * n / 1e6:.2f} MB of FP32 gradients per step"
    )
    return judged([end.high < start.low], [end.low > start.high], because)


@verdict("A05")
def _(evidence: Records) -> Verdict:
    r = launched(evidence, "ddp_facts").one("module_level_runs")
    word = "does not hold" if r.value > 1 else "holds"
    return Verdict(
        word,
        f"with {r.case['workers']:.0f} spawned workers a line at module level ran in {r.value:.0f} "
        "processes. On GPUs each of them would put a model and a CUDA context on GPU 0",
    )


@verdict("A08")
def _(evidence: Records) -> Verdict:
    r = launched(evidence, "ddp_facts").one("device_ids_refused", device_ids="1 device(s)")
    if r.layout["device"] == "cuda":
        return Verdict("does not hold" if r.value else "holds", f"one entry on a GPU: error {r.case['error']}")
    said = f"DDP refuses it: {r.case['error']}" if r.value else "DDP takes it"
    return Verdict("needs N GPUs", f"the claim is about GPUs; with a CPU module {said}")


@verdict("A09")
def _(evidence: Records) -> Verdict:
    r = launched(evidence, "ddp_training").one("raised", case="setup_twice")
    return Verdict("does not hold" if r.value else "holds", r.case["error"])


@verdict("A11")
def _(evidence: Records) -> Verdict:
    spread = facts_of_ranks(evidence).one("parameter_spread", when="after 5 steps").value
    word = "holds" if spread == 0 else "does not hold"
    return Verdict(word, f"after 5 steps of Adam the ranks' parameters differ by {spread:g}")


@verdict("A12")
def _(evidence: Records) -> Verdict:
    steps = launched(evidence, "ddp_training").one("steps_per_epoch", case="ddp").value
    word = "does not hold" if steps > 1 else "depends"
    return Verdict(word, f"one pass over the images here is {steps:.0f} steps; the listing has no dataset")


@verdict("A14")
def _(evidence: Records) -> Verdict:
    facts = launched(evidence, "ddp_facts")
    losses, floor = facts.one("random_label_loss").samples, facts.one("random_label_floor").value
    last, falls = estimate(losses[len(losses) // 2 :], "nats"), floor - 0.05
    return judged(
        [last.high <= falls],
        [last.low > falls],
        f"random labels: median loss {last.value:.3f} over the last half of {len(losses)} steps; ln 10 = {floor:.3f}",
    )


@verdict("A15")
def _(evidence: Records) -> Verdict:
    loss = launched(evidence, "ddp_training").one("loss", case="ddp").samples
    start, end = estimate(loss[:8]), estimate(loss[-8:])
    because = f"so trained, the loss goes from {start.value:.2f} to {end.value:.2f}"
    return judged([end.high < start.low], [end.low > start.high], because)


@verdict("A16")
def _(evidence: Records) -> Verdict:
    facts = launched(evidence, "ddp_facts")
    local, (read, unread) = facts.one("last_loss").samples, facts.where("step_s_by_item")
    cost = paired_ratio(read.samples, unread.samples)
    free = "costs time" if cost.low > 1 else "costs nothing that this run can show"
    if cost.high < 1:  # reading takes no time away: something else differed
        free = "was timed as a gain, which it cannot be: this run cannot tell what it costs"
    if len(set(local)) > 1 or cost.low > 1:
        word = "does not hold"
    else:
        word = "holds" if 1 <= cost.high < GAIN else "depends"
        free += " (this run cannot tell more)" if word == "depends" and cost.high >= 1 else ""
    return Verdict(
        word,
        f"each rank prints the loss of its own rows: {', '.join(f'{x:.3f}' for x in local)}. "
        f"Reading it {free} on this device: steps take {cost} as long",
    )


@verdict("A26")
def _(evidence: Records) -> Verdict:
    facts = facts_of_ranks(evidence)
    held, model = (facts.one("parameters", where=w).value for w in ("smallest rank", "model"))
    even = held == model and len(set(facts.one("rows_in_forward").samples)) == 1
    gathered = sum(r.value for r in evidence.where("bytes_per_step", way="dp gather"))
    on_gpus = any(
        r.layout["device"] == "cuda" for r in evidence.where("step_s", mode="dp")
    )  # nothing counts bytes there
    uneven = gathered or (on_gpus and documented("output_device"))
    word = "holds" if not even else "depends" if uneven else "does not hold"
    dp = " Under DataParallel all outputs and the optimizer's state are on device 0." if uneven else ""
    return Verdict(
        word,
        f"counted, not weighed: under DDP each rank holds {held:,.0f} of {model:,.0f} parameters and "
        f"works on {'as many' if even else 'other numbers of'} rows.{dp} What is uneven beside that, "
        "nvidia-smi shows on GPUs",
    )


@verdict("B01")
def _(evidence: Records) -> Verdict:
    facts = facts_of_ranks(evidence)
    before, after, later = (
        facts.one("parameter_spread", when=w).value for w in ("before DDP", "after DDP", "after 5 steps")
    )
    sent = facts.one("broadcasts_per_step", model="cnn_batchnorm", sync_buffers=True).value
    word = "depends" if before > after == later == 0 else "does not hold"
    return Verdict(
        word,
        f"parameters once: the ranks differ by {before:.2g} before DDP, {after:g} after its "
        f"constructor, {later:g} five steps later. In each step gradients, and {sent:g} broadcasts "
        "of buffers where a model has BatchNorm",
    )


@verdict("B02")
def _(evidence: Records) -> Verdict:
    held = launched(evidence, "ddp_facts").where("held_bytes")
    parts = [[r for r in held if r.case["gradient_as_bucket_view"] is view and r.value] for view in (False, True)]
    counts = {len(p) for p in parts}
    word = "holds" if counts == {3} else "does not hold" if 3 not in counts else "depends"
    return Verdict(
        word,
        f"{ends([str(n) for n in sorted(counts)])} parts here, by gradient_as_bucket_view and "
        "optimizer (Adam without it, SGD with it; MB, the first): "
        + ", ".join(f"{r.case['part']} {r.value / 1e6:.2f}" for r in parts[0]),
    )


@verdict("B26")
def _(evidence: Records) -> Verdict:
    facts = launched(evidence, "ddp_facts")
    even, slow = facts.where("step_s_of_fastest_rank")
    spread = facts.one("parameter_spread", when=f"slow {slow.case['slow_ms'] / 1e3:g}").value
    word = "depends" if spread == 0 else "holds"  # whether versions may differ, no run here tells
    return Verdict(
        word,
        f"ranks of unequal speed train one model: beside one that is {slow.case['slow_ms']:.0f} ms "
        f"slower a step takes {1e3 * slow.value:.0f} ms ({1e3 * even.value:.0f} without), and replicas "
        f"differ by {spread:g}. Unequal cards and versions were not tried",
    )


@verdict("B34")
def _(evidence: Records) -> Verdict:
    run = launched(evidence, "gradient_accumulation")
    right, wrong = (run.one("gradient_scale", way=w).value for w in ("no_sync", "loss_not_divided"))
    reduces = [run.one("all_reduces_per_step", way=w).value for w in ("no_sync", "sync_every")]
    batch = run.where("step_s")[0].case["effective_batch"]
    word = "holds" if abs(wrong - 1) < 1e-3 else "depends" if abs(right - 1) < 1e-3 else "does not hold"
    return Verdict(
        word,
        f"effective batch = micro-batch x m x ranks, {batch} here, if the loss is divided by m (otherwise the gradient"
        f" is {wrong:.1f} times as long, not {right:.1f}); no_sync saves {reduces[1] - reduces[0]:.0f} of"
        f" {reduces[1]:.0f} all-reduces",
    )


@verdict("B36")
def _(evidence: Records) -> Verdict:
    r = launched(evidence, "ddp_facts").one("device_ids_refused", device_ids="4 device(s)")
    return Verdict("does not hold" if r.value else "holds", r.case["error"])


@verdict("B37")
def _(evidence: Records) -> Verdict:
    training = launched(evidence, "ddp_training")
    same = training.one("same_order_next_epoch", case="no_set_epoch").value
    return Verdict("depends" if same else "holds", "it splits; without set_epoch every epoch has the same order")


@verdict("D07")
def _(evidence: Records) -> Verdict:
    parity = launched(evidence, "ddp_parity")
    plain, norm = (
        parity.one("gradient_relative_error", model=m, dtype="float64", sync_batchnorm=False).value
        for m in ("cnn", "cnn_batchnorm")
    )
    word = "holds" if plain < 1e-6 else "does not hold"
    return Verdict(
        word, f"the averaged gradient is the whole batch's to {plain:.0e}; with BatchNorm to {norm:.0e} only"
    )


@verdict("D08")
@verdict("E13")
def _(evidence: Records) -> Verdict:
    facts = launched(evidence, "ddp_facts")
    rows, given = facts.one("rows_in_forward").samples, facts[0].config["batch_size"]
    word = "does not hold" if all(r == given for r in rows) else "holds"
    return Verdict(
        word, f"each rank passes {given} rows to DDP, and its forward sees {rows[0]:.0f}: DDP splits nothing"
    )


@verdict("D12")
def _(evidence: Records) -> Verdict:
    facts = launched(evidence, "ddp_facts")
    best, idle = (facts.one("relu_mse", output=o).value for o in ("the best possible, >= 0", "always 0"))
    word = "does not hold" if best > 0.1 * idle else "holds"
    return Verdict(
        word,
        f"the best output without negative numbers has an error of {best:.2f}, one that is always 0 "
        f"of {idle:.2f}: {best / idle:.0%} of the error cannot be trained away",
    )


@verdict("E15")
def _(evidence: Records) -> Verdict:
    run = launched(evidence, "data_parallel", split="weak", model="cnn")
    if ranks_of(run) == 1:
        raise LookupError("needs a launch of data_parallel on at least 2 ranks")
    if run[0].layout["device"] == "cuda":  # torch's own replicas: nothing counts their bytes
        says = documented("replicated")
        if not says:
            raise LookupError("nothing counts bytes between GPUs, and torch's documentation speaks of no replicas")
        return Verdict(
            "holds",
            f'torch\'s documentation: "{says}". So at every step, not once; nothing counts bytes '
            "between GPUs here, a profile shows the broadcast",
            "published",
        )
    moved = run.one("bytes_per_step", way="dp replicate")
    return Verdict(
        "holds" if moved.value > 0 else "does not hold",
        f"at every step, not once: {moved.value / 1e6:.2f} MB per step for the CNN (its algorithm, on CPU threads)",
    )


def documented(term: str) -> str:
    """The first sentence in which torch's documentation of nn.DataParallel uses this word; empty if none does."""
    sentences = " ".join((inspect.getdoc(nn.DataParallel) or "").split()).split(". ")
    return next((s for s in sentences if term in s), "")
