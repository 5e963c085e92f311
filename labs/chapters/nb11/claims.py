"""Verdicts of notebook 11: what pip installs, where PyTorch's packages are, which plan to begin with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from packaging.version import Version

from labs import strategy
from labs.kit.claims import Verdict, last, verdict
from labs.kit.record import Records
from labs.parts.planning.parallel_cost import NEAR, Cost

LAB = "pip_indexes"
INDEXES = "The package indexes are made up here, after the real ones: pip is real, what it finds is not."


def taken(evidence: Records, *names: str) -> list[dict[str, Any]]:
    """What pip took in each of these cases of one launch. LookupError if one is missing, as without pip.

    And if pip found nothing where a wheel fits: then it could not read an index, and has chosen nothing.
    """
    run = last(evidence, LAB, "wheels", asked=names[0])
    found = [run.one("wheels", asked=name) for name in names]
    for r in found:
        if not r.value and r.case["asked"] != "no_wheel":
            raise LookupError(f"pip found no wheel in the case {r.case['asked']!r}: it cannot have read its index")
    return [r.case for r in found]


def version(case: dict[str, Any]) -> str:
    """Of the torch that pip took, or "nothing"."""
    return case["version"] or "nothing"


@verdict("D30")
def _(evidence: Records) -> Verdict:
    then, now, pinned, one_index = taken(evidence, "then", "now", "pinned", "one_index")
    word = "holds" if now["version"].endswith("+cu116") else "does not hold"
    before = (
        f" Before 1.13.1 was overtaken the same line took {version(then)}."
        if then["version"].endswith("+cu116")
        else ""
    )
    return Verdict(
        word,
        f"Beside a main index that has newer versions pip takes {version(now)}; pinned "
        f"{version(pinned)}, with cu116 as the only index {version(one_index)}.{before} {INDEXES}",
    )


@verdict("D35")
def _(evidence: Records) -> Verdict:
    first, second, constrained = taken(evidence, "first_build", "second_build", "constrained")
    changed = first["version"] != second["version"]
    kept = " With a constraints file the second takes" if changed else " A constraints file gives"
    return Verdict(
        "does not hold" if changed else "holds",
        f"One line, two builds: {version(first)}, then, with a "
        f"newer wheel on the index, {version(second)}.{kept} {version(constrained)}. {INDEXES}",
    )


@verdict("E01")
def _(evidence: Records) -> Verdict:
    names = ("second_build", "other_system", "other_python", "other_cuda", "no_wheel")
    usual, system, python, cuda, no_wheel = taken(evidence, *names)
    differ = {"operating system": system, "Python": python, "index of a CUDA version": cuda}
    matter = [name for name, case in differ.items() if case["file"] != usual["file"]]
    by_hand = no_wheel["version"] != ""  # pip took a wheel for another Python: then it is the reader who must choose
    word = "does not hold" if not matter else "holds" if by_hand and len(matter) == len(differ) else "depends"
    return Verdict(
        word,
        f"Another wheel is taken for another {_listed(matter)}; for Python {no_wheel['python']} "
        f"{version(no_wheel)}. System and Python pip reads off a wheel's name; CUDA only the index or the "
        f"version tells. {INDEXES}",
    )


def _listed(words: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:]))) or "machine: none"


@verdict("B45")
def _(evidence: Records) -> Verdict:
    run = last(evidence, LAB, "openmp_threads", copies=2)
    two, n = run.one("openmp_threads", copies=2), run.one("openmp_runtimes").value
    installers = sorted(r.case["installer"] for r in run.where("packages"))
    mixed = "conda" in installers and len(installers) > 1
    harms = two.case["ended"] or len(set(two.samples)) > 1
    effect = (
        "ends the process"
        if two.case["ended"]
        else (f"keeps {two.samples[-1]:.0f} threads when the first is told to use {two.samples[0]:.0f}")
    )
    word = "does not hold" if not harms else "holds" if mixed and n > 1 else "depends"
    return Verdict(
        word,
        f"What harms is one library in two copies: a second OpenMP runtime {effect}. Here packages "
        f"come from {' and '.join(installers)}, and a process with torch has {n:.0f} such runtime"
        f"{'s' * (n != 1)}.",
    )


LAST_ON_CHANNEL = "2.5.1"


@verdict("E02")
def _(evidence: Records) -> Verdict:
    newer = Version(torch.__version__) > Version(LAST_ON_CHANNEL)
    return Verdict(
        "does not hold" if newer else "depends",
        f"The channel pytorch ends with {LAST_ON_CHANNEL} "
        f"(github.com/pytorch/pytorch/issues/138506); this torch is {Version(torch.__version__).public}. "
        "PyTorch's page of previous versions names cudatoolkit=11.3 up to 1.12.1.",
        "published",
    )


@verdict("D27")
def _(evidence: Records) -> Verdict:
    brings = ""
    for r in evidence.where("cuda_packages"):
        brings = f" torch {r.case['torch']} brings CUDA in {r.value:.0f} packages of its own." if r.value else ""
    return Verdict(
        "does not hold",
        "NVIDIA supports a CUDA version's last point release only, which 11.6.0 is not, "
        "and deletes tags half a year after support for their driver ends (gitlab.com/nvidia/container-"
        f"images/cuda, issue 177). A base image holds no toolkit.{brings}",
        "published",
    )


# -- which plan to begin with, by the cost model of labs.strategy

SIZES = (0.125e9, 1.3e9, 2.7e9, 6.7e9, 13e9, 175e9)
"""Parameters of six of GPT-3's models: Brown et al. 2020, arXiv 2005.14165, table 2.1."""
CARD, CLUSTERS = "A100 80GB SXM", {8: 64, 64: 512, 512: 1024}
"""{cards: sequences of 2,048 tokens per step}"""
NETWORKS = {25.0: "200 Gbit/s for each card", 3.125: "200 Gbit/s for eight cards"}
"""{GB/s of one card to other nodes: in words}: a network card for each, as in a DGX A100, or one for a whole node."""
WHERE = f"models of {SIZES[0] / 1e9:g} to {SIZES[-1] / 1e9:g} billion on {' or '.join(map(str, CLUSTERS))} x {CARD}"


