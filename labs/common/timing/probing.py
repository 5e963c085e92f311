"""Steps to time (matrix products, a convolution, a model's pass), and ways to time them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from labs.common.timing.roofline import matmul_work
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


def matmul_sweep(
    dtype: str, sizes: tuple[int, ...], config: Any, device: torch.device
) -> Iterator[tuple[int, list[float]]]:
    """Yield (n, seconds per product) for each size, until the next one would take longer than config.budget_s."""
    small = min(sizes[0], 128 if device.type == "cpu" else 1024)
    rate = matmul_work(small, 4).flop / timed(matmul_step(dtype, small, device), 1, device)[0]
    try:
        for n in sizes:
            if (config.samples + 3) * matmul_work(n, 4).flop / rate > config.budget_s:
                return
            seconds = timed(matmul_step(dtype, n, device), config.samples, device)
            rate = matmul_work(n, 4).flop / statistics.median(seconds)
            yield n, seconds
    finally:
        torch.set_float32_matmul_precision("highest")  # process-wide: the next part needs FP32


def convolution_step(device: torch.device, dtype: str = "fp32", images: int = 0) -> tuple[Step, float]:
    """Return (step, FLOPs) of a 3x3 convolution, 64 to 64 channels on 32x32 images: 8 on a CPU core, 512 on a GPU.

    FLOPs follow the definition. An algorithm that needs fewer (Winograd) shows a higher rate.
    """
    images = images or (8 if device.type == "cpu" else 512)
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"  # on by default: FP32 would silently be TF32
    shapes = (images, 64, 32, 32), (64, 64, 3, 3)
    x, weight = (torch.randn(shape, device=device).to(DTYPES[dtype]) for shape in shapes)
    flop = 2 * images * 64 * 64 * 9 * 32 * 32
    return lambda: torch.nn.functional.conv2d(x, weight, padding=1), flop


def training_step(workload: Workload, batch_size: int, device: torch.device) -> Step:
    """Return a forward and backward pass of `workload`, without an optimizer, on one batch already on the device."""
    torch.backends.cudnn.allow_tf32 = False
    module = workload.module.to(device)
    x, y = (t.to(device) for t in workload.make_batch(batch_size))

    def step() -> None:
        module.zero_grad(set_to_none=True)
        workload.loss(module(x), y).backward()

    return step
