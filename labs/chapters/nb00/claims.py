"""Verdicts on claims about hardware and installation: datasheets, this torch, the probe's records."""

from __future__ import annotations

import importlib.metadata
import inspect

import torch
from packaging.requirements import InvalidRequirement, Requirement

from labs.kit import hardware
from labs.kit.claims import Verdict, verdict
from labs.kit.hardware import Spec
from labs.kit.record import Records


def card(name: str) -> Spec:
    """The row of the hardware table; the claims below are about cards that are in it."""
    found = hardware.spec(name)
    if found is None:
        raise LookupError(f"{name} is not in labs/kit/gpus.toml")
    return found


def _pins(spec: Spec) -> str:
    """The bandwidth as arithmetic, for example "384 bits x 21 Gbit/s / 8 = 1,008 GB/s"."""
    gb_s = hardware.bus_bandwidth_gb_s(spec.bus_bits or 0, spec.pin_gbit_s or 0)
    return f"{spec.gpu}: {spec.bus_bits} bits x {spec.pin_gbit_s:g} Gbit/s / 8 = {gb_s:,.0f} GB/s"


def _bandwidth_claim(names: list[str], claimed_gb_s: float) -> tuple[list[bool], str]:
    cards = [card(n) for n in names]
    hits = [abs(c.bandwidth_gb_s / claimed_gb_s - 1) < 0.01 for c in cards]
    return hits, "; ".join(_pins(c) for c in cards)


@verdict("A22")
def _(evidence: Records) -> Verdict:
    found = evidence.where("all_reduce_error")
    errors = [r.value for r in found if r.layout["world_size"] > 1 and r.layout["backend"] == "nccl"]
    if not errors:
        return Verdict("needs N GPUs", "No all-reduce between GPUs ran here; one between CPU cores needs neither.", "")
    torch_here, needs = hardware.build()["torch"], importlib.metadata.requires("torch") or ()
    if not any(r.startswith("nvidia-nccl") for r in needs):
        return Verdict("depends", f"torch {torch_here} did not come with NCCL from PyTorch's packages.", "")
    because = f"GPUs all-reduced here, error {max(errors):.0e}, with CUDA and NCCL from torch {torch_here}'s packages."
    return Verdict("depends" if max(errors) else "does not hold", because)


@verdict("B04")
def _(evidence: Records) -> Verdict:
    hits, sums = _bandwidth_claim(["A100 40GB SXM", "A100 80GB SXM"], 400)
    tdp = card("A100 40GB SXM").tdp_w
    because = f"{sums}." + (" 400 is its power limit in watts: perhaps a mix-up." if tdp == 400 else "")
    return Verdict("holds" if any(hits) else "does not hold", because, "published")


@verdict("B05")
def _(evidence: Records) -> Verdict:
    times = 624 / card("A100 80GB SXM").tflops("fp16")
    because = f"624 is {times:.3g} times the dense FP16 peak."
    if times == 2:
        because += " It is the figure for 2:4 structured sparsity, which ordinary training does not have."
    return Verdict("holds" if times == 1 else "does not hold", because, "published")


@verdict("B20")
def _(evidence: Records) -> Verdict:
    hits, sums = _bandwidth_claim(["A100 40GB SXM", "A100 80GB SXM", "A100 80GB PCIe"], 1555)
    word = "holds" if all(hits) else "depends" if any(hits) else "does not hold"
    return Verdict(word, f"{sum(hits)} of {len(hits)} A100 cards have it. {sums}.", "published")


@verdict("B22")
def _(evidence: Records) -> Verdict:
    hits, sums = _bandwidth_claim(["RTX 4090", "RTX 3090"], 936)
    whose = " 936 is the RTX 3090's." if hits[1] else ""
    return Verdict("holds" if hits[0] else "does not hold", f"{sums}.{whose}", "published")


@verdict("B24")
def _(evidence: Records) -> Verdict:
    hits, sums = _bandwidth_claim(["T4"], 320)
    memory_gb = card("T4").memory_gb
    word = "holds" if hits[0] and memory_gb == 16 else "does not hold"
    return Verdict(word, f"{sums}, {memory_gb:g} GB. A peak: what programs reach is not on a datasheet.", "published")


