"""Verdicts of notebook 08 on launching: what articles say of processes, addresses, ports and launchers."""

from __future__ import annotations

import inspect
import re

import torch.distributed as dist

from labs.kit.claim_registry import Verdict, last, verdict
from labs.kit.record import Record, Records

NCCL = "docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
CUDA = "docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html"
SHUTDOWN = "docs.pytorch.org/docs/stable/distributed.html#shutdown"
TORCHRUN = "docs.pytorch.org/docs/stable/elastic/run.html"
"""Read in November 2026."""


def fact(evidence: Records, name: str) -> tuple[bool, str]:
    """Whether that line worked on a rank of two_nodes, and what was said."""
    found = last(evidence, "two_nodes", "works").one("works", name=name)
    return bool(found.value), found.case["line"]


def drilled(evidence: Records, setting: str) -> tuple[Record, str]:
    """The drill of a wrong setting: the ranks that computed on, and the first error ("" if there was none)."""
    run = last(evidence, "two_nodes", "went_on", setting=setting)
    told = run.where("told_s", setting=setting)
    return run.one("went_on", setting=setting), told[0].case["line"] if len(told) else ""


def met(evidence: Records) -> tuple[int, set[str]]:
    """Ranks that have met under two torchruns, and the names of what they were told."""
    run = last(evidence, "two_nodes", "variable")
    ranks = len(run.where("sum"))
    if {r.value for r in run.where("sum")} != {ranks * (ranks + 1) / 2}:
        raise LookupError("the ranks did not meet")
    return ranks, {r.case["name"] for r in run.where("variable")}


@verdict("A06")
def _(evidence: Records) -> Verdict:
    works, line = fact(evidence, "init without an address")
    return Verdict(
        "holds" if works else "does not hold",
        f"With rank and world size only, init_process_group ends: {line}."
        if not works
        else "It worked here without an address.",
    )


@verdict("D09")
def _(evidence: Records) -> Verdict:
    works, line = fact(evidence, "init without an address")
    return Verdict(
        "holds" if works else "does not hold",
        f"What spawn calls passes a rank and sets no address: {line}."
        if not works
        else "It worked here without an address.",
    )


@verdict("A23")
def _(evidence: Records) -> Verdict:
    works, line = fact(evidence, "spawn passes the rank first")
    ranks, _ = met(evidence)
    return Verdict(
        "depends" if works else "does not hold",
        f"What spawn calls works on one machine ({line}). On two "
        f"machines made out of this one {ranks} ranks met under a torchrun each, which also starts ranks "
        "again.",
    )


@verdict("A24")
def _(evidence: Records) -> Verdict:
    ranks, _ = met(evidence)
    run = last(evidence, "two_nodes", "variable")
    backend = run[0].layout["backend"]
    return Verdict(
        "depends",
        f"{ranks} ranks met here over gloo on CPU cores: gloo sets no limit. NCCL takes one rank "
        f"per GPU (this run: {backend}).",
    )


@verdict("C04")
def _(evidence: Records) -> Verdict:
    went_on, line = drilled(evidence, "port taken")
    if went_on.value > 0:
        return Verdict("holds", "A taken port did no harm here.")
    why = line or "no rank computed on, and none said why"
    return Verdict(
        "depends", f"A fixed port works until a second job wants it: {why}. And to another machine localhost is itself."
    )


@verdict("C18")
def _(evidence: Records) -> Verdict:
    ranks, _ = met(evidence)
    run = last(evidence, "two_nodes", "variable")
    nodes = run.one("variable", name="GROUP_WORLD_SIZE", on_rank=0).case["text"]
    return Verdict(
        "does not hold",
        f"They name the ranks of one machine and no address. Here {nodes} torchruns with "
        f"--nnodes and one --rdzv-endpoint made {ranks} ranks meet.",
    )


@verdict("C19")
def _(evidence: Records) -> Verdict:
    works, line = fact(evidence, "python -m torch.multiprocessing")
    return Verdict(
        "holds" if works else "does not hold", f"It cannot be run: {line}." if not works else "This torch can run it."
    )


@verdict("C20")
def _(evidence: Records) -> Verdict:
    works, line = fact(evidence, "main(rank, world_size) without arguments")
    _, names = met(evidence)
    return Verdict(
        "holds" if works else "does not hold",
        f"A launcher passes no arguments: {line}. RANK, WORLD_SIZE "
        f"are {'in' if {'RANK', 'WORLD_SIZE'} <= names else 'NOT in'} the environment.",
    )


@verdict("C21")
def _(evidence: Records) -> Verdict:
    sums = last(evidence, "two_nodes", "sum").where("sum")
    ranks, found = len(sums), {r.value for r in sums}
    if found != {ranks * (ranks + 1) / 2}:
        return Verdict(
            "does not hold",
            f"{ranks} ranks know their number, and an all-reduce over them gives "
            f"{' and '.join(f'{s:g}' for s in sorted(found))}: the numbers do not show it.",
        )
    told = f"{ranks} ranks know their number, and an all-reduce over them gives the right sum.{_alone(evidence)}"
    if not connects_late():
        return Verdict("holds", told)
    return Verdict(
        "depends",
        f"{told} That ranks know their number does not verify that they can exchange: with NCCL "
        "torch connects them at the first collective, by its documentation, unless device_id is given. Only "
        "a collective shows it.",
    )


def _alone(evidence: Records) -> str:
    """Where the number told what no error did; empty if that drill was not run, or ended otherwise."""
    try:
        went_on, _ = drilled(evidence, "clock off")
    except LookupError:
        return ""
    alone = int(went_on.case["of"])
    return (
        f" With a clock that is off, {alone} of 2 ranks was the whole world: only the number shows it."
        if (0 < alone < 2)
        else ""
    )


def connects_late() -> bool:
    """Whether torch documents that NCCL's communicator is otherwise made lazily: by the first collective."""
    return bool(re.search(r"\blaz(y|ily)\b", inspect.getdoc(dist.init_process_group) or ""))


@verdict("C24")
def _(evidence: Records) -> Verdict:
    current, line = fact(evidence, "torch.distributed.launch is current")
    line = line.partition(" Note ")[0].rstrip(".")
    return Verdict(
        "holds" if current else "does not hold",
        f"torch marks it as deprecated{f': {line}' if line else ''}."
        if not current
        else "This torch does not mark it.",
    )


@verdict("C25")
def _(evidence: Records) -> Verdict:
    ranks, names = met(evidence)
    there = {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= names
    return Verdict(
        "holds" if there else "does not hold",
        f"torchrun told each of {ranks} ranks {len(names)} things "
        "that nobody set by hand. For several ranks it also sets OMP_NUM_THREADS=1, unless it is set (read "
        "in torch/distributed/run.py).",
    )


@verdict("D10")
def _(evidence: Records) -> Verdict:
    works, line = fact(evidence, "import torch brings torch.multiprocessing")
    return Verdict("holds" if works else "does not hold", f"{line or 'torch/__init__.py does not import it'}.")


@verdict("D11")
def _(evidence: Records) -> Verdict:
    works, line = fact(evidence, "spawn passes the rank first")
    return Verdict("holds" if works else "does not hold", f"As the first argument {line}, then came args.")
