"""How far rounding alone moves a gradient: the yardstick for "equal up to rounding".

A fixed limit such as 1e-5 would depend on the model and on the kernels of the processor: convolutions by Winograd's
method or TF32 round hundreds of times more coarsely than plain sums. So the limit is measured where it is needed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from labs.kit.record import Record, Records

METRIC = "rounding_relative_error"
TIMES = 16
"""Two results that are both r from the exact one are at most 2 r from each other (triangle inequality). Eight times
that is left for sums in a less favourable order. A mistake, such as a missing factor or share, is larger by far."""


def rounding_error(module: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> float:
    """||g - G|| / ||G||: g the gradient of `loss(module(x), y)` in the module's own format, G the same in FP64.

    One process, no communication. The module and its gradients stay as they are; it must not draw random numbers.
    """
    exact = copy.deepcopy(module).double()
    own, reference = (
        torch.autograd.grad(loss(m(t), target), [p for p in m.parameters() if p.requires_grad])
        for m, t, target in ((module, x.detach(), y), (exact, _double(x), _double(y)))
    )
    g, whole = (torch.cat([t.flatten().double() for t in tensors]) for tensors in (own, reference))
    return ((g - whole).norm() / whole.norm()).item()


def _double(t: Tensor) -> Tensor:
    return t.detach().double() if t.is_floating_point() else t


def beyond(run: Records) -> list[Record]:
    """Those of a run's gradient_relative_error that rounding does not explain.

    A lab with several models records one yardstick for each. ValueError if one is missing.
    """
    limits = {r.case.get("model"): TIMES * r.value for r in run.where(METRIC)}
    errors = run.where("gradient_relative_error")
    if missing := {r.case.get("model") for r in errors} - set(limits):
        raise ValueError(f"no {METRIC} of model {', '.join(map(str, missing))}")
    return [r for r in errors if not r.value <= limits[r.case.get("model")]]
