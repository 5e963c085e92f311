"""Verdicts of notebook 07: records and documentation on the articles' advice on communication."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from labs import bucket_overlap, gradient_compression, slow_link
from labs.common import models
from labs.common.communication.wire import NO_PACE
from labs.gradient_compression.compression import WAYS
from labs.kit.claims import Verdict, depends, in_general, judged, last, size, verdict
from labs.kit.measure import Estimate, estimate
from labs.kit.record import Record, Records

STATED = 10  # percent of the bytes that B18 leaves
FLAT = 1.05  # up to which two numbers are the same
MATTERS = 5.0  # % of a step
SAME = 1.02  # bytes on the wire that are equal but for headers


def speeds(evidence: Records) -> dict[str, dict[float, Estimate]]:
    """{model: {bandwidth in MB/s: speed-up of DDP}} of the last run of each model. LookupError without one."""
    runs = {r.config["model"]: r.config for r in evidence if r.lab == "slow_link"}
    if not runs:
        raise LookupError("no launch('slow_link') here")
    found = {}
    for model in runs:
        run = last(Records(r for r in evidence if r.config.get("model") == model), "slow_link", "step_s")
        found[model] = {m: e for m, e in slow_link.speedups(run).items() if m != NO_PACE}
    return found


def spread(evidence: Records) -> tuple[list[bool], list[bool], str]:
    """Of each model: does its speed-up surely differ between wires, is it surely the same; and the numbers in words."""
    differ, same, told = [], [], []
    for model, by in speeds(evidence).items():
        low, high = (f(by.items(), key=lambda item: item[1].value) for f in (min, max))
        differ.append(low[1].high < high[1].low)
        same.append(high[1].high < FLAT * low[1].low)
        told.append(f"{model} {low[1]} at {low[0]:g} MB/s, {high[1]} at {high[0]:g} MB/s")
    return differ, same, "; ".join(told)


@verdict("A19")
def _(evidence: Records) -> Verdict:
    differ, same, told = spread(evidence)
    because = f"The same devices over other wires: {told}. The line names its cards, not the links between them."
    return in_general(same, differ, because)


def exchanged(evidence: Records) -> tuple[list[bool], list[bool], str, str]:
    """Of each model's gradients: does the time of an all-reduce surely change with the wire, surely not; in words.

    And the kind of the numbers: "modelled" where a wire was acted out, which waits by the ring's formula.
    """
    changes, same, told, kind = [], [], [], "measured"
    for model in speeds(evidence):
        run = last(Records(r for r in evidence if r.config.get("model") == model), "slow_link", "all_reduce_s")
        by = {
            r.case["mb_s"]: r for r in run.where("all_reduce_s") if r.kind != "modelled" and r.case["mb_s"] != NO_PACE
        }
        if not by:
            raise LookupError(f"launch('slow_link') of {model!r} set no wire to a bandwidth")
        slow, fast = (estimate(by[mb_s].samples, "s") for mb_s in (min(by), max(by)))
        changes.append(slow.low > fast.high)
        same.append(slow.high < FLAT * fast.low)
        told.append(f"{size(by[max(by)].case['size'])} take {fast} at {max(by):g} MB/s, {slow} at {min(by):g} MB/s")
        kind = "modelled" if len(run.where("acted_out")) else kind
    return changes, same, "; ".join(told), kind


@verdict("B06")
def _(evidence: Records) -> Verdict:
    changes, same, told, kind = exchanged(evidence)
    emulated = " The wire is an emulated one." if kind == "modelled" else ""
    return in_general(
        same,
        changes,
        "An all-reduce between the same devices, with the same memory and arithmetic: "
        f"{told}.{emulated} For the speed-up of a whole step arithmetic counts, too. The same line also "
        "names the bandwidth between GPUs, rightly.",
        kind,
    )


@verdict("C14")
def _(evidence: Records) -> Verdict:
    differ, same, told = spread(evidence)
    n = next(r for r in evidence if r.lab == "slow_link").layout["world_size"]
    check = "As a check of how many ranks have met, it is right."
    if any(differ):  # one model whose speed-up follows the wire is enough
        other = f"The number of ranks is {n} on every wire; the speed-up is not: {told}. {check}"
        return Verdict("does not hold", other)
    # equal speed-ups would not make the number of ranks a measure of them
    return depends(all(same), f"The number of ranks is {n} on every wire, the speed-up {told}. {check}")


@verdict("B18")
def _(evidence: Records) -> Verdict:
    run = last(evidence, "gradient_compression", "sent_bytes", way="powersgd_1")
    whole, *ways = ("fp32", *sorted({w for r in run if (w := r.case.get("way", "")).startswith("powersgd")}))
    sent = {way: max(_counted(run, way)) for way in (whole, *ways)}
    left = {way: 100 * sent[way] / sent[whole] for way in ways}
    slower = [way for way in ways if any(e.high < 1 for e in gradient_compression.gains(run).get(way, {}).values())]
    more = f" {' and '.join(slower)}: steps are slower on some wires, all the same." if slower else ""
    told = ", ".join(f"{way} {share:.1f} %" for way, share in left.items())
    forms = left_by_form()
    model, way = max(forms, key=lambda case: forms[case])
    least, most = min(forms.values()), forms[model, way]
    because = (
        f"Of DDP's bytes for the {run[0].config['model']}, counted on the wire, are left: {told}. By the closed "
        f"form it depends on rank and shapes: {least:.1f} to {most:.0f} % ({model}, {way}).{_price(run)}{more}"
    )
    if all(s > STATED for s in left.values()):
        return Verdict("does not hold", because)
    counted = all(s <= STATED for s in left.values())
    if counted and most > STATED:
        return Verdict("depends", because, "modelled")
    return Verdict("holds" if counted else "depends", because)


@cache
def left_by_form() -> dict[tuple[str, str], float]:
    """{(model of the course, rank of PowerSGD): % of DDP's bytes that are left}, by closed form, with two ranks."""
    found = {}
    for model in models.MODELS:
        parameters = list(models.build(model, 0).module.parameters())
        whole = WAYS["fp32"].sent_bytes(parameters, 2)
        for way in (w for w in WAYS if w.startswith("powersgd")):
            found[model, way] = 100 * WAYS[way].sent_bytes(parameters, 2) / whole
    return found


def _price(run: Records) -> str:
    """Which rank of PowerSGD is shown to learn less, in words; empty if none is, or nothing was trained."""
    if not len(run.where("accuracy")):
        return ""
    lost = {w: e for w, e in gradient_compression.losses(run).items() if w.startswith("powersgd") and e.high < 0}
    return "".join(f" {way} costs accuracy: {e}." for way, e in lost.items())


def _counted(run: Records, way: str) -> tuple[float, ...]:
    found = [r for r in run.where("sent_bytes", way=way) if r.kind != "modelled"]
    if not found:
        raise LookupError(f"the bytes of {way} were not counted on this system")
    return found[0].samples


@verdict("B19")
def _(evidence: Records) -> Verdict:
    there = last(evidence, "gradient_compression", "interface_exists").one("interface_exists")
    word_ = "holds" if there.value else "does not hold"
    return Verdict(
        word_,
        f"{there.case['name']} {'exists' if there.value else 'does not exist'} in this torch. "
        "PowerSGD is switched on by register_comm_hook.",
    )


@verdict("C16")
def _(evidence: Records) -> Verdict:
    run = last(evidence, "gradient_compression", "autocast_sent_bytes")
    ratio = max(run.one("autocast_sent_bytes").samples) / max(_counted(run, "fp32"))
    half = (
        f" The FP16 hook: {max(_counted(run, 'fp16')) / max(_counted(run, 'fp32')):.2f} times."
        if len(run.where("sent_bytes", way="fp16"))
        else ""
    )
    word_ = "holds" if ratio < 1 / SAME else "does not hold"
    return Verdict(word_, f"Under autocast DDP sends {ratio:.2f} times the bytes that it sends without.{half}")


@verdict("C23")
def _(evidence: Records) -> Verdict:
    run = last(evidence, "bucket_overlap", "step_s")
    best, _, _ = bucket_overlap.best_worst(run)
    cost = bucket_overlap.exposed(run)[best]
    mb_s = run.one("step_s", synchronise=False).case["mb_s"]
    because = (
        f"At {mb_s:g} MB/s with the best buckets, exchanging makes up {cost} of a step. Between nodes, which the "
        "statement is about above all, nothing was measured: that half is open."
    )
    found = judged([cost.low > MATTERS], [cost.high < MATTERS], because)
    return replace(found, word="depends") if found.word == "holds" else found


NCCL_OR_GLOO = (
    "python -m labs.all_reduce_anatomy --device cuda --out nccl.jsonl, then --device cuda-shared --out gloo.jsonl"
)
"""On two GPUs: NCCL between them, and gloo for two ranks that share the first."""


def nccl_against_gloo(evidence: Records) -> Verdict | None:
    """Is an all-reduce between ranks on GPUs faster with NCCL than with gloo? None until both ran.

    Of the largest size that both were given.
    """
    by_size: dict[str, dict[int, Record]] = {"nccl": {}, "gloo": {}}
    for r in evidence.where("seconds", op="all_reduce"):
        if r.lab == "all_reduce_anatomy" and r.layout["device"] == "cuda" and r.layout["world_size"] > 1:
            by_size["nccl" if "nccl" in r.layout["backend"] else "gloo"][r.case["size"]] = r
    both = by_size["nccl"].keys() & by_size["gloo"].keys()
    if not both:
        return None
    nccl, gloo = (estimate(of[max(both)].samples, "s") for of in by_size.values())
    because = (
        f"An all-reduce of {size(max(both))} takes {nccl} with NCCL between GPUs, {gloo} with gloo "
        "(two ranks on one GPU)."
    )
    return judged([nccl.high < gloo.low], [gloo.high < nccl.low], because)


@verdict("B17")
def _(evidence: Records) -> Verdict:
    if found := nccl_against_gloo(evidence):
        return found
    return Verdict(
        "holds",
        "PyTorch's documentation of torch.distributed has it as a rule of thumb: NCCL for GPUs, "
        f"gloo for CPUs. To measure it on 2 GPUs: {NCCL_OR_GLOO}.",
        "published",
    )


@verdict("D13")
def _(evidence: Records) -> Verdict:
    if found := nccl_against_gloo(evidence):
        return found
    return Verdict("needs N GPUs", f"Which is the best, a measurement tells: {NCCL_OR_GLOO}.", "")
