"""Reference solutions of notebook 04."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    micro_batches: Sequence[tuple[Tensor, Tensor]],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    max_norm: float,
) -> None:
    """One optimizer step in FP16: gradients accumulate over the micro-batches, are unscaled, then clipped.

    https://docs.pytorch.org/docs/2.13/notes/amp_examples.html
    """
    device_type = next(model.parameters()).device.type
    optimizer.zero_grad()
    for x, y in micro_batches:
        with torch.amp.autocast(device_type, dtype=torch.float16):
            loss = loss_fn(model(x), y) / len(micro_batches)
        scaler.scale(loss).backward()  # backward ops take the dtype of their forward ops: no autocast here
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)  # skipped if a gradient is inf or NaN
    scaler.update()


def loss_scale(gradients: Sequence[Tensor]) -> tuple[float, float]:
    """Share of the non-zero elements that FP16 turns to zero, and the largest power of two that keeps all finite."""
    g = torch.cat([t.flatten() for t in gradients])
    g = g[g != 0]
    share_lost = (g.half() == 0).float().mean().item()
    largest = g.abs().max().item()
    return share_lost, 2.0 ** math.floor(math.log2(torch.finfo(torch.float16).max / largest))


def saved_share(parameters: float, activation_bytes: float, lowered_share: float, optimizer: str) -> float:
    """Share of a training step's bytes that autocast saves against FP32; negative where it needs more."""
    moments = {"sgd": 0, "momentum": 1, "adam": 2}[optimizer]
    fixed_bytes = 4 * parameters * (1 + 1 + moments)  # parameters, gradients, moments: FP32 with and without autocast
    fp32_bytes = fixed_bytes + activation_bytes
    amp_bytes = fixed_bytes + 2 * parameters + activation_bytes * (1 - lowered_share / 2)
    return 1 - amp_bytes / fp32_bytes


def round_to(x: float, exponent_bits: int, mantissa_bits: int) -> float:
    """x > 0 as the nearest number of an IEEE 754 format with so many bits; in the middle between two, the even one."""
    bias = 2 ** (exponent_bits - 1) - 1
    exponent = max(math.floor(math.log2(x)), 1 - bias)  # below the smallest normal number the spacing stays
    spacing = 2.0 ** (exponent - mantissa_bits)
    nearest = round(x / spacing) * spacing  # round() takes the even one of two
    return nearest if nearest < 2.0 ** (bias + 1) else math.inf
