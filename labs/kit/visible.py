"""Which GPUs CUDA would show this process, and under which index: NVML's order is not CUDA's.

NVML counts in PCI bus order and knows no CUDA_VISIBLE_DEVICES. CUDA renumbers the visible ones from 0 and,
unless CUDA_DEVICE_ORDER=PCI_BUS_ID, puts the fastest first. Only the UUID means the same to both.
Source: CUDA C++ Programming Guide, "CUDA Environment Variables"; MIG User Guide, "Device Enumeration".
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from labs.kit.nvml import Gpu, Report

Choice = tuple[Gpu | None, str | None]  # (card if known, UUID of its MIG instance if it is one)


@dataclass(frozen=True)
class Visible:
    """A device that CUDA enumerates. `nvml_index` and `uuid` are None when only CUDA itself could tell."""

    cuda_index: int
    nvml_index: int | None
    uuid: str | None
    name: str | None
    mig: bool = False


def visible(report: Report, environ: Mapping[str, str] | None = None) -> list[Visible] | None:
    """The devices CUDA would enumerate, in its order. None if NVML could not be read."""
    if report.problem is not None:
        return None
    environ = os.environ if environ is None else environ
    cards, wanted = list(report.gpus), environ.get("CUDA_VISIBLE_DEVICES")
    in_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({g.name for g in cards}) <= 1
    if wanted is None:
        chosen: list[Choice] = [(g if in_order else None, None) for g in cards]
    else:
        chosen = _choose(wanted, cards, in_order)
    return _number(_one_mig_instance(chosen))


def _choose(wanted: str, cards: Sequence[Gpu], in_order: bool) -> list[Choice]:
    """Each entry's card. As in CUDA, the first bad entry ends the list and a repeated one empties it."""
    chosen: list[Choice] = []
    seen: list[str] = []
    for entry in (e.strip() for e in wanted.split(",")):
        found = _by_uuid(entry, cards) if entry.startswith(("GPU-", "MIG-")) else _by_index(entry, cards, in_order)
        if found is None:
            break
        key = found[1] or (str(found[0].index) if found[0] else entry)
        if key in seen:
            return []
        seen.append(key)
        chosen.append(found)
    return chosen


def _by_uuid(entry: str, cards: Sequence[Gpu]) -> Choice | None:
    """The only card, or MIG instance, whose UUID starts with `entry`."""
    if entry.startswith("GPU-"):
        found = [(g, None) for g in cards if g.uuid and g.uuid.startswith(entry)]
    else:
        found = [(g, uuid) for g in cards for uuid in g.mig_uuids if uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


def _by_index(entry: str, cards: Sequence[Gpu], in_order: bool) -> Choice | None:
    digits = re.match(r"\d+", entry)  # CUDA reads a leading number and ignores what follows
    if digits is None or int(digits[0]) >= len(cards):
        return None
    return (cards[int(digits[0])] if in_order else None), None


def _one_mig_instance(chosen: list[Choice]) -> list[Choice]:
    """A process sees one MIG instance at most; a card in MIG mode without instances cannot be used at all."""
    usable = []
    for card, mig in chosen:
        if card and card.mig and mig is None:
            mig = card.mig_uuids[0] if card.mig_uuids else None
        if not (card and card.mig and mig is None):
            usable.append((card, mig))
    return [c for c in usable if c[1]][:1] or usable


def _number(chosen: list[Choice]) -> list[Visible]:
    unknown = (None, None, None)
    return [
        Visible(i, *((card.index, mig or card.uuid, card.name) if card else unknown), mig=bool(mig))
        for i, (card, mig) in enumerate(chosen)
    ]


def nvml_index_of(cuda_uuids: Sequence[str], cards: Sequence[Gpu]) -> list[int | None]:
    """NVML index of each CUDA device, by UUID; None if NVML does not list it.

    torch writes UUIDs without the "GPU-" that NVML puts in front; letter case does not count.
    """
    known = {_bare(g.uuid): g.index for g in cards if g.uuid}
    return [known.get(_bare(uuid)) for uuid in cuda_uuids]


def _bare(uuid: str) -> str:
    return str(uuid).lower().removeprefix("gpu-")
