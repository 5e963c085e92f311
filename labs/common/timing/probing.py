"""Steps to time (matrix products, a convolution, a model's pass), and ways to time them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from labs.kit import measure
from labs.kit.hardware import Peak, peak

if TYPE_CHECKING:
    from labs.common.models import Workload

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Step = Callable[[], object]


def supported(dtype: str, device: torch.device) -> bool:
    """Return whether `device` supports this format: TF32 and BF16 need compute capability 8.0; CPUs have no TF32.

    FP16 on a CPU always works but, without matrix units for it, crawls: that is worth seeing.
    """
    if device.type != "cuda":
        return dtype != "tf32"
    return dtype in ("fp32", "fp16") or torch.cuda.get_device_capability(device) >= (8, 0)


def datasheet_peak(dtype: str, device: torch.device) -> Peak | None:
    """Return the dense datasheet peak of this rank's GPU; None for a CPU or an unknown card."""
    return peak(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def block_s(step: Step, inner: int, device: torch.device) -> float:
    """Return seconds of `inner` calls of `step` back to back, where one GPU launch hides behind another."""

    def block() -> None:
        for _ in range(inner):
            step()

    return measure.time_steps(block, 1, device)[0]


def inner_calls(step: Step, device: torch.device, target_s: float = 8e-3) -> int:
    """Return how many calls of `step` take about `target_s` seconds, so that the clock's cost doesn't count."""
    fastest = min(measure.time_steps(step, 4, device)[1:])  # the first call may allocate or compile
    return max(1, min(1000, math.ceil(target_s / max(fastest, 1e-7))))


def timed(step: Step, samples: int, device: torch.device) -> list[float]:
    """Return `samples` mean times per call of `step` in s, after a warm-up."""
    inner = inner_calls(step, device)
    return [block_s(step, inner, device) / inner for _ in range(samples)]


def matmul_step(dtype: str, n: int, device: torch.device) -> Step:
    """Return a product of two n x n matrices in `dtype`. TF32 is FP32 data with TF32 allowed inside the product.

    Uses random values, because a GPU draws less power, and so runs faster, on zeros.
    """
    a, b = (torch.randn(n, n, device=device).to(DTYPES[dtype]) for _ in range(2))
    out = torch.empty_like(a)

    def step() -> None:
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
        torch.mm(a, b, out=out)

    return step


def training_step(workload: Workload, batch_size: int, device: torch.device) -> Step:
    """Return a forward and backward pass of `workload`, without an optimizer, on one batch already on the device."""
    torch.backends.cudnn.allow_tf32 = False
    module = workload.module.to(device)
    x, y = (t.to(device) for t in workload.make_batch(batch_size))

    def step() -> None:
        module.zero_grad(set_to_none=True)
        workload.loss(module(x), y).backward()

    return step
