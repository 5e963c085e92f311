"""Verdict of notebook 09. Nsight Systems itself was not run: what is judged is what a timeline can show."""

from __future__ import annotations

from itertools import permutations

from labs import last_to_arrive, profile_step
from labs.kit.claims import Verdict, cannot_tell, last, only_on, verdict
from labs.kit.measure import estimate
from labs.kit.record import Records
from labs.profile_step import NEAR


@verdict("E21")
def _(evidence: Records) -> Verdict:
    """Planted costs on one rank's timeline; then a late rank, which no rank's own clock shows."""
    run = last(evidence, "profile_step", "found_s")
    planted = profile_step.planted_found(run)
    near, off = ([f for f in planted if f.near is inside] for inside in (True, False))
    found = f"{len(near)} of {len(planted)} planted costs on the timeline of torch.profiler, within {NEAR:g} %"
    if untold := len(planted) - len(near) - len(off):
        found += f"; of {untold} this run cannot tell"
    told = f"Nsight Systems was not run. {found}{only_on(run)}"
    if not near and not off:
        return Verdict("not tried yet", told)
    if not near:
        return Verdict("does not hold", f"{told}: none in the place where it was planted")
    if untold > len(near):
        return cannot_tell(told)
    if off:
        places = ", ".join(sorted({f"{f.ms:g} ms in {f.place}" for f in off}))
        return Verdict("depends", f"{told}; not {places}")
    return _and_late(told, last(evidence, "last_to_arrive", "late_s"))


def _and_late(told: str, run: Records) -> Verdict:
    """ "holds" only if a late rank, which arrivals name, shows on the ranks' own clocks, too."""
    if run[0].layout["world_size"] == 1:
        return Verdict("depends", f"{told}. No late rank was tried: that takes two")
    blamed = last_to_arrive.blame(run, "one rank")
    own = [r.samples for r in run.where("own_step_s", late="one rank")]
    every = [estimate([1e3 * (x - y) for x, y in zip(a, b, strict=True)], "ms") for a, b in permutations(own, 2)]
    apart, half = max(every, key=lambda e: e.value), blamed.by.scaled(0.5e3, "ms")
    shows, hidden = any(e.low > half.high for e in every), all(e.high < half.low for e in every)
    if not blamed.clear or not (shows or hidden):
        return Verdict("depends", f"{told}. Whether a late rank shows, this run cannot tell")
    if shows:
        return Verdict("holds", f"{told}. A late rank shows on the ranks' own clocks, {apart} apart")
    late = (
        f"a rank that is {1e3 * blamed.by.value:.0f} ms late shows on no rank's own clock, {apart} apart at most: "
        "it takes all ranks, and when each came"
    )
    return Verdict("depends", f"{told}. But {late}")
