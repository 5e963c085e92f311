"""A small GPT that predicts the next character of Moby-Dick."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from labs.common.models import Workload

CONTEXT = 64  # characters
HELD_OUT = 0.1  # the last part of the book, never used for training


def _fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _eager_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute the same, unfused: keeps a length x length table for backward."""
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(2, 3) / q.shape[3] ** 0.5).masked_fill(later, float("-inf"))
    return scores.softmax(-1) @ v


class Block(nn.Module):
    """Causal self-attention and an MLP, each on a normalised copy that is added back."""

    def __init__(self, width: int, heads: int, fused: bool = True) -> None:
        super().__init__()
        self.heads, self.attention = heads, _fused_attention if fused else _eager_attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to (batch, length, width)."""
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = self.attention(*qkv)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class CharGPT(nn.Module):
    """A decoder-only transformer that embeds and predicts characters with the same matrix (weight tying)."""

    def __init__(
        self, vocabulary: int = 80, width: int = 64, heads: int = 4, layers: int = 3, fused: bool = True
    ) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads, fused) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for table in (self.characters, self.places):
            nn.init.normal_(table.weight, std=0.02)  # as GPT-2, so that the first loss is about ln(vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length <= 64) int64 to (batch, length, vocabulary) logits of each next character."""
        places = self.places(torch.arange(x.shape[1], device=x.device))
        return functional.linear(self.norm(self.blocks(self.characters(x) + places)), self.characters.weight)


@cache
def _book() -> tuple[Tensor, str]:
    from labs.common.data import moby_dick

    text = moby_dick()
    vocabulary = "".join(sorted(set(text)))
    number = {character: i for i, character in enumerate(vocabulary)}
    return torch.tensor([number[c] for c in text], dtype=torch.int64), vocabulary


def vocabulary() -> str:
    """Return the book's 80 characters; a character's number is its index."""
    return _book()[1]


def char_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return mean cross-entropy in nats: (batch, length, vocabulary) logits, (batch, length) int64 -> scalar."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def char_gpt(fused: bool = True) -> Workload:
    """Build CharGPT (159,296 parameters) on random excerpts of Moby-Dick's first 90 %. A row is 64 characters."""
    book = _book()[0]
    train = book[: round((1 - HELD_OUT) * len(book))]

    def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
        return _rows(train, torch.randint(len(train) - CONTEXT, (batch_size,)))

    return Workload(CharGPT(len(vocabulary()), fused=fused), make_batch, char_loss)


def char_gpt_eager() -> Workload:
    """Build the same model with unfused attention: equal up to rounding, with other kernels."""
    return char_gpt(fused=False)


BLOCK_WIDTH, BLOCK_HEADS, BLOCK_TOKENS = 768, 12, 128


def gpt_block() -> Workload:
    """Build one block of the smallest GPT-2 (768 wide, 12 heads; 7.1 M parameters). A row is 128 tokens."""
    shape = (BLOCK_TOKENS, BLOCK_WIDTH)

    def make_batch(rows: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, *shape), torch.randn(rows, *shape)

    return Workload(Block(BLOCK_WIDTH, BLOCK_HEADS), make_batch, functional.mse_loss)


def held_out(rows: int) -> tuple[Tensor, Tensor]:
    """Return `rows` evenly spaced rows of the book's last 10 %: (rows, 64) int64 input and target, always the same."""
    book = _book()[0]
    test = book[round((1 - HELD_OUT) * len(book)) :]
    return _rows(test, torch.linspace(0, len(test) - CONTEXT - 1, rows).long())


def _rows(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return (rows, CONTEXT) of `text` from each start, and the same shifted by one character."""
    characters = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return characters[:, :-1].contiguous(), characters[:, 1:].contiguous()
