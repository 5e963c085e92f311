"""GPT-3, for counting: no machine of this course could hold it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labs.common.models import Workload
from labs.common.models.text_models import CharGPT, char_loss


@dataclass(frozen=True)
class GptShape:
    """Sizes of a GPT; the defaults are GPT-3 175B (Brown et al. 2020, arXiv 2005.14165, table 2.1)."""

    layers: int = 96
    width: int = 12288
    vocabulary: int = 50257
    heads: int = 96
    places: int = 2048
    """Longest sequence, in tokens."""

    @property
    def parameters(self) -> int:
        """12 w^2 + 13 w per layer, the two embeddings, and the last LayerNorm: 174.6 billion for GPT-3."""
        w = self.width
        return self.layers * (12 * w * w + 13 * w) + (self.vocabulary + self.places) * w + 2 * w


def gpt(shape: GptShape | None = None) -> Workload:
    """Build the course's GPT in the sizes of `shape` (default GPT-3); a row is one sequence of `places` tokens."""
    shape = shape or GptShape()
    module = CharGPT(shape.vocabulary, shape.width, shape.heads, shape.layers)
    module.places = nn.Embedding(shape.places, shape.width)

    def make_batch(rows: int) -> tuple[Tensor, Tensor]:
        x, y = torch.randint(shape.vocabulary, (2, rows, shape.places))
        return x.clone(), y.clone()

    return Workload(module, make_batch, char_loss)
