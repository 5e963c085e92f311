"""What this torch was built for, and whether that runs on a given card. CUDA stays uninitialised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def nccl_version() -> str | None:
    """Version of the NCCL inside this torch, for example "2.28.9"; None for a build without it."""
    import torch

    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def build() -> dict[str, Any]:
    """What this torch was built for. `arch_list` is read from the build, so that CUDA stays uninitialised."""
    import torch

    arch = torch._C._cuda_getArchFlags() if torch.backends.cuda.is_built() else None
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "nccl": nccl_version(),
        "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        "arch_list": arch.split() if arch else [],
    }


def runs_on(capability: tuple[int, int], arch_list: Sequence[str]) -> str | None:
    """How kernels for `arch_list` run on a card of this compute capability: "native", "ptx" or None.

    Machine code sm_XY runs on X.Y and later minor versions of the same major one. PTX (compute_XY) is
    compiled by the driver for any later card: it works, after a long first start, without the newer units.
    Targets with an "a" (sm_90a) run on exactly that card. Source: CUDA C++ Programming Guide.
    """
    found = None
    for entry in arch_list:
        target, _, digits = entry.partition("_")
        exact = digits.endswith("a")
        number = int(digits.rstrip("af"))
        major, minor = divmod(number, 10)
        if target == "sm" and major == capability[0] and (minor == capability[1] if exact else minor <= capability[1]):
            return "native"
        if target == "compute" and not exact and (major, minor) <= capability:
            found = "ptx"
    return found
