"""Verdicts of notebook 07 on speedups over links of several speeds, and on compressed gradients."""

from __future__ import annotations

import statistics

from labs import comm_overlap, slow_link
from labs.claims.registry import Verdict, depends, in_general, model_of, runs, verdict, verdict_for
from labs.kit.measure import Estimate, estimate
from labs.kit.record import Records

FLAT = 1.05  # two numbers whose ratio is below this count as the same
STATED = 0.10  # share of the bytes that remains according to B18
MATTERS = 5.0  # % of a step


def _speedups(records: Records) -> dict[str, dict[float, Estimate]]:
    """Return {model: {bandwidth in MB/s: speedup of DDP}} of the last run of each model."""
    return {model_of(run): slow_link.speedups(run) for run in runs(records, "slow_link", "step_s")}


def _spread(records: Records) -> tuple[list[bool], list[bool], str]:
    """Return per model whether its speedup surely differs between links, whether it is surely equal, and a text."""
    differ, same, said = [], [], []
    for model, found in _speedups(records).items():
        slow, fast = found[min(found)], found[max(found)]
        differ.append(slow.high < fast.low or fast.high < slow.low)
        same.append(max(slow.high, fast.high) < FLAT * min(slow.low, fast.low))
        said.append(f"{model}: {slow} at {min(found):g} MB/s, {fast} at {max(found):g} MB/s")
    return differ, same, "; ".join(said)


@verdict("A19")
def a19_cards_of_one_kind_scale_alike(records: Records) -> Verdict:
    """Holds if the same devices have the same speedup over every link."""
    differ, same, said = _spread(records)
    return in_general(same, differ, f"the same devices reach different speedups over slower links ({said})")


@verdict("B06")
def b06_memory_and_tflops_make_synchronising_efficient(records: Records) -> Verdict:
    """Holds if the exchange adds the same time to a step over every link."""
    same, changes, said = [], [], []
    for run in runs(records, "slow_link", "step_s"):
        added = {}
        for r in run.where("step_s", way="ddp"):
            plain = run.one("step_s", way="no exchange", mb_s=r.case["mb_s"]).samples
            added[r.case["mb_s"]] = estimate([1e3 * (a - b) for a, b in zip(r.samples, plain, strict=True)], "ms")
        slow, fast = added[min(added)], added[max(added)]
        same.append(slow.high < FLAT * fast.low)
        changes.append(slow.low > fast.high)
        said.append(f"{model_of(run)}: {slow} at {min(added):g} MB/s, {fast} at {max(added):g} MB/s")
    because = f"with the same memory and arithmetic, the exchange adds {'; '.join(said)}"
    return in_general(same, changes, because)


@verdict("C14")
def c14_world_size_shows_efficiency(records: Records) -> Verdict:
    """Refuted if the speedup differs between links, over which the number of ranks is the same."""
    differ, same, said = _spread(records)
    because = f"the number of ranks is the same over every link, the speedup is not ({said})"
    return Verdict("does not hold", because) if any(differ) else depends(all(same), f"speedups: {said}")


@verdict("B18")
def b18_powersgd_cuts_ninety_percent(records: Records) -> Verdict:
    """Refuted if it sends more than a tenth of FP32's bytes, as the kernel counts them."""
    found = [run.one("sent", way="powersgd").value for run in runs(records, "gradient_compression", "sent")]
    said = ", ".join(f"{100 * share:.1f} %" for share in found)
    because = (
        f"it sends {said} of FP32's bytes here; vectors and small matrices stay whole, so elsewhere it can be more"
    )
    return Verdict("depends" if min(found) <= STATED else "does not hold", because)


@verdict("C23")
def c23_synchronisation_matters(records: Records) -> Verdict:
    """Refuted if it is less than 5 % of the step with the fastest buckets. Nothing is measured between machines."""
    run = runs(records, "comm_overlap", "step_s")[-1]
    ways = {r.case["way"]: r.samples for r in run.where("step_s") if r.case["way"] != comm_overlap.NONE}
    best = min(ways, key=lambda way: statistics.median(ways[way]))
    plain = run.one("step_s", way=comm_overlap.NONE).samples
    share = estimate([100 * (1 - b / a) for a, b in zip(ways[best], plain, strict=True)], "%")
    because = f"with {best} the exchange makes up {share} of a step here; between machines nothing was measured"
    found = verdict_for([share.low > MATTERS], [share.high < MATTERS], because)
    return Verdict("depends", because, found.kind) if found.word == "holds" else found
