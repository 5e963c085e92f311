"""Verdicts of notebook 01, from records of timing, measure_validation and batch_size."""

from __future__ import annotations

from labs import batch_size, measure_validation
from labs.claims.registry import GAIN, Verdict, depends, last, model_of, ratio, verdict, verdict_for, within
from labs.kit.measure import Estimate, differs, estimate, paired_ratio
from labs.kit.record import Records


def _repaired(records: Records, rung: str, before: str) -> tuple[Estimate, str]:
    """Return the ratio of the loop's answers after and before a repair, and the model."""
    run = last(records, "timing", "answer_s", rung=rung)
    return ratio(run.one("answer_s", rung=rung), run.one("answer_s", rung=before)), model_of(run)


@verdict("C07")
def c07_the_clock_may_start_at_once(records: Records) -> Verdict:
    """Holds if a warm-up before the clock doesn't change the answer."""
    found, model = _repaired(records, "warm up", "synchronise")
    return verdict_for([within(found)], [differs(found)], f"a warm-up before it changes the answer: {found} ({model})")


@verdict("C08")
def c08_data_may_be_made_inside_the_loop(records: Records) -> Verdict:
    """Holds if making data before the clock changes nothing. Never refuted: some pipelines do make data in the loop."""
    found, model = _repaired(records, "synchronise", "as printed")
    because = f"data made before the clock, and a wait, make the answer {found} ({model})"
    return Verdict("holds", because) if within(found) else depends(differs(found), because)


@verdict("C10")
def c10_throughput_is_a_core_metric(records: Records) -> Verdict:
    """Holds if the batch with the shortest step has fewer samples per second than the best batch."""
    rates = batch_size.rates(last(records, "batch_size", "step_s", mode="single"))
    shortest = min(rates, key=lambda b: estimate([b / r for r in rates[b]]).value)
    best = max(rates, key=lambda b: estimate(rates[b]).value)
    if shortest == best:
        return Verdict("depends", f"batch {best} has the shortest step and the most samples per second")
    more = paired_ratio(rates[best], rates[shortest])
    because = f"batch {shortest} has the shortest step; batch {best} does {more} as many samples per second"
    return Verdict("holds", because) if more.low > 1 else depends(more.high < 1, because)


@verdict("C15")
def c15_batch_32_to_256_shows_it(records: Records) -> Verdict:
    """Holds if the curve has bent by 256; fails if nothing changes from 32 to 256."""
    rates = batch_size.rates(last(records, "batch_size", "step_s", mode="single"))
    if not {32, 256} <= {*rates} or max(rates) == 256:
        raise LookupError("launch('batch_size') with batches 32, 256 and a larger one is needed")
    inside, beyond = paired_ratio(rates[256], rates[32]), paired_ratio(rates[max(rates)], rates[256])
    because = f"from batch 32 to 256: {inside} the samples per second; from 256 to {max(rates)} another {beyond}"
    if within(inside):
        return Verdict("does not hold", because)
    return Verdict("holds", because) if beyond.high < GAIN else depends(beyond.low > 1, because)


@verdict("C22")
def c22_the_method_is_complete(records: Records) -> Verdict:
    """Refuted if something that the method lacks changes an answer: a warm-up, or interleaving."""
    warm, model = _repaired(records, "warm up", "synchronise")
    orders = measure_validation.same_code(last(records, "measure_validation", "step_s", part="neighbour"))
    blocks, turns = (orders[order] for order in measure_validation.ORDERS)
    because = (
        f"it lacks a warm-up, which changes the answer {warm} ({model}), and an order of runs: beside another program, "
        f"the same code measured one after the other differs {blocks}, in turn {turns}"
    )
    return verdict_for([not differs(warm) and not differs(blocks)], [differs(warm) or differs(blocks)], because)


@verdict("E23")
def e23_a_larger_batch_is_more_efficient(records: Records) -> Verdict:
    """Holds if DDP's efficiency and the activation bytes grow from the smallest to the largest batch."""
    run = last(records, "batch_size", "step_s", mode="ddp")
    found, ranks = batch_size.speedups(run), run[0].layout["world_size"]
    small, large = min(found), max(found)
    kept = [run.one("activation_bytes", batch=b).value for b in (small, large)]
    said = [f"{100 * found[b].value / ranks:.0f} %" for b in (small, large)]
    because = (
        f"batch {small} to {large} per rank: scaling efficiency {said[0]} to {said[1]}, "
        f"activations {kept[0] / 1e6:.2g} to {kept[1] / 1e6:.2g} MB"
    )
    higher, lower = found[large].low > found[small].high, found[large].high < GAIN * found[small].low
    return verdict_for([higher, kept[1] > kept[0]], [lower, kept[1] <= kept[0]], because)
