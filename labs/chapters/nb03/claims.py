"""Verdicts of notebook 03: what its records say of the articles' statements on data parallelism."""

from __future__ import annotations

from labs.chapters.nb03.claims_scaling import launched, ranks_of  # and the verdicts there
from labs.kit.claims import Verdict, verdict
from labs.kit.measure import estimate
from labs.kit.record import Records


@verdict("A01")
def _(evidence: Records) -> Verdict:
    facts = launched(evidence, "ddp_facts")
    held, model = (facts.one("parameters", where=w).value for w in ("smallest rank", "model"))
    word = "does not hold" if held == model else "holds"
    return Verdict(word, f"every rank holds all {held:,.0f} of {model:,.0f} parameters: replicated, not split")


@verdict("A04")
def _(evidence: Records) -> Verdict:
    n = launched(evidence, "ddp_facts").one("parameters", where="model").value
    return Verdict("holds", f"it trains; {n:,.0f} parameters, {4 * n / 1e6:.2f} MB of FP32 gradients per step")


@verdict("A08")
def _(evidence: Records) -> Verdict:
    r = launched(evidence, "ddp_facts").one("device_ids_refused", device_ids="1 device(s)")
    if r.layout["device"] == "cuda":
        return Verdict("does not hold" if r.value else "holds", f"one entry on a GPU: error {r.case['error']}")
    return Verdict("depends", f"on a CPU module it must be None: {r.case['error']}; on GPUs see the documentation")


@verdict("A09")
def _(evidence: Records) -> Verdict:
    r = launched(evidence, "ddp_training").one("raised", case="setup_twice")
    return Verdict("does not hold" if r.value else "holds", r.case["error"])


@verdict("A11")
def _(evidence: Records) -> Verdict:
    spread = launched(evidence, "ddp_facts").one("parameter_spread", when="after 5 steps").value
    word = "holds" if spread == 0 else "does not hold"
    return Verdict(word, f"after 5 steps of Adam the ranks' parameters differ by {spread:g}")


@verdict("A12")
def _(evidence: Records) -> Verdict:
    steps = launched(evidence, "ddp_training").one("steps_per_epoch", case="ddp").value
    return Verdict("does not hold", f"one pass over the images here is {steps:.0f} steps; the listing has no dataset")


@verdict("A14")
def _(evidence: Records) -> Verdict:
    facts = launched(evidence, "ddp_facts")
    losses, floor = facts.one("random_label_loss").samples, facts.one("random_label_floor").value
    last = estimate(losses[len(losses) // 2 :], "nats")
    return Verdict("does not hold" if last.high > floor - 0.05 else "holds",
                   f"random labels: loss {last.value:.3f} after {len(losses)} steps; ln 10 = {floor:.3f}")  # fmt: skip


@verdict("A15")
def _(evidence: Records) -> Verdict:
    loss = launched(evidence, "ddp_training").one("loss", case="ddp").samples
    start, end = estimate(loss[:8]).value, estimate(loss[-8:]).value
    return Verdict("holds" if end < start else "does not hold", f"so trained, the loss falls: {start:.2f} to {end:.2f}")


@verdict("A16")
def _(evidence: Records) -> Verdict:
    local = launched(evidence, "ddp_facts").one("last_loss").samples
    said = ", ".join(f"{x:.3f}" for x in local)
    word = "does not hold" if len(set(local)) > 1 else "depends"
    return Verdict(word, f"each rank prints the loss of its own rows: {said}; the job's is their mean")


@verdict("B01")
def _(evidence: Records) -> Verdict:
    facts = launched(evidence, "ddp_facts")
    before, after, later = (
        facts.one("parameter_spread", when=w).value for w in ("before DDP", "after DDP", "after 5 steps")
    )
    word = "depends" if before > after == later == 0 else "does not hold"
    return Verdict(word, f"parameters once: they differ by {before:.2g} before DDP, {after:g} after its constructor, "
                         f"{later:g} five steps later; after that only gradients travel")  # fmt: skip


@verdict("B02")
def _(evidence: Records) -> Verdict:
    facts = launched(evidence, "ddp_facts")
    plain, view = (facts.one("bucket_bytes", gradient_as_bucket_view=v).value for v in (False, True))
    return Verdict("depends", "parameters, gradients, optimizer state, activations and DDP's buckets: these alone add "
                              f"{plain / 1e6:.2f} MB here, {view / 1e6:.2f} with gradient_as_bucket_view")  # fmt: skip


@verdict("B26")
def _(evidence: Records) -> Verdict:
    facts = launched(evidence, "ddp_facts")
    even, slow = facts.where("step_s_of_fastest_rank")
    spread = facts.one("parameter_spread", when=f"slow {slow.case['slow_ms'] / 1e3:g}").value
    word = "depends" if spread == 0 else "holds"  # the half about versions stays open
    return Verdict(word, f"unequal ranks train one model: all steps take {1e3 * slow.value:.0f} ms beside one rank"
                   f" that is {slow.case['slow_ms']:.0f} ms slower ({1e3 * even.value:.0f} ms without); replicas differ"
                   f" by {spread:g}. Unequal versions were not tried: NCCL refuses another NCCL")  # fmt: skip


@verdict("B34")
def _(evidence: Records) -> Verdict:
    run = launched(evidence, "gradient_accumulation")
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
    plain, norm = (parity.one("gradient_relative_error", model=m, dtype="float64", sync_batchnorm=False).value
                   for m in ("cnn", "cnn_batchnorm"))  # fmt: skip
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
        word, f"each rank passes {given} rows to DDP, and its forward sees {rows[0]:.0f}: the sampler splits"
    )


@verdict("D12")
def _(evidence: Records) -> Verdict:
    best = launched(evidence, "ddp_facts").one("relu_mse", output="the best possible, >= 0").value
    return Verdict(
        "does not hold", f"no non-negative output gets below {best:.2f}; half of the labels are out of reach"
    )


@verdict("E15")
def _(evidence: Records) -> Verdict:
    run = launched(evidence, "data_parallel", split="weak", model="cnn")
    if ranks_of(run) == 1:
        raise LookupError("needs a launch of data_parallel on at least 2 ranks")
    moved = run.one("bytes_per_step", way="dp replicate")
    where = "" if moved.layout["device"] == "cuda" else " (its algorithm, on CPU threads)"
    return Verdict("holds" if moved.value > 0 else "does not hold",
                   f"at every step, not once: {moved.value / 1e6:.2f} MB per step for the CNN{where}")  # fmt: skip
