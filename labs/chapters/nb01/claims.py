"""Verdicts of notebook 01: what its records say of the articles' statements on timing, utilisation and batch size."""

from __future__ import annotations

from labs.chapters.nb01 import claims_method as method
from labs.kit.claims import (
    GAIN,
    Verdict,
    cannot_tell,
    depends,
    judged,
    last,
    model_of,
    only_on,
    percent,
    runs,
    verdict,
    within,
)
from labs.kit.measure import differs, estimate, paired_ratio
from labs.kit.record import Records


@verdict("A25")
@verdict("C13")
def _(evidence: Records) -> Verdict:
    run = last(evidence, "utilisation", "busy_share")
    found = method.jobs(run)
    said = f"{found.said} of the best rate seen {method.counter(run)}"
    if found.slow:
        return Verdict("depends", said)
    return cannot_tell(said) if found.untold else Verdict("holds", said)


@verdict("E26")
def _(evidence: Records) -> Verdict:
    run = last(evidence, "utilisation", "busy_share", job="waiting for data")
    slow, idle, untold, _ = method.jobs(run)
    waiting, full = (percent(run.one("busy_share", job=job)) for job in ("waiting for data", "large products"))
    wait = f"busy {waiting}"
    if "waiting for data" not in idle and waiting.low < method.BUSY * full.value:
        return cannot_tell(f"whether a planted wait for data shows: {wait} {method.counter(run)}")
    if "waiting for data" not in idle:
        return Verdict("does not hold", f"a planted wait for data does not show: {wait} {method.counter(run)}")
    if untold and not slow:
        wait = f"whether these look busy at less than a tenth of the speed: {', '.join(untold)}; {wait}"
        return cannot_tell(f"{wait} while a planted wait for data shows {method.counter(run)}")
    back = f"; but at less than a tenth of the speed these look busy: {', '.join(slow)}" if slow else ""
    return Verdict("depends" if slow else "holds", f"a planted wait for data shows: {wait}{back} {method.counter(run)}")


@verdict("C03")
def _(evidence: Records) -> Verdict:
    try:
        eval("os.environ", {})
    except NameError as e:
        return Verdict("does not hold", f"it uses os and time and imports neither; Python then says: {e}", "")
    return Verdict("depends", "it uses os and time and imports neither, and this Python has them built in", "")


@verdict("C05")
def _(evidence: Records) -> Verdict:
    run = next((r for r in runs(evidence, "timing", "step_flop") if model_of(r) == "article"), None)
    if run is None:
        raise LookupError("launch('timing', model='labs.common.timing.benchmark_loop:article') has not been run")
    flop, peak = run.one("step_flop").value, run.one("peak_flop_s").value
    step = (run.where("step_s", mode="no_sync") or run.where("step_s", mode="train"))[0]
    mfu = estimate([100 * flop / (peak * s) for s in step.samples], "%")
    said = f"its {flop / 1e6:.1f} MFLOP per step reach {mfu} of the best rate here, without any exchange of gradients"
    if mfu.high < 100 * method.SLOW:
        return Verdict("does not hold", said)
    return depends(mfu.low >= 100 * method.SLOW, said)


@verdict("C06")
def _(evidence: Records) -> Verdict:
    found = method.seen_early(evidence)
    said = [
        f"{free} of the work with the data on the device, {copied} if each of 100 steps copies its batch first{how}"
        for free, copied, how in found.values()
    ]
    if not method.on_gpu(evidence):
        return Verdict("needs N GPUs", f"on an emulated queue it sees {said[-1]}", "")
    shares = [share for *both, _ in found.values() for share in both]
    told = "; ".join(f"{model}: it sees {share}" for model, share in zip(found, said, strict=True))
    return judged([s.low >= 95 for s in shares], [s.high < 95 for s in shares], told)


@verdict("C07")
def _(evidence: Records) -> Verdict:
    found, same = method.repaired(evidence, "warm up"), "no change that these runs can show"
    each = ", ".join(f"{r if differs(r) else same} ({model})" for model, r in found.items())
    said, kind = f"a warm-up before it changes the answer: {each}", method.kind(evidence)
    if method.any_differs(found):
        return Verdict("does not hold", said, kind)
    return Verdict("holds", said, kind) if all(map(within, found.values())) else cannot_tell(said, kind)


