"""Cross-entropy over a large vocabulary without the logits of all tokens in memory: GPT-2's, whole and in chunks.

GPT-2 has 50,257 words: the logits of a token take 65 times the memory of the hidden state that they come from, and
softmax and backward need as much again. They are only needed for a moment, so they can be made chunk by chunk, and
made again in backward.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from labs.common.models import Workload
from labs.common.models.text_models import Block

WORDS, WIDTH, LAYERS, HEADS, CONTEXT = 50_257, 768, 12, 12, 1024  # GPT-2 small; Radford et al. 2019, table 2


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunks: int) -> Tensor:
    """Mean cross-entropy in nats of `hidden @ weight.T`: (tokens, width), (words, width), (tokens,) int64 -> scalar.

    Each chunk's logits go as soon as its sum is known; `checkpoint` makes them again in backward. 1 chunk: all at once.
    """

    def summed(hidden: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(hidden @ weight.T, labels, reduction="sum")

    if chunks == 1:
        return summed(hidden, labels) / len(labels)
    parts = zip(hidden.tensor_split(chunks), labels.tensor_split(chunks), strict=True)
    return torch.stack([checkpoint(summed, h, y, use_reentrant=False) for h, y in parts]).sum() / len(labels)


class GPT2(nn.Module):
    """A decoder-only transformer up to its last hidden state; the matrix that embeds words also predicts them."""

    def __init__(self, words: int = WORDS, width: int = WIDTH, layers: int = LAYERS, heads: int = HEADS) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, length) int64 -> hidden states (rows, length, width), and the matrix (words, width) for the loss."""
        places = self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.norm(self.blocks(self.words(tokens) + places)), self.words.weight


def gpt2(chunks: int = 1, length: int = CONTEXT, **sizes: int) -> Workload:
    """GPT-2 on random tokens, its loss in `chunks`; a row is a sequence of `length` tokens. For traces: no dropout."""
    model = GPT2(**sizes)
    words = model.words.num_embeddings

    def make_batch(rows: int) -> tuple[Tensor, Tensor]:
        return torch.randint(words, (rows, length)), torch.randint(words, (rows, length))

    return Workload(model, make_batch, partial(_loss, chunks))


def _loss(chunks: int, output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    hidden, weight = output
    return chunked_cross_entropy(hidden.flatten(0, 1), weight, target.flatten(), chunks)
