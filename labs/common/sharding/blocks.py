"""A transformer block of two halves that tensor parallelism can split, and conversion of the course's GPT to it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from labs.common import models
from labs.common.models import Workload, text_models


class Mlp(nn.Module):
    """width -> hidden -> width, with a GELU in between. Ranks share its hidden features (its units)."""

    COLUMNS, ROW = ("up",), "down"

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.unit = 1

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to (..., width)."""
        return self.down(functional.gelu(self.up(x)))


class Attention(nn.Module):
    """Causal self-attention with separate projections for queries, keys and values. Ranks share its heads (its units).

    It derives the number of heads from their size, so it also works with a rank's share of them.
    """

    COLUMNS, ROW = ("query", "key", "value"), "out"

    def __init__(self, width: int, head_size: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, heads * head_size) for _ in range(3))
        self.out = nn.Linear(heads * head_size, width)
        self.unit = head_size

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to (batch, length, width)."""
        projections = (self.query, self.key, self.value)
        q, k, v = (f(x).unflatten(2, (-1, self.unit)).transpose(1, 2) for f in projections)  # (rows, heads, ...)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Attention and an MLP, each on a normalised copy that is added back."""

    def __init__(self, width: int, head_size: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, head_size, heads), Mlp(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to (batch, length, width)."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def separate(block: text_models.Block) -> TransformerBlock:
    """Return an equivalent of `block` with its single query-key-value matrix split into three.

    Split by columns directly, that matrix would give a rank all queries and no values.
    """
    width = block.qkv.in_features
    ours = TransformerBlock(width, width // block.heads, block.heads)
    pairs = [
        (ours.norm1, block.norm1),
        (ours.norm2, block.norm2),
        (ours.attention.out, block.out),
        (ours.mlp.up, block.mlp[0]),
        (ours.mlp.down, block.mlp[2]),
    ]
    for mine, theirs in pairs:
        mine.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        for i, mine in enumerate((ours.attention.query, ours.attention.key, ours.attention.value)):
            mine.weight.copy_(block.qkv.weight.chunk(3)[i])
            mine.bias.copy_(block.qkv.bias.chunk(3)[i])
    return ours


def separated(module: nn.Module) -> nn.Module:
    """Replace each block of the course's GPTs in `module` by one made of halves, in place."""
    for name, block in list(module.named_modules()):
        if isinstance(block, text_models.Block):
            module.set_submodule(name, separate(block))
    return module


def halves(module: nn.Module) -> list[str]:
    """Return the names of the halves in `module`, in order: its Attention and Mlp modules."""
    return [name for name, m in module.named_modules() if isinstance(m, Attention | Mlp)]


def row_transformer(width: int = 128, blocks: int = 4) -> Workload:
    """Build notebook 06's model, a small transformer that reads Fashion-MNIST images row by row.

    Split in the middle, both halves do nearly the same work.
    """
    body = [TransformerBlock(width, 32, width // 32) for _ in range(blocks)]
    layers = [nn.Flatten(1, 2), nn.Linear(28, width), *body, nn.Flatten(), nn.Linear(28 * width, 10)]
    return Workload(nn.Sequential(*layers), models.fashion_batch, functional.cross_entropy)
