"""How large a model's gradients are, and how many of them FP16 has no room for. A helper module, not a lab."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from labs.amp_training.number_formats import FORMATS
from labs.common.models import Workload
from labs.common.precision import amp
from labs.kit.errors import require
from labs.kit.record import Kind

LOWEST, HIGHEST = -60, 10  # exponents of the histograms; what is beyond is counted in their first and last place
FP16 = FORMATS["fp16"]


class Fact(NamedTuple):
    """What a record is made of."""

    metric: str
    unit: str
    samples: Sequence[float] | float
    kind: Kind
    case: dict[str, Any]


def facts(workload: Workload, batch: tuple[Tensor, Tensor], scales: Sequence[float]) -> Iterator[Fact]:
    """How the gradients of `batch` lie in FP16's range, times each of `scales`, which are powers of two.

    They are counted in FP32, and then calculated anew in FP16, from the loss times that scale. BadInput if FP32 has
    no finite ones.
    """
    exact = gradients(workload, batch, "fp32")
    finite = all(g.isfinite().all() for g in exact.values())
    require(finite, "gradients are not finite in FP32: check the loss, or take fewer steps")
    for scale in scales:
        in_fp16 = gradients(workload, batch, "fp16", scale)
        for of, g in exact.items():
            fp32, fp16 = ({"of": of, "scale": scale, "precision": name} for name in ("fp32", "fp16"))
            edges = {"exponents": [LOWEST, HIGHEST], **fp32}
            yield Fact("gradient_exponent_count", "count", exponent_counts(g * scale), "measured", edges)
            for metric, share in fp16_shares(g * scale).items():
                yield Fact(metric, "1", share, "measured", fp32)
            expected = flushed_share(exponent_counts(g), (g == 0).sum().item(), scale)
            yield Fact("expected_zero_share", "1", expected, "modelled", fp16)
            yield Fact("zero_share", "1", (in_fp16[of] == 0).double().mean().item(), "measured", fp16)


def trained(workload: Workload, rows: int, steps: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Train the workload in FP32 with Adam for some steps of `rows` rows, and return another batch."""
    module = workload.module.to(device)
    optimizer, scaler = torch.optim.Adam(module.parameters(), lr=1e-3), amp.scaler("fp32", device)
    for _ in range(steps):
        batch = tuple(t.to(device) for t in workload.make_batch(rows))
        amp.train_step(module, workload.loss, [batch], optimizer, "fp32", scaler)
    return tuple(t.to(device) for t in workload.make_batch(rows))


def gradients(
    workload: Workload, batch: tuple[Tensor, Tensor], precision: str, scale: float = 1.0
) -> dict[str, Tensor]:
    """Flat gradients of the loss times `scale`, as float64: of the "parameters", and of the "activations".

    Activations: the output of every layer that holds no other layers. Their gradients are what backward hands on in
    FP16, and they are the smaller ones: those of a parameter are sums of them over all rows.
    """
    found: list[Tensor] = []

    def watch(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda g: found.append(g.detach().double().flatten()))

    leaves = [m for m in workload.module.modules() if not any(m.children())]
    handles = [m.register_forward_hook(watch) for m in leaves]
    try:
        workload.module.zero_grad()
        with amp.precision(precision, batch[0].device):
            loss = workload.loss(workload.module(batch[0]), batch[1])
        (loss * scale).backward()
    finally:
        for handle in handles:
            handle.remove()
    own = [p.grad.double().flatten() for p in workload.module.parameters() if p.grad is not None]
    return {"parameters": torch.cat(own)} | ({"activations": torch.cat(found)} if found else {})


def exponent_counts(g: Tensor) -> list[float]:
    """How many of the finite `g` other than 0 have a size from 2^e to 2^(e + 1), for e = LOWEST to HIGHEST."""
    exponent = torch.frexp(g[g != 0].double()).exponent.long() - 1  # frexp's mantissa is in [0.5, 1)
    places = exponent.clamp(LOWEST, HIGHEST) - LOWEST
    return torch.bincount(places, minlength=HIGHEST - LOWEST + 1).tolist()


def fp16_shares(g: Tensor) -> dict[str, float]:
    """Shares of `g` that are 0, and that FP16 has no (full) room for."""
    size = g.abs()
    found = {
        "zero_share": size == 0,
        "below_subnormal_share": (size > 0) & (size < FP16.smallest_subnormal),
        "below_normal_share": (size > 0) & (size < FP16.smallest_normal),  # those below_subnormal included
        "above_largest_share": size > FP16.largest,
    }
    return {name: where.double().mean().item() for name, where in found.items()}


def flushed_share(counts: Sequence[float], zeros: float, scale: float = 1.0, lowest: int = LOWEST) -> float:
    """Share of gradients that are 0 in FP16 once multiplied by `scale`, a power of two.

    `counts[i]` of them have a size from 2^(lowest + i) to 2^(lowest + i + 1) in FP32, and `zeros` are 0 there. Rounding
    takes to 0 what is at most half of the smallest subnormal, 2^-25, and the rest below 2^-24 up to that.
    """
    half = round(math.log2(FP16.smallest_subnormal / 2) - math.log2(scale))
    return (zeros + sum(counts[: max(0, half - lowest)])) / (zeros + sum(counts))
