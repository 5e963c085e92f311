"""What notebook 05's records say of CUDA's caching allocator: simulated, and on a GPU."""

from __future__ import annotations

import contextlib
import inspect
import math
from typing import NamedTuple

import torch

from labs import memory_remedies
from labs.chapters.nb05.claims_remedies import LAB
from labs.kit.claims import last, ratio, size
from labs.kit.measure import Estimate, estimate
from labs.kit.record import Records
from labs.parts.remedies.ways_to_allocate import BETWEEN, EACH, LATE, PLAIN

EVERY_10 = "empty_cache after 10 steps"
LEAST_DEVICES = 6  # sizes of simulated devices; fewer cannot tell two ways apart
ENDS = {"runs out of memory": False, "fits": True}
SIMULATED = "simulated by the rules of CUDA's caching allocator, not measured on a GPU"


class Pattern(NamedTuple):
    """Whether a pattern that fragments memory ends well in each way."""

    fits: dict[str, bool]
    gpu: bool

    @property
    def short(self) -> bool:
        """Whether memory runs out as it is: else there is nothing to avoid."""
        return not self.fits[PLAIN]

    @property
    def avoided(self) -> list[bool]:
        """By each way that empties the cache."""
        return [fits for way, fits in self.fits.items() if way != PLAIN]

    def __str__(self) -> str:
        ends = {what: [way for way, f in self.fits.items() if f == fits] for what, fits in ENDS.items()}
        return ", ".join(f"{what} ({', '.join(ways)})" for what, ways in ends.items() if ways)


def pattern(evidence: Records) -> Pattern:
    """On a GPU if it was run there, else simulated. LookupError if nothing was to be avoided in the simulation."""
    for part in ("gpu", "fragmentation"):
        with contextlib.suppress(LookupError):
            run = last(evidence, LAB, "fits", part=part, way=PLAIN)
            fits = {way: bool(run.one("fits", part=part, way=way).value) for way in (PLAIN, LATE, BETWEEN)}
            if part == "gpu" or not fits[PLAIN]:
                return Pattern(fits, part == "gpu")
    raise LookupError(f"launch({LAB!r}) with a pattern that ends out of memory as it is, is needed")


class Way(NamedTuple):
    """Steps of changing lengths in one way of using the allocator, simulated."""

    name: str
    headroom: float
    """Memory that is enough, over what tensors need; inf if none was."""
    reserved: float
    """Bytes that the allocator takes at most where memory is unlimited."""
    calls: float
    """Calls of cudaMalloc per step that never end."""

    def __str__(self) -> str:
        enough = "no device tried is" if math.isinf(self.headroom) else f"{self.headroom:g} x what tensors need is"
        return (
            f"{enough} enough ({self.name}; {size(self.reserved)} reserved at most, {self.calls:.1f} calls of "
            "cudaMalloc per step)"
        )


def ways(evidence: Records) -> dict[str, Way]:
    """PLAIN, EACH and EVERY_10. LookupError with fewer than LEAST_DEVICES sizes of device."""
    run = last(evidence, LAB, "lasting_allocs", part="lengths", way=PLAIN)
    if len(run.where("fits", part="lengths", way=PLAIN)) <= LEAST_DEVICES:
        raise LookupError(f"launch({LAB!r}) with lengths on at least {LEAST_DEVICES} devices (no smoke run) is needed")
    return {name: _way(run, name) for name in (PLAIN, EACH, EVERY_10)}


def _way(run: Records, name: str) -> Way:
    case = {"part": "lengths", "way": name, "headroom": memory_remedies.UNLIMITED}
    reserved, calls = (run.one(m, **case).value for m in ("reserved_peak_bytes", "lasting_allocs"))
    return Way(name, memory_remedies.enough_headroom(run, name), reserved, calls)


def retried(evidence: Records) -> str:
    """Retries of simulated runs that fit although memory was short, in words."""
    run = last(evidence, LAB, "num_alloc_retries", part="lengths", way=PLAIN)
    found = []
    for r in run.where("num_alloc_retries", part="lengths", way=PLAIN):
        if r.value and run.one("fits", **r.case).value:
            calls = run.one("lasting_allocs", **r.case).value
            tried = _retries(int(r.value))
            found.append(f"{r.case['headroom']:g} x ({tried}, {calls:.1f} calls of cudaMalloc per step)")
    if not found:
        return "no run that fits retries an allocation"
    return (
        f"a run fits, but retries, with {' to '.join(dict.fromkeys((found[0], found[-1])))} the memory of its tensors"
    )


def _retries(n: int) -> str:
    return f"{n} {'retry' if n == 1 else 'retries'}"


class Tight(NamedTuple):
    """Steps on a GPU with so much more memory than they need."""

    headroom: float
    fits: bool
    retries: int
    slower: Estimate | None
    """Seconds per step over those with the most memory; None if memory ran out."""

    def __str__(self) -> str:
        what = f"{_retries(self.retries)}, {self.slower} the time" if self.slower else "out of memory"
        return f"{self.headroom:g} x what tensors need: {what}"


def tight(evidence: Records) -> list[Tight]:
    """On a GPU, the least memory first, without the roomiest; none if nothing ran short. LookupError without a GPU."""
    run = last(evidence, LAB, "num_alloc_retries", part="gpu")
    tried = sorted((r for r in run.where("fits", part="gpu") if "headroom" in r.case), key=lambda r: r.case["headroom"])
    if not tried:
        raise LookupError(f"launch({LAB!r}, parts=['gpu']) on a GPU is needed")
    if not tried[-1].value:
        return []  # it was never roomy: nothing to compare with
    most, found = tried[-1].case["headroom"], []
    for r in tried[:-1]:
        h, retries = r.case["headroom"], int(run.one("num_alloc_retries", **r.case).value)
        slower = _slower(run, h, most) if r.value else None
        found.append(Tight(h, bool(r.value), retries, slower))
    return [] if all(t.fits and not t.retries for t in found) else found


def _slower(run: Records, headroom: float, most: float) -> Estimate:
    """Step i with this headroom over step i with the most: the same batch, not in turn."""
    a, b = (run.one("step_s", part="gpu", headroom=h).samples for h in (headroom, most))
    return estimate([x / y for x, y in zip(a, b, strict=True)], "x")


def emptying(evidence: Records) -> Estimate | None:
    """On a GPU: time of a step that empties the cache over that of one which does not; None elsewhere."""
    with contextlib.suppress(LookupError):
        run = last(evidence, LAB, "step_s", part="gpu", way=EACH)
        return ratio(*(run.one("step_s", part="gpu", way=w) for w in (EACH, PLAIN)))
    return None


def price(evidence: Records) -> str:
    """What emptying the cache costs, in words; empty without a GPU."""
    found = emptying(evidence)
    return f"; on this GPU a step that empties the cache takes {found} the time" if found else ""


# -- torch's own words


def of_one_device() -> bool:
    """Whether torch documents memory_summary as that of one device."""
    return "device" in inspect.signature(torch.cuda.memory_summary).parameters and "given device" in (
        inspect.getdoc(torch.cuda.memory_summary) or ""
    )


def seen(evidence: Records) -> tuple[float, float]:
    """(bytes that memory_summary knows of, bytes of the GPU that are in use). LookupError without a GPU."""
    run = last(evidence, LAB, "in_use_bytes", part="gpu")
    told, device = (run.one("in_use_bytes", part="gpu", seen_by=s).value for s in ("reserved", "device"))
    return told, device
