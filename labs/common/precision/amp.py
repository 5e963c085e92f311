"""Training steps in mixed precision, with every call in the right order: in BF16, in FP16, and in any format.

Parameters, gradients and optimizer state stay in FP32. Autocast runs matrix products and convolutions in a 16-bit
format; GradScaler scales the loss so that FP16's small gradients aren't lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

NO_SCALING = "fp16, no scaling"
FORMATS = ("fp32", "tf32", "bf16", "fp16", NO_SCALING)
Loss = Callable[[Tensor, Tensor], Tensor]
LOWERED = {"bf16": torch.bfloat16, "fp16": torch.float16, NO_SCALING: torch.float16}  # autocast's formats


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 in FP32 matrix products and convolutions; restores the settings afterwards.

    Both settings apply to the whole process. cuDNN's is on by default, so an FP32 baseline must switch it off.
    """
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn


@contextmanager
def precision(name: str, device: torch.device) -> Iterator[None]:
    """Run a forward pass and its loss in `name`, one of FORMATS. ValueError for another name."""
    if name not in FORMATS:
        raise ValueError(f"there is no format {name!r}: take one of {', '.join(FORMATS)}")
    lowered = name in LOWERED
    with tf32(name == "tf32"), torch.amp.autocast(device.type, LOWERED[name]) if lowered else nullcontext():
        yield


def scaler(name: str, device: torch.device, **settings: float) -> GradScaler:
    """Return a GradScaler for `name` of FORMATS: it scales only for "fp16", and otherwise passes everything through.

    Create it once, before the first step, because it adapts its scale. `settings` are GradScaler's.
    """
    return GradScaler(device.type, enabled=name == "fp16", **settings)


def impossible(module: nn.Module, loss: Loss, batch: Sequence[Tensor], name: str) -> str:
    """Say why `module` can't be trained in format `name` on its device, in torch's words; "" if it can.

    Tries the first two rows of `batch`. A device may support a format but not every layer in it, such as an FP16 LSTM
    on a CPU (oneDNN). Parameters, their gradients and the random state don't change. Doesn't try FP32, the baseline.
    """
    if name == "fp32":
        return ""
    x, y = (t[:2] for t in batch)
    trained = [p for p in module.parameters() if p.requires_grad]
    try:
        with torch.random.fork_rng(), precision(name, x.device):
            found = loss(module(x), y)
        torch.autograd.grad(found.float(), trained, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as e:  # from kernels; includes NotImplementedError
        return f"{type(e).__name__}: {' '.join(str(e).split())[:150]}"
    return ""


def bf16_step(model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """Run one step in BF16: forward and loss under autocast. Returns the loss, a scalar on the device."""
    optimizer.zero_grad()
    with torch.autocast(x.device.type, torch.bfloat16):
        loss = loss_fn(model(x), y)
    loss.backward()  # outside autocast: backward uses the formats that forward chose
    optimizer.step()
    return loss.detach()


def fp16_step(
    model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer, scaler: GradScaler
) -> Tensor:
    """Run the same in FP16, where unscaled small gradients become 0. Use one `scaler` for all steps."""
    optimizer.zero_grad()
    with torch.autocast(x.device.type, torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # unscales first; skips the step if a gradient is not finite
    scaler.update()  # halves the scale after a skipped step, doubles it after enough good ones
    return loss.detach()


def whole_batch_step(
    name: str,
    model: nn.Module,
    loss_fn: Loss,
    batch: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler,
) -> Tensor:
    """Run one step in the format `name` of FORMATS on all rows of `batch`, (x, y), without clipping."""
    if name == "bf16":
        return bf16_step(model, loss_fn, *batch, optimizer)
    if name in LOWERED:
        return fp16_step(model, loss_fn, *batch, optimizer, scaler)
    with tf32(name == "tf32"):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
    return loss.detach()


def train_step(
    module: nn.Module,
    loss: Loss,
    micro_batches: Sequence[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    name: str,
    scaler: GradScaler,
    max_norm: float | None = None,
) -> Tensor:
    """Run one optimizer step on all rows of `micro_batches`; return their mean loss, a scalar on the device.

    `loss(output, target)` is a mean over rows. Clips the gradient's norm to `max_norm`, unless that is None.
    """
    rows = sum(len(x) for x, _ in micro_batches)
    total = torch.zeros((), device=micro_batches[0][0].device)
    optimizer.zero_grad()
    for x, y in micro_batches:
        with precision(name, x.device):
            part = loss(module(x), y) * (len(x) / rows)
        with tf32(name == "tf32"):  # autocast must not reach backward, but TF32 must
            scaler.scale(part).backward()
        total += part.detach()
    if max_norm is not None:
        scaler.unscale_(optimizer)  # clip the norm of the true gradient
        nn.utils.clip_grad_norm_(module.parameters(), max_norm)
    scaler.step(optimizer)  # skips the step if a gradient is not finite
    scaler.update()
    return total
