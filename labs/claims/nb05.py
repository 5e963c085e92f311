"""Verdicts of notebook 05, from records of memory_oracle and activation_checkpointing."""

from __future__ import annotations

from labs import activation_checkpointing, memory_oracle
from labs.claims.registry import Verdict, last, verdict, verdict_for
from labs.kit.record import Records

CLOSE = 0.05  # largest relative error of a trace
LOW, HIGH = 15.0, 25.0  # %, accepted as 20 %


def _recomputed(records: Records, metric: str) -> tuple[Records, list[str]]:
    """Return the last run's records, and its policies that recompute something."""
    run = last(records, "activation_checkpointing", metric, part="pareto")
    return run, [r.case["policy"] for r in run.where(metric, part="pareto") if r.case["policy"] != "none"]


@verdict("A27")
def a27_memory_can_be_estimated_beforehand(records: Records) -> Verdict:
    """Holds if each step that really ran is within 5 % of its trace."""
    run = last(records, "memory_oracle", "measured_bytes")
    errors = memory_oracle.errors(run)
    worst = max(errors, key=lambda name: abs(errors[name]))
    return verdict_for(
        [abs(e) <= CLOSE for e in errors.values()],
        [abs(e) > CLOSE for e in errors.values()],
        f"{len(errors)} steps that really ran took what their traces say, off by {abs(errors[worst]):.2%} at most "
        f"({worst}); workspace of kernels comes on top",
    )


@verdict("B12")
def b12_checkpointing_costs_20_percent(records: Records) -> Verdict:
    """Holds if every policy makes a step 15 to 25 % longer."""
    run, policies = _recomputed(records, "step_s")
    found = {policy: activation_checkpointing.price(run, policy) for policy in policies}
    more = {policy: (100 * (ratio.low - 1), 100 * (ratio.high - 1)) for policy, ratio in found.items()}
    least, most = (choose(found, key=lambda policy: found[policy].value) for choose in (min, max))
    said = [f"{100 * (found[policy].value - 1):.0f} % ({policy})" for policy in (least, most)]
    return verdict_for(
        [low >= LOW and high <= HIGH for low, high in more.values()],
        [low > HIGH or high < LOW for low, high in more.values()],
        f"a step of {run[0].config['model']} takes longer by {said[0]} to {said[1]}, by what is recomputed",
    )


@verdict("B14")
def b14_checkpointing_caches_intermediate_results(records: Records) -> Verdict:
    """Holds if forward keeps no less than without checkpointing; refuted if it keeps nothing."""
    run, policies = _recomputed(records, "saved_bytes")
    kept = {policy: run.one("saved_bytes", part="pareto", policy=policy).value for policy in ("none", *policies)}
    whole, fewest = kept.pop("none"), min(kept.values())
    return verdict_for(
        [nbytes >= whole for nbytes in kept.values()],
        [nbytes == 0 for nbytes in kept.values()],
        f"forward keeps {whole / 1e6:.1f} MB without it and from {fewest / 1e6:.1f} MB with it: the inputs of segments "
        "stay, the results inside are dropped",
    )
