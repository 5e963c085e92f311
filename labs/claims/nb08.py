"""Verdicts of notebook 08: what two torchruns with a wrong setting do, against two claims."""

from __future__ import annotations

from labs.claims.registry import Verdict, last, verdict
from labs.kit.record import Record, Records


def tried(records: Records, setting: str) -> Record:
    """The ranks that computed with this wrong setting; its case holds the error."""
    return last(records, "two_nodes", "computed", setting=setting).one("computed", setting=setting)


@verdict("C04")
def c04_a_fixed_port_sets_up_the_group(records: Records) -> Verdict:
    """A job whose port is taken would have to compute all the same."""
    found = tried(records, "port already taken")
    if found.value:
        return Verdict("holds", "ranks computed although the port was taken")
    error = found.case["machine_0"].partition(":")[0]
    return Verdict(
        "depends", f"a fixed port works until a second job wants it ({error}). To another machine, localhost is itself"
    )


@verdict("C21")
def c21_rank_and_world_size_verify_the_setup(records: Records) -> Verdict:
    """With a wrong clock, only the world size shows that a machine is missing; that links work, it doesn't show."""
    found = tried(records, "clock five minutes slow")
    alone = f"with a wrong clock, {found.case['of']} of 2 ranks was the whole world, and only this number showed it. "
    return Verdict(
        "depends",
        (alone if found.case["of"] == 1 else "")
        + "It doesn't show that ranks can exchange: by torch's documentation, NCCL connects at the first collective",
    )
