"""Verdict of notebook 09. Nsight Systems itself was not run: what is judged is what a timeline can show."""

from __future__ import annotations

from labs import last_to_arrive, profile_step
from labs.kit.claims import Verdict, last, verdict
from labs.kit.record import Records
from labs.profile_step import NEAR


@verdict("E21")
def _(evidence: Records) -> Verdict:
    """Planted costs on one rank's timeline; then a late rank, which no rank's own clock shows."""
    planted = profile_step.planted_found(last(evidence, "profile_step", "found_s"))
    near, off = ([f for f in planted if f.near is inside] for inside in (True, False))
    found = f"{len(near)} of {len(planted)} planted costs on the timeline of torch.profiler, within {NEAR:g} %"
    if untold := len(planted) - len(near) - len(off):
        found += f"; of {untold} this run cannot tell"
    told = f"Nsight Systems was not run. {found}"
    if not near and not off:
        return Verdict("not tried yet", told)
    if not near:
        return Verdict("does not hold", f"{told}: none in the place where it was planted")
    if off:
        places = ", ".join(sorted({f"{f.ms:g} ms in {f.place}" for f in off}))
        return Verdict("depends", f"{told}; not {places}")
    late = _hidden(last(evidence, "last_to_arrive", "late_s"))
    return Verdict("depends" if late else "holds", f"{told}. {late}" if late else told)


def _hidden(run: Records) -> str:
    """In words, that a late rank is named by arrivals and not by the ranks' own clocks; "" if that was not seen."""
    if run[0].layout["world_size"] == 1:
        return ""
    blamed = last_to_arrive.blame(run, "one rank")
    own = last_to_arrive.own_timers(run, "one rank")
    apart = max(own.values()) - min(own.values())
    if not blamed.clear or apart > 0.5 * blamed.by.value:
        return ""
    return (f"But a rank that is {1e3 * blamed.by.value:.0f} ms late shows on no rank's own clock, "
            f"{1e3 * apart:.1f} ms apart at most: it takes all ranks, and when each came")  # fmt: skip
