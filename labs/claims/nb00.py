"""Verdicts of notebook 00 on installing torch with CUDA: this torch build, and all-reduces between GPUs."""

from __future__ import annotations

import importlib.metadata

from labs.claims.registry import Verdict, verdict
from labs.kit import hardware
from labs.kit.record import Records


@verdict("A22")
def a22_nccl_and_cuda_must_be_installed(records: Records) -> Verdict:
    """Refuted if GPUs all-reduce correctly with only what PyTorch's own packages bring."""
    found = records.where("all_reduce_error")
    errors = [r.value for r in found if r.layout["world_size"] > 1 and r.layout["backend"].endswith("nccl")]
    if not errors:
        return Verdict("needs N GPUs", "No all-reduce between GPUs ran here; one between CPU cores needs neither.", "")
    torch_here, needs = hardware.build()["torch"], importlib.metadata.requires("torch") or ()
    if not any(r.startswith("nvidia-nccl") for r in needs):
        return Verdict("depends", f"torch {torch_here} did not come with NCCL from PyTorch's packages.", "")
    because = f"GPUs all-reduced here, error {max(errors):.0e}, with CUDA and NCCL from torch {torch_here}'s packages."
    return Verdict("depends" if max(errors) else "does not hold", because)


@verdict("D29")
def d29_nccl_must_be_installed(records: Records) -> Verdict:
    """Refuted if this torch contains NCCL."""
    here = hardware.build()
    if here["nccl"]:
        return Verdict("does not hold", f"This torch uses NCCL {here['nccl']} from its own packages.", "")
    return Verdict("needs N GPUs", "This torch holds no NCCL: install a CUDA build beside a GPU to see its own.", "")
