"""What torch.utils.checkpoint does as it is called: with use_reentrant left out, True and False, and other switches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from labs.common.memory.recomputation import recompute
from labs.common.models.text_models import CharGPT

VARIANTS: dict[str, dict[str, bool]] = {
    "left out": {},
    "use_reentrant=True": {"use_reentrant": True},
    "use_reentrant=False": {"use_reentrant": False},
}


class TwoLayers(nn.Module):
    """A layer that is checkpointed, as in the articles, and a head that is not."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(16, 32), nn.Dropout(dropout), nn.Tanh(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 4)
        self.how: dict[str, Any] | None = None
        """Keyword arguments of checkpoint; None calls the layer plainly."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 16) -> (batch, 4)."""
        return self.head(self.layer(x) if self.how is None else checkpoint(self.layer, x, **self.how))


@dataclass(frozen=True)
class Outcome:
    """What came of a call."""

    error: str
    """Type and first sentence; empty if there was none."""
    warned: tuple[tuple[str, str], ...]
    """(category, text) of each warning."""
    without_gradient: int
    """Parameters whose gradient is None afterwards."""


def outcomes(x: Tensor) -> dict[tuple[str, str], Outcome]:
    """By (scenario, variant), for a batch `x` of shape (rows, 16) that requires no gradient, as data does not."""
    return {
        (name, variant): _try(scenario, x, how)
        for name, scenario in SCENARIOS.items()
        for variant, how in VARIANTS.items()
    }


def _try(scenario: Callable[[TwoLayers, Tensor, dict], object], x: Tensor, how: dict[str, bool]) -> Outcome:
    torch.manual_seed(0)
    model, error = TwoLayers().to(x.device), ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            scenario(model, x, how)
        except (RuntimeError, ValueError) as e:
            error = f"{type(e).__name__}: {str(e).split('. ')[0]}"
    missing = sum(p.grad is None for part in (model.layer, model.head) for p in part.parameters())
    return Outcome(error, tuple((w.category.__name__, str(w.message)) for w in caught), missing)


def _later_layer(model: TwoLayers, x: Tensor, how: dict) -> None:
    model.how = how
    model(x.clone().requires_grad_()).sum().backward()  # what an earlier layer returns requires a gradient


def _first_layer(model: TwoLayers, x: Tensor, how: dict) -> None:
    model.how = how
    model(x).sum().backward()


def _whole_model(model: TwoLayers, x: Tensor, how: dict) -> None:
    checkpoint(model, x, **how).sum().backward()


def _autograd_grad(model: TwoLayers, x: Tensor, how: dict) -> None:
    hidden = checkpoint(model.layer, x.clone().requires_grad_(), **how)
    gradients = torch.autograd.grad(model.head(hidden).sum(), list(model.parameters()))
    for p, g in zip(model.parameters(), gradients, strict=True):
        p.grad = g


def _keyword(model: TwoLayers, x: Tensor, how: dict) -> None:
    checkpoint(lambda x, scale: scale * model(x), x.clone().requires_grad_(), scale=2.0, **how).sum().backward()


def _ddp(model: TwoLayers, x: Tensor, how: dict) -> None:
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    model.how, model.spare = how, nn.Parameter(x.new_zeros(1))  # an unused one, which find_unused_parameters is for
    ddp = DistributedDataParallel(model, process_group=alone, find_unused_parameters=True)
    ddp(x.clone().requires_grad_()).sum().backward()


SCENARIOS = {
    "a later layer": _later_layer,
    "first layer, on data": _first_layer,
    "whole model, on data": _whole_model,
    "torch.autograd.grad": _autograd_grad,
    "keyword argument": _keyword,
    "DDP, find_unused_parameters": _ddp,
}


def gradient_error(x: Tensor, preserve_rng_state: bool) -> float:
    """|g - g0| / |g0| of a checkpointed layer with dropout 0.5, against the same one that keeps its activations."""
    model = TwoLayers(dropout=0.5).to(x.device)

    def gradient(how: dict[str, bool] | None) -> Tensor:
        model.how = how
        torch.manual_seed(0)
        return torch.cat([g.flatten() for g in torch.autograd.grad(model(x).square().sum(), list(model.parameters()))])

    plain = gradient(None)
    again = gradient({"use_reentrant": False, "preserve_rng_state": preserve_rng_state})
    return float((again - plain).norm() / plain.norm())


def batches_counted(x: Tensor, way: str) -> int:
    """What BatchNorm says it has seen after one step: of "checkpoint" itself, or of "recompute()"."""
    layers = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(2)]
    model = nn.Sequential(*layers).to(x.device)
    if way == "checkpoint":
        checkpoint(model, x, use_reentrant=False).sum().backward()
    else:
        recompute(model, "block")(x).sum().backward()
    return int(layers[0][1].num_batches_tracked)


def flops(device: torch.device, way: str) -> int:
    """FLOPs of a step of char_gpt's model: "none", "block", or "block, to the end" without torch's early stop.

    Its blocks end with a Linear whose output nothing keeps, so that torch need not compute it again.
    """
    torch.manual_seed(0)
    model = recompute(CharGPT().to(device), "none" if way == "none" else "block")
    characters = torch.randint(80, (4, 64), device=device)
    with FlopCounterMode(display=False) as counter, set_checkpoint_early_stop(way != "block, to the end"):
        model(characters).square().mean().backward()
    return counter.get_total_flops()
