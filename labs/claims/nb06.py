"""Verdict of notebook 06, from records of pipeline_parallel."""

from __future__ import annotations

from labs.claims.registry import Verdict, last, verdict, verdict_for
from labs.kit.measure import estimate
from labs.kit.record import Records

BUSY = 0.1  # idle share of a busy stage, at most; if above 1/2 minus this, one stage works at a time


@verdict("D18")
def d18_both_halves_are_busy(records: Records) -> Verdict:
    """Holds if a stage of the naive split on two devices is idle for less than 10 % of a step."""
    run = last(records, "pipeline_parallel", "idle_share", schedule="1f1b", micro_batches=1)
    if run[0].layout["world_size"] != 2:
        raise LookupError("launch('pipeline_parallel', nproc=2) is needed")
    shares = {r.case["micro_batches"]: r for r in run.where("idle_share", schedule="1f1b") if r.kind != "modelled"}
    naive = estimate(shares[1].samples)
    others = ", ".join(f"{100 * r.value:.0f} % with {m}" for m, r in shares.items() if m > 1)
    return verdict_for(
        [naive.high < BUSY],
        [naive.low > 1 / 2 - BUSY],
        f"a stage of the naive split is idle for {100 * naive.value:.0f} % of a step; {others} micro-batches",
    )