@verdict("C08")
def _(evidence: Records) -> Verdict:
    found = method.repaired(evidence, "synchronise", before="as printed")
    said = f"data made before the clock, and a wait in place of the copies', make the answer {method.in_words(found)}"
    said += only_on(last(evidence, "timing", "answer_s"), "these loops")
    if all(map(within, found.values())):
        return Verdict("holds", said, method.kind(evidence))
    return depends(method.any_differs(found), said, method.kind(evidence))


@verdict("C09")
def _(evidence: Records) -> Verdict:
    found = method.between_ranks(evidence)
    said = ", ".join(f"{more} ({model})" for model, more in found.items())
    near = all(more.high <= method.APART for more in found.values())
    apart = method.ranks_apart(found)
    shown = f"cannot be told to {method.APART:.0f} %"
    if near or apart:
        shown = "any of them will do" if near else "it matters which of them is asked"
    return Verdict(
        "does not hold" if apart else "depends",
        f"with equal work the slowest rank prints {said} more than "
        f"the fastest: {shown}. The job takes what the slowest does; with unequal work see notebook 11, "
        "way 11",
    )


@verdict("C10")
def _(evidence: Records) -> Verdict:
    step = method.steps_alone(evidence)
    shortest, best = min(step, key=lambda b: step[b].value), max(step, key=lambda b: b / step[b].value)
    if shortest == best:
        return Verdict(
            "depends", f"batch {best} has the shortest step and the most samples per second: both metrics agree"
        )
    more = method.faster(step, best, shortest)
    because = f"batch {shortest} has the shortest step; batch {best} does {more} as many samples per second"
    if more.low > 1:
        return Verdict("holds", because)
    return depends(more.high < 1, because)


@verdict("C15")
def _(evidence: Records) -> Verdict:
    step = method.steps_alone(evidence)
    inside = method.faster(step, 256, 32)
    said = f"from batch 32 to 256: {inside} the samples per second"
    if within(inside):
        return Verdict("does not hold", f"{said}: as many, within 5 %")
    if not differs(inside):
        return cannot_tell(said)
    if max(step) <= 256:
        raise LookupError("launch('batch_size') with batches beyond 256 is needed, to see where the curve bends")
    beyond = method.faster(step, max(step), 256)
    said += f"; from 256 to {max(step)} another {beyond}"
    if beyond.high < GAIN:  # the curve is shown to have bent
        return Verdict("holds", said)
    return depends(beyond.low > 1, said)


@verdict("C22")
def _(evidence: Records) -> Verdict:
    found = method.tried(evidence)
    matter, same, untried = (", ".join(n for n, c in found.items() if c is k) for k in (True, False, None))
    said = f"of {len(found)} parts that it lacks, these changed an answer here: {matter or 'none'}"
    said += f"; no difference shown: {same}" if same else ""
    said += f"; not tried: {untried}" if untried else ""
    queue = found[method.SYNCHRONISATION] is not None and not method.on_gpu(evidence)
    said += "; the queue is emulated" if queue else ""
    return Verdict("does not hold", said) if matter else cannot_tell(said)


@verdict("E23")
def _(evidence: Records) -> Verdict:
    run = last(evidence, "batch_size", "step_s", mode="ddp")
    batches = sorted(r.case["batch"] for r in run.where("step_s", mode="ddp"))
    low, high = (method.efficiency(run, b) for b in (batches[0], batches[-1]))
    kept = [run.one("activation_bytes", batch=b).value for b in (batches[0], batches[-1])]
    shares = [estimate([100 * s for s in samples], "%") for samples in (low, high)]
    because = (
        f"batch {batches[0]} to {batches[-1]} per rank: scaling efficiency {shares[0]} to {shares[1]}, "
        f"activations {kept[0] / 1e6:.2g} to {kept[1] / 1e6:.2g} MB"
    )
    raised = paired_ratio(high, low)
    return judged([raised.low > 1, kept[1] > kept[0]], [raised.high < GAIN, kept[1] <= kept[0]], because)