@verdict("B25")
def _(evidence: Records) -> Verdict:
    t4, others = card("T4"), [s for s in hardware.specs() if s.tflops("fp16") and s.tdp_w and s.gpu != "T4"]
    slowest = all(t4.tflops("fp16") < s.tflops("fp16") for s in others)
    because = f"{t4.tflops('fp16'):g} dense FP16 TFLOP/s at {t4.tdp_w:g} W: "
    because += "the slowest" if slowest else "not the slowest"
    bf16 = "" if t4.tflops("bf16") else " It has no BF16 matrix units."
    return Verdict("holds" if slowest else "depends", f"{because} of {len(others) + 1} cards here.{bf16}", "published")


CUDA_11_1 = ["sm_37", "sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86"]
"""Machine code in PyTorch 1.8's packages for CUDA 11.1, whose newest target is sm_86. CUDA 11.0 was the first with
sm_80 (LLVM, clang/lib/Basic/Cuda.cpp: the toolkit that each target needs), so its other packages stop before."""


def _oldest_build(also: str = "") -> tuple[str, str]:
    """Whether PyTorch 1.8 for CUDA 11.1 runs on all cards of the generations from Ampere on: a word, a sentence."""
    cards = {"A100": (8, 0), "RTX 4090": (8, 9), "H100": (9, 0)}
    runs = {name: hardware.runs_on(capability, CUDA_11_1) for name, capability in cards.items()}
    word = "holds" if all(runs.values()) else "depends" if any(runs.values()) else "does not hold"
    yes, no = (", ".join(n for n, how in runs.items() if bool(how) == found) or "none" for found in (True, False))
    oldest = f"The oldest that this allows, PyTorch 1.8 for CUDA 11.1, has machine code up to sm_86{also}."
    return word, f"{oldest} Of three cards it runs on: {yes}; not on: {no}."


@verdict("B44")
def _(evidence: Records) -> Verdict:
    return Verdict(*_oldest_build(), "")


@verdict("C02")
def _(evidence: Records) -> Verdict:
    return Verdict(*_oldest_build(", for CUDA 10.2 none newer than sm_75"), "")


@verdict("D01")
def _(evidence: Records) -> Verdict:
    sizes = {s.gpu: s.memory_gb for s in hardware.specs() if s.memory_gb}
    inside = [g for g, gb in sizes.items() if 8 <= gb <= 24]
    word = "depends" if 0 < len(inside) < len(sizes) else "holds" if inside else "does not hold"
    because = f"{len(inside)} of the {len(sizes)} cards whose memory the table gives have"
    because += f"; the largest has {max(sizes.values()):g} GB."
    return Verdict(word, because, "published")


@verdict("D28")
def _(evidence: Records) -> Verdict:
    try:
        Requirement("\N{EM DASH}extra-index-url")
    except InvalidRequirement:
        because = "The parser that pip uses takes the word for a package's name, and refuses the dash."
        return Verdict("does not hold", because, "")
    return Verdict("holds", "The parser that pip uses accepts it.", "")


@verdict("D29")
def _(evidence: Records) -> Verdict:
    here = hardware.build()
    if here["nccl"]:
        return Verdict("does not hold", f"This torch uses NCCL {here['nccl']} from its own packages.", "")
    return Verdict("needs N GPUs", "This torch holds no NCCL: install a CUDA build beside a GPU to see its own.", "")


@verdict("E03")
def _(evidence: Records) -> Verdict:
    found = evidence.where("matmul_relative_error")
    if not len(found):
        raise LookupError("the probe's matrix product has not been run")
    where = "a CPU core" if all(r.layout["device"] == "cpu" for r in found) else "a GPU"
    because = (
        "No installation makes sure of it: it needs a GPU and a driver, too. The command itself was not run; "
        f"here a product of torch {hardware.build()['torch']} ran on {where}."
    )
    return Verdict("does not hold", because, "")


@verdict("E04")
def _(evidence: Records) -> Verdict:
    how = hardware.runs_on((9, 0), ["sm_70", "sm_80"])
    because = (
        "Both find a card, even one that torch has no kernels for: then it only warns. Of a build for sm_70 and sm_80 "
        f"{how or 'nothing runs'} on an H100 (sm_90)."
    )
    return Verdict("holds" if how else "depends", because, "")


@verdict("E25")
def _(evidence: Records) -> Verdict:
    if not hasattr(torch.cuda, "utilization"):
        return Verdict("holds", f"torch {torch.__version__} has no torch.cuda.utilization.", "")
    says = " ".join((inspect.getdoc(torch.cuda.utilization) or "").split()).partition(". ")[0]
    return Verdict("does not hold", f'torch.cuda.utilization: "{says}". It needs nvidia-ml-py.', "")
