"""A transformer block made of two halves that tensor parallelism can cut, and the course's GPT built of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from labs.common import models
from labs.common.models import Workload, text_models
from labs.kit.errors import require


class Mlp(nn.Module):
    """width -> hidden -> width, with a GELU between. A unit that ranks share out is one hidden feature."""

    COLUMNS, ROW = ("up",), "down"

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.unit = 1

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        return self.down(functional.gelu(self.up(x)))


class Attention(nn.Module):
    """Causal self-attention with a projection each for queries, keys and values. The unit is one head.

    It counts the heads that it has by their size, so that it also works with a rank's share of them.
    """

    COLUMNS, ROW = ("query", "key", "value"), "out"

    def __init__(self, width: int, head_size: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, heads * head_size) for _ in range(3))
        self.out = nn.Linear(heads * head_size, width)
        self.unit = head_size

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> (batch, length, width)."""
        projections = (self.query, self.key, self.value)
        q, k, v = (f(x).unflatten(2, (-1, self.unit)).transpose(1, 2) for f in projections)  # (rows, heads, ...)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Attention and a perceptron, each on a normalised copy that is added back."""

    HALVES = ("attention", "mlp")

    def __init__(self, width: int, head_size: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, head_size, heads), Mlp(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> (batch, length, width)."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def separate(block: text_models.Block) -> TransformerBlock:
    """`block`, computing the same, with its one matrix for queries, keys and values cut into three.

    Cut by columns as it is, that matrix would give a rank all queries and no values.
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
    """`module` with each block of the course's GPTs in it replaced by one made of halves, in place."""
    for name, block in list(module.named_modules()):
        if isinstance(block, text_models.Block):
            module.set_submodule(name, separate(block))
    return module


def char_gpt(seed: int = 0) -> Workload:
    """The course's character GPT on Moby-Dick, its blocks made of halves."""
    workload = models.make("char_gpt", seed)
    separated(workload.module)
    return workload


def workload(name: str, width: int = 64, heads: int = 4, extra: int = 0, seed: int = 0) -> Workload:
    """What tensor parallelism is tried on: "mlp", "transformer" (one block), or "char_gpt", which has sizes of its own.

    `extra` hidden features and heads make sizes that ranks cannot share evenly. A row is 32 vectors of `width` numbers
    with a random target, except for char_gpt: 64 characters.
    """
    torch.manual_seed(seed)
    size = width // heads
    if name == "char_gpt":
        return char_gpt(seed)
    require(name in ("mlp", "transformer"), f"there is no model {name!r}: take mlp, transformer or char_gpt")
    module = Mlp(width, 4 * width + extra) if name == "mlp" else TransformerBlock(width, size, heads + extra)

    def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
        x, y = (torch.randn(batch_size, 32, width) for _ in range(2))
        return x.requires_grad_(), y  # as in the middle of a network: the layers before need a gradient, too

    return Workload(module, make_batch, functional.mse_loss)


def halves(module: nn.Module) -> list[str]:
    """Names of the halves in `module`, in order: its modules of kind Attention or Mlp."""
    return [name for name, m in module.named_modules() if isinstance(m, Attention | Mlp)]


def uneven_mlp() -> Workload:
    """A perceptron whose layers no number of ranks shares evenly (30-31-17-5), for fully sharded training."""
    module = nn.Sequential(nn.Linear(30, 31), nn.ReLU(), nn.Linear(31, 17), nn.ReLU(), nn.Linear(17, 5))
    return Workload(module, lambda n: (torch.randn(n, 30), torch.randint(5, (n,))), functional.cross_entropy)


def wide_mlp() -> Workload:
    """A model of states for fully sharded training: 6 layers of 512 x 512, whose activations are few beside them."""
    module = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())])
    return Workload(module, lambda n: (torch.randn(n, 512), torch.randint(512, (n,))), functional.cross_entropy)
