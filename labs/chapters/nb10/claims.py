"""Verdicts of notebook 10, from what labs.chapters.nb10.installed found and from the chart of symptoms."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import comb

from labs.chapters.nb10.installed import CONTROLS, LAB, OF_GPU
from labs.kit.claim_registry import Verdict, cannot_tell, last, only_on, verdict
from labs.kit.record import Records
from labs.symptom.catalog import rows

NETWORK = re.compile(r"\b(interface|network|cable|switch|firewall|socket|reach)", re.IGNORECASE)
OF_NCCL = re.compile(r"\bNCCL error|NCCL Error|NCCL WARN|\bnccl\w*Error")


@verdict("A07")
def _(evidence: Records) -> Verdict:
    """Which device is current in a process that never chose one."""
    found = [r for r in evidence.where("current_device") if r.lab == LAB]
    if not found:
        return Verdict(
            "needs N GPUs",
            "On two GPUs, without set_device, torch.ones(1).cuda(1) and then torch.cuda.current_device() decide. "
            "The chart's row about a barrier on the wrong GPU has what follows when it is still 0.",
            "",
        )
    at, on = int(found[-1].value), found[-1].case["tensor_on"]
    said = f"with a tensor on GPU {on} and no set_device the current device is {at}"
    if at == on:
        return Verdict("holds", said)
    return Verdict("depends", f"{said}: the tensor is where it should be, a bare .cuda() and barrier() go to GPU {at}")


BY_CHANCE = 0.05


def _by_chance(codes: Sequence[float], codes_with: Sequence[float]) -> float:
    """How likely at least so many of all failures are among `codes` if nothing makes a difference (Fisher's test)."""
    n, others = len(codes), len(codes_with)
    failed = n - codes.count(0)
    every = failed + others - codes_with.count(0)
    ways = sum(comb(n, k) * comb(others, every - k) for k in range(failed, min(n, every) + 1))
    return ways / comb(n + others, every)


@verdict("A10")
def _(evidence: Records) -> Verdict:
    """Pairs of ranks that end with and without it."""
    run = last(evidence, LAB, "exit_code", last="just end")
    codes, codes_with = (run.one("exit_code", last=last).samples for last in ("just end", "destroy"))
    printed, printed_with = (run.one("lines_at_exit", last=last) for last in ("just end", "destroy"))
    left = int(run.one("left", last="just end").value)
    well, well_with = codes.count(0), codes_with.count(0)
    said = (
        f"of {len(codes)} pairs of gloo ranks that just end, {well} ended with exit code 0 on both ranks, of "
        f"{len(codes_with)} with the call {well_with}; at most {max(printed.samples):.0f} lines on stderr against "
        f"{max(printed_with.samples):.0f}; {left} files left{only_on(run)}"
    )
    if left or _by_chance(codes, codes_with) <= BY_CHANCE:
        return Verdict("does not hold", said)
    if well / len(codes) < well_with / len(codes_with):
        return cannot_tell(f"so few pairs may differ so by chance; {said}")
    if well == len(codes):
        said += f". So many that end well show only that fewer than {1 - BY_CHANCE ** (1 / well):.0%} fail"
    if max(printed.samples) > max(printed_with.samples):
        return Verdict("depends", f'{said}: "{printed.case["first"]}"')
    published = (
        "torch's NCCL backend warns at exit that it can leak resources (the chart's row \"group not destroyed\")"
    )
    return Verdict("depends", f"{said}. {published}")


@verdict("B27")
def _(evidence: Records) -> Verdict:
    """The message is searched for in the installed torch, if that has code for GPUs at all."""
    run = last(evidence, LAB, "files_with", message=CONTROLS[0])
    controls = [run.one("files_with", message=message) for message in CONTROLS]
    if not all(control.value for control in controls):
        raise LookupError("the search does not even find messages that torch has")
    files = [r for r in run.where("files_with") if r.case["message"] not in (*CONTROLS, OF_GPU)]
    holding = [r.case["message"] for r in files if r.value]
    searched = f"{controls[0].case['of']:,} files of the installed torch searched"
    if holding:
        return Verdict("depends", f'{searched}: "{holding[0]}" is there; no GPUs of two kinds were tried')
    nowhere = f"{searched}: no part of this message is there, in Python (DDP and torch.amp among it) or in a library"
    if not run.one("files_with", message=OF_GPU).value:
        return Verdict("needs N GPUs", f"{nowhere}. There is no GPU code in this build, only libraries for the CPU", "")
    return Verdict("does not hold", f"{nowhere}, those for GPUs included; GPUs of two kinds were not tried")


@verdict("B31")
def _(evidence: Records) -> Verdict:
    """What NCCL_DEBUG=INFO prints, set within the program."""
    found = [r for r in evidence.where("nccl_lines", set="in the program") if r.lab == LAB]
    if not found:
        return Verdict(
            "needs N GPUs",
            "No NCCL that would read it ran here. With a GPU: NCCL_DEBUG=INFO torchrun ... 2>&1 | tee nccl.log; "
            "then python -m labs.nccl_log nccl.log, which shows what such a log tells.",
            "",
        )
    lines, timed = int(found[-1].value), found[-1].case["timed"]
    others = {r.case["set"]: int(r.value) for r in evidence.where("nccl_lines") if r.lab == LAB}
    if not lines and not others.get("before it", 1):
        because = "set outside of the program it printed nothing either; does NCCL_DEBUG_FILE send the lines elsewhere?"
        return cannot_tell(because)
    if not lines:
        return Verdict("does not hold", "set within the program, before the group was made, it printed nothing")
    said = f"set within the program, before the group was made, it printed {lines} lines for 10 all-reduces of one rank"
    late = others.get("after the first all-reduce", 1) == 0
    more = "; set after the first all-reduce it prints nothing" if late else ""
    if timed and not late:
        return Verdict("holds", f"{said}, {timed} with a time")
    if timed:
        return Verdict("depends", f"{said}, {timed} with a time{more}")
    return Verdict("depends", f"{said}, none with ms, us or GB/s: how a group is set up, not how fast{more}")


@verdict("B42")
def _(evidence: Records) -> Verdict:
    """What the installed torch says that the variable switches."""
    found = last(evidence, LAB, "words_about_speed").one("words_about_speed")
    modes = ", ".join(found.case["modes"])
    said = f"{found.case['variable']} (its name today) chooses what happens when a collective fails: {modes}"
    if found.value:
        return Verdict("depends", f"{said}; torch's header speaks of speed, too", "published")
    return Verdict(
        "does not hold",
        f"{said}. torch's header says nothing of speed; step times under gloo, which "
        "does not read it, would say nothing of NCCL",
        "published",
    )


@verdict("D26")
def _(evidence: Records) -> Verdict:
    """Of the errors in the chart that NCCL reports, how many are of the network."""
    del evidence  # the chart is the evidence
    errors = [row for row in rows() if OF_NCCL.search(" ".join(row.see))]
    network = [row for row in errors if NETWORK.search(row.why)]
    said = f"counted in the chart: {len(errors)} rows have messages of NCCL, {len(network)} of them of the network"
    others = ", ".join(f'"{row.name}"' for row in errors if row not in network)
    if not network:
        return Verdict("does not hold", said, "")
    return Verdict("depends", f"{said}, not {others}", "") if others else Verdict("holds", said, "")
