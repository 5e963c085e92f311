"""Verdicts of notebook 03: what its records say of the articles' statements on data parallelism."""

from __future__ import annotations

import inspect

from torch import nn

from labs.chapters.nb03.claims_scaling import launched, ranks_of  # and the verdicts there
from labs.kit.claims import Verdict, judged, verdict
from labs.kit.measure import estimate
from labs.kit.record import Records


@verdict("A09")
def _(evidence: Records) -> Verdict:
    r = launched(evidence, "ddp_training").one("raised", case="setup_twice")
    return Verdict("does not hold" if r.value else "holds", r.case["error"])


@verdict("A12")
def _(evidence: Records) -> Verdict:
    steps = launched(evidence, "ddp_training").one("steps_per_epoch", case="ddp").value
    word = "does not hold" if steps > 1 else "depends"
    return Verdict(word, f"one pass over the images here is {steps:.0f} steps; the listing has no dataset")


@verdict("A15")
def _(evidence: Records) -> Verdict:
    loss = launched(evidence, "ddp_training").one("loss", case="ddp").samples
    start, end = estimate(loss[:8]), estimate(loss[-8:])
    because = f"so trained, the loss goes from {start.value:.2f} to {end.value:.2f}"
    return judged([end.high < start.low], [end.low > start.high], because)


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
