"""What takes memory away from a training step, and the same step cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from labs.common.models import Workload
from labs.common.oracle.step import Conditions
from labs.common.oracle.trace import Trace
from labs.common.precision import amp

ROWS = "rows"
HALF, LEAN, OFFLOAD = "half the batch", "Adam in 8 bits", "save_on_cpu"

# What each remedy changes about a step in FP32 with Adam: conditions of labs.common.oracle.step, or its rows.
REMEDIES: dict[str, dict[str, object]] = {
    "none": {},
    HALF: {ROWS: 0.5},
    "4 micro-batches": {"micro_batches": 4},
    "bf16 autocast": {"precision": "bf16"},
    "recompute blocks": {"policy": "block"},
    OFFLOAD: {},
    "SGD with momentum": {"optimizer": "momentum"},
    LEAN: {},
}
SMOKE = ("none", HALF, "4 micro-batches", "SGD with momentum", LEAN)
EIGHT_BIT = (1 + 4 / 2048) / 4  # bytes per byte of FP32: one each, and a scale per 2048 (Dettmers et al., 2110.02861)


def conditions(remedy: str, rows: int) -> tuple[int, dict[str, object]]:
    """(rows, conditions of the step) under a `remedy` of REMEDIES, where there were `rows` before."""
    changed = {"optimizer": "adam", **REMEDIES[remedy]}
    return max(1, round(rows * changed.pop(ROWS, 1))), changed


def peak_parts(trace: Trace, remedy: str) -> dict[str, float]:
    """Bytes by category at the peak of `trace`; Adam in 8 bits has no trace, but a smaller state at every moment."""
    parts = dict(trace.peak)
    if remedy == LEAN:
        parts["optimizer"] *= EIGHT_BIT
    return parts


def dominated_by(parts: dict[str, float]) -> str:
    """What fills the memory: "activations", or "states" (parameters, gradients and the optimizer's)."""
    states = sum(parts[c] for c in ("parameters", "gradients", "optimizer"))
    return "activations" if parts["activations"] > states else "states"


def predict(whole_bytes: dict[str, float], micro_batches: int, gradient_bytes: int) -> float:
    """Peak bytes of a step whose batch is cut, if it is where the last forward pass ends.

    Activations shrink with the number of micro-batches; gradients, gone between steps, are then there in forward.
    """
    fixed = sum(whole_bytes[c] for c in ("parameters", "optimizer", "inputs/buffers"))
    moving = whole_bytes["activations"] + whole_bytes["temporaries"]
    return fixed + (gradient_bytes if micro_batches > 1 else whole_bytes["gradients"]) + moving / micro_batches


def steps(workload: Workload, x: Tensor, y: Tensor, cuts: Sequence[int]) -> dict[int, Callable[[], Tensor]]:
    """A training step with AdamW for each number of micro-batches in `cuts`, all on the same model."""
    module = workload.module
    scaler = amp.scaler("fp32", x.device)
    found = {}
    for m in cuts:
        c = Conditions(optimizer="adam", micro_batches=m)
        arguments = (module, workload.loss, c.parts(x, y), c.make_optimizer(module), "fp32", scaler)
        found[m] = partial(amp.train_step, *arguments)
    return found


def gradient(workload: Workload, x: Tensor, y: Tensor, micro_batches: int) -> Tensor:
    """The gradient of the mean loss over all rows, in one vector, from this many micro-batches."""
    module = workload.module
    still = torch.optim.SGD(module.parameters(), lr=0.0)
    parts = Conditions(micro_batches=micro_batches).parts(x, y)
    amp.train_step(module, workload.loss, parts, still, "fp32", amp.scaler("fp32", x.device))
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
