"""Deep models whose activations outweigh their parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from labs.common import models
from labs.common.data.fashion import vectors
from labs.common.models import Workload
from labs.common.models.large_models import BertShape, bert
from labs.kit.errors import BadInput

NARROW = BertShape(layers=24, hidden=64, heads=4, vocabulary=512, places=64)


class ResidualBlock(nn.Module):
    """A transformer's perceptron: normalised, widened four times, dropped out, added to its input."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) -> (batch, width)."""
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


def deep_mlp(layers: int = 24, width: int = 96) -> Workload:
    """`layers` residual blocks with dropout 0.1 on Fashion-MNIST; a row is an image of 196 numbers."""
    chain = nn.Sequential(*(ResidualBlock(width, 0.1) for _ in range(layers)))
    x, y, _, _ = vectors(8192, torch.device("cpu"))

    def make_batch(rows: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(len(x), (rows,))
        return x[drawn], y[drawn]

    module = nn.ModuleDict({"stem": nn.Linear(196, width), "blocks": chain, "head": nn.Linear(width, 10)})
    return Workload(InOrder(module), make_batch, functional.cross_entropy)


class InOrder(nn.Module):
    """Its parts, one after the other, by name."""

    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        """Whatever the first part takes -> what the last one gives."""
        for part in self.parts.values():
            x = part(x)
        return x


def narrow_bert() -> Workload:
    """As deep as BERT-large (24 blocks, dropout 0.1) and 16 times narrower; a row is 64 tokens."""
    return bert(NARROW, seq=64)


def thin_chain(layers: int, width: int) -> Workload:
    """`layers` times Linear and Tanh: each keeps its output, which is the next one's input, and nothing else."""
    module = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))

    def make_batch(rows: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, width), torch.randn(rows, width)

    # A loss that keeps nothing, so that only the chain counts. (On a CPU mse_loss keeps memory for all of its terms.)
    return Workload(module, make_batch, lambda output, target: output.mean())


DEEP = {"deep_mlp": deep_mlp, "narrow_bert": narrow_bert}


def build(name: str, seed: int) -> Workload:
    """A model of DEEP, or what models.build makes of `name`. BadInput if there is no such model."""
    if name in DEEP:
        torch.manual_seed(seed)
        return DEEP[name]()
    if name not in models.MODELS and ":" not in name:
        known = ", ".join((*DEEP, *models.MODELS))
        raise BadInput(f"there is no model {name!r}: take one of {known}, or package.module:factory")
    return models.build(name, seed)