@cache
def plans(parameters: float, cards: int, network_gb_s: float) -> tuple[tuple[Cost, ...], Cost | None]:
    """All plans that fit and use all cards, and the one that labs.strategy advises; None if nothing fits."""
    config = strategy.Config(params=parameters, batch=CLUSTERS[cards], gpus=cards, gpu=CARD, network_gb_s=network_gb_s)
    advice = strategy.advise(config)
    free = config.machine().memory_bytes
    return tuple(c for c in advice.costs if c.memory_bytes <= free and c.plan.ranks == cards), advice.choice


def cases(network_gb_s: float = 25.0) -> list[tuple[tuple[Cost, ...], Cost]]:
    """`plans` of every size on every cluster where something fits. LookupError if nothing does."""
    every = (plans(n, cards, network_gb_s) for n in SIZES for cards in CLUSTERS)
    found = [(fitting, best) for fitting, best in every if best]
    if not found:
        raise LookupError("the cost model finds no plan that fits")
    return found


@verdict("C01")
def _(evidence: Records) -> Verdict:
    advised = Counter(best.plan.scheme for _, best in cases())
    word = "holds" if set(advised) == {"DDP"} else "depends" if advised["DDP"] else "does not hold"
    told = ", ".join(f"{scheme} {n} times" for scheme, n in advised.most_common())
    return Verdict(
        word,
        "What is mainstream no run tells; what is to be taken, a cost model. Of "
        f"{advised.total()} cases, {WHERE}: {told}.",
        "modelled",
    )


@verdict("D34")
def _(evidence: Records) -> Verdict:
    near, said = [], []
    for gb_s, network in NETWORKS.items():
        behind = [data_parallel_behind(fitting) for fitting, _ in cases(gb_s)]
        close = [ratio is not None and ratio <= 1 + NEAR for ratio in behind]
        near += close
        said.append(f"in {sum(close)} of {len(close)} cases with {network}")
    word = "holds" if all(near) else "depends" if any(near) else "does not hold"
    return Verdict(
        word,
        f"DDP or FSDP2 alone fits, and comes within {NEAR:.0%} of the fastest plan, "
        f"{', '.join(said)}: {WHERE}. In the others the complex modes pay: start simple, then try. By a "
        "cost model that lets computing hide messages.",
        "modelled",
    )


def data_parallel_behind(fitting: Iterable[Cost]) -> float | None:
    """Time of the fastest plan of DDP or FSDP2 alone over that of the fastest; None if neither fits."""
    seconds = {c.plan: c.step_s for c in fitting}
    alone = [s for plan, s in seconds.items() if plan.pipeline == plan.tensor == 1]
    return min(alone) / min(seconds.values()) if alone else None
