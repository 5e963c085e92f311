"""Verdicts on claims about hardware and installation: datasheets, this torch, the probe's records."""

from __future__ import annotations

import importlib.metadata
import inspect

import torch

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
    here = hardware.build()
    if here["cuda"]:
        parts = f"CUDA {here['cuda']}" + (f" and NCCL {here['nccl']}" if here["nccl"] else "")
        because = f"torch {here['torch']} brings {parts} in its own packages; only the driver is the system's"
        return Verdict("does not hold", because, "")
    if not len(evidence.where("all_reduce_s")):
        raise LookupError("the probe has all-reduced nothing yet")
    because = "ranks computed and all-reduced here with neither; for GPUs torch's CUDA packages bring both"
    return Verdict("does not hold", because)


@verdict("B04")
def _(evidence: Records) -> Verdict:
    hits, sums = _bandwidth_claim(["A100 40GB SXM", "A100 80GB SXM"], 400)
    tdp = card("A100 40GB SXM").tdp_w
    because = f"{sums}. {tdp:g} is its power limit in watts; the article's own table says 1555"
    return Verdict("holds" if any(hits) else "does not hold", because, "published")


@verdict("B05")
def _(evidence: Records) -> Verdict:
    dense = card("A100 80GB SXM").tflops("fp16")
    because = f"the dense FP16 peak is {dense:g} TFLOP/s. 624 is {624 / dense:g} times that: the figure for "
    return Verdict("does not hold", because + "2:4 structured sparsity, which training does not have", "published")


@verdict("B20")
def _(evidence: Records) -> Verdict:
    hits, sums = _bandwidth_claim(["A100 40GB SXM", "A100 80GB SXM", "A100 80GB PCIe"], 1555)
    return Verdict("holds" if all(hits) else "depends", f"the 40 GB card only. {sums}", "published")


@verdict("B22")
def _(evidence: Records) -> Verdict:
    hits, sums = _bandwidth_claim(["RTX 4090", "RTX 3090"], 936)
    return Verdict("holds" if hits[0] else "does not hold", f"{sums}. 936 is the RTX 3090's", "published")


@verdict("B24")
def _(evidence: Records) -> Verdict:
    hits, sums = _bandwidth_claim(["T4"], 320)
    memory_gb = card("T4").memory_gb
    word = "holds" if hits[0] and memory_gb == 16 else "does not hold"
    return Verdict(word, f"{sums}, {memory_gb:g} GB. A peak, not a rate that programs reach", "published")


@verdict("B25")
def _(evidence: Records) -> Verdict:
    t4, a100 = card("T4"), card("A100 40GB SXM")
    bf16 = "no BF16 matrix units" if t4.tflops("bf16") is None else "BF16 matrix units"
    times = a100.tflops("fp16") / t4.tflops("fp16")
    because = f"{t4.tflops('fp16'):g} dense FP16 TFLOP/s, {times:.1f} times less than an A100; {bf16}; "
    return Verdict("holds", because + f"{t4.memory_gb:g} GB; {t4.tdp_w:g} W", "published")


@verdict("B44")
def _(evidence: Records) -> Verdict:
    cuda_11_1 = ["sm_37", "sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86"]  # sm_86 is its newest target
    how = hardware.runs_on((9, 0), cuda_11_1) or "none runs"
    because = f"machine code up to sm_86 on an H100 (sm_90): {how}. The driver must be as new as the build's "
    return Verdict("does not hold", because + "CUDA, and the build must hold kernels for the card", "")


@verdict("C02")
def _(evidence: Records) -> Verdict:
    try:
        wanted = importlib.metadata.requires("gpu-training-course") or []
    except importlib.metadata.PackageNotFoundError:
        raise LookupError("this course is not installed as a package: run make lab") from None
    pin = next(r for r in wanted if r.startswith("torch"))
    because = f"this course needs {pin}: torch.accelerator and fully_shard, for example, came long after 1.8"
    return Verdict("does not hold", because, "")


@verdict("D01")
def _(evidence: Records) -> Verdict:
    sizes = {s.gpu: s.memory_gb for s in hardware.specs() if s.memory_gb}
    inside = [g for g, gb in sizes.items() if 8 <= gb <= 24]
    because = f"{len(inside)} of the {len(sizes)} cards in the table ({', '.join(inside)}); the others have up to "
    return Verdict("depends", because + f"{max(sizes.values()):g} GB", "published")


@verdict("D28")
def _(evidence: Records) -> Verdict:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        Requirement("\N{EM DASH}extra-index-url")
    except InvalidRequirement:
        because = "the parser that pip uses takes the word for a package's name, and refuses the dash"
        return Verdict("does not hold", because, "")
    return Verdict("holds", "the parser that pip uses accepts it", "")


@verdict("D29")
def _(evidence: Records) -> Verdict:
    here = hardware.build()
    if here["nccl"]:
        return Verdict("does not hold", f"this torch uses NCCL {here['nccl']} from its own packages", "")
    return Verdict("needs N GPUs", "this torch holds no NCCL: install a CUDA build beside a GPU to see its own", "")


@verdict("E03")
def _(evidence: Records) -> Verdict:
    errors = [r.value for r in evidence.where("matmul_relative_error")]
    if not errors:
        raise LookupError("the probe's matrix product has not been run")
    here = hardware.build()
    cuda = f"a build for CUDA {here['cuda']}" if here["cuda"] else "a CPU build: no GPU takes part"
    because = f"what is installed here is torch {here['torch']}, {cuda}. A product that was computed (its error "
    return Verdict("does not hold", because + f"here: {max(errors):.0e}) proves a device; an installation does not")


@verdict("E04")
def _(evidence: Records) -> Verdict:
    how = hardware.runs_on((9, 0), ["sm_70", "sm_80"]) or "none runs"
    because = "both answer from the driver. Neither knows whether torch has kernels for the card (those for sm_70 "
    because += f"and sm_80 on an H100: {how}) or whether its memory is free; (0) is one card of several"
    return Verdict("depends", because, "")


@verdict("E25")
def _(evidence: Records) -> Verdict:
    if not hasattr(torch.cuda, "utilization"):
        return Verdict("holds", f"torch {torch.__version__} has no torch.cuda.utilization", "")
    says = " ".join((inspect.getdoc(torch.cuda.utilization) or "").split()).partition(". ")[0]
    return Verdict("does not hold", f'torch.cuda.utilization: "{says}". It needs nvidia-ml-py', "")
