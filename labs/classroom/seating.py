"""Seats for several learners at one machine: who gets which GPUs and cores, and who has to share them.

All but `machine_here` are pure functions of what a machine has, so that any machine can be tested on any other. A
physical core is never split between two groups of seats: its hyper-threads share one set of arithmetic units.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from labs.kit import nvml
from labs.kit.errors import require
from labs.kit.host import Core, affinity, core_count, cores, gpu_node
from labs.kit.nvml import Report, visible


@dataclass(frozen=True)
class SeatGpu:
    """A GPU, or a MIG instance of one, that a seat can have."""

    entry: str
    """What to write into CUDA_VISIBLE_DEVICES: a UUID or, where only CUDA knows which card is which, its index."""
    node: int | None
    """NUMA node; None if unknown."""
    mig: bool = False


@dataclass(frozen=True)
class Machine:
    """What can be handed out."""

    cores: tuple[Core, ...]
    gpus: tuple[SeatGpu, ...] = ()
    gpus_kept: bool = False
    """Whether there are GPUs that no seat shall see."""
    pinned: bool = True
    """Whether the system has taskset (macOS has not)."""
    notes: tuple[str, ...] = ()


def machine_here() -> Machine:
    """This machine, as far as this process may use it."""
    usable, notes, allowed = cores(affinity()), [], core_count()
    if allowed < len(affinity()):
        notes = [f"A CPU quota leaves {allowed} of {len(affinity())} logical CPUs: no more cores are handed out."]
        usable = usable[:allowed]  # one busy thread on each
    report = nvml.report(brief=True)
    gpus = seat_gpus(report, os.environ)
    if gpus and not _torch_has_cuda():
        notes.append("There are GPUs, but this torch is a build without CUDA: only cores are handed out.")
        gpus = []
    kept = bool(report.gpus) and not gpus
    return Machine(tuple(usable), tuple(gpus), kept, hasattr(os, "sched_setaffinity"), tuple(notes))


def _torch_has_cuda() -> bool:
    import torch

    return torch.backends.cuda.is_built()


@dataclass(frozen=True)
class Group:
    """Devices of one seat, or of several that take turns."""

    gpus: tuple[SeatGpu, ...]
    cores: tuple[Core, ...]

    @property
    def cpus(self) -> tuple[int, ...]:
        """Logical CPUs for taskset: one of each core if ranks will run on cores, otherwise all.

        A rank on a hyper-thread would be timed against the rank on the other one.
        """
        return tuple(sorted(cpu for core in self.cores for cpu in (core.cpus if self.gpus else core.cpus[:1])))

    @property
    def near(self) -> bool | None:
        """Whether all cores are on the NUMA node of all GPUs; None without GPUs, or if that is not known."""
        nodes = {gpu.node for gpu in self.gpus}
        return None if None in nodes or not nodes else nodes == {core.node for core in self.cores}

    @property
    def nodes(self) -> int:
        """How many NUMA nodes the cores are spread over."""
        return len({core.node for core in self.cores})


def seat_gpus(report: Report, environ: Mapping[str, str], root: str | Path = "/") -> list[SeatGpu]:
    """The GPUs that this process may hand out: those of its own CUDA_VISIBLE_DEVICES, as CUDA would read it.

    A process sees one MIG instance at most, a room as many as there are: each is a device of its own here.
    """
    wanted, whole = environ.get("CUDA_VISIBLE_DEVICES"), visible(report, environ)
    if not whole:  # no NVML, no GPU, or the list is empty for CUDA
        return []
    if wanted is None:
        entries = [name for card in report.gpus for name in (card.mig_uuids if card.mig else (card.uuid,)) if name]
        if not any(card.mig for card in report.gpus):
            entries = [v.uuid or str(v.cuda_index) for v in whole]
    else:
        entries = [entry.strip() for entry in wanted.split(",")]
    return list(_known(entries, report, environ, root))


def _known(entries: list[str], report: Report, environ: Mapping[str, str], root: str | Path) -> Iterator[SeatGpu]:
    bus = {card.index: card.pci_bus_id for card in report.gpus}
    for entry in entries:
        found = visible(report, {**environ, "CUDA_VISIBLE_DEVICES": entry})
        if not found:  # as in CUDA, the first bad entry ends the list
            return
        yield SeatGpu(found[0].uuid or entry, gpu_node(bus.get(found[0].nvml_index), root), found[0].mig)


def divide(learners: int, ranks: int, cores: Sequence[Core], gpus: Sequence[SeatGpu]) -> list[Group]:
    """At most `learners` groups of devices, each good for `ranks` ranks; fewer if the machine has too little.

    GPUs go with cores of their own NUMA node where the nodes are known and have enough. BadInput if not even one group
    has a core for each rank.
    """
    enough = f"{ranks} ranks need {ranks} cores and this machine has {len(cores)} that may be used: use fewer --ranks"
    require(len(cores) >= ranks, enough)
    groups = min(learners, len(cores) // ranks)
    if not gpus:
        return [Group((), share) for share in _within_nodes(groups, ranks, cores)]
    each = 1 if any(gpu.mig for gpu in gpus) else min(ranks, len(gpus))
    groups = min(groups, len(gpus) // each)
    each = each if any(gpu.mig for gpu in gpus) else len(gpus) // groups
    ordered = sorted(gpus, key=lambda gpu: -1 if gpu.node is None else gpu.node)
    hands = [tuple(ordered[i * each : (i + 1) * each]) for i in range(groups)]
    shares = _near(hands, ranks, cores) or _within_nodes(groups, ranks, cores)
    return [Group(hand, share) for hand, share in zip(hands, shares, strict=True)]


def _near(hands: list[tuple[SeatGpu, ...]], least: int, cores: Sequence[Core]) -> list[tuple[Core, ...]] | None:
    """Equally many cores for each hand of GPUs, of their own node; None if a node is not known or has too few."""
    nodes = [{gpu.node for gpu in hand} for hand in hands]
    if any(len(n) > 1 or None in n for n in nodes):
        return None
    homes = [n.pop() for n in nodes]
    local = {home: [c for c in cores if c.node == home] for home in homes}
    each = min(len(local[home]) // count for home, count in Counter(homes).items())
    if each < least:
        return None
    return [tuple(local[home].pop(0) for _ in range(each)) for home in homes]


def _within_nodes(groups: int, least: int, cores: Sequence[Core]) -> list[tuple[Core, ...]]:
    """Equally many cores for each group, of one node if that still leaves `least` of them; in order otherwise."""
    by_node: dict[int, list[Core]] = {}
    for core in cores:
        by_node.setdefault(core.node, []).append(core)
    most = len(cores) // groups
    for each in range(most, least - 1, -1):
        shares = [tuple(node[i : i + each]) for node in by_node.values() for i in range(0, len(node) - each + 1, each)]
        if len(shares) >= groups:
            return shares[:groups]
    return [tuple(cores[i * most : (i + 1) * most]) for i in range(groups)]
