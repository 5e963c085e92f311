"""BERT-large, ResNet-152, ResNet-50 and VGG-16, written out, because articles and benchmarks quote their numbers.

They are meant for counting on the meta device or under FakeTensorMode, where nothing is allocated. Smaller sizes of the
same classes are trainable models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from labs.common.models import Workload

MASKED = 0.15  # share of tokens that BERT predicts; Devlin et al. 2018, arXiv 1810.04805


@dataclass(frozen=True)
class BertShape:
    """Sizes of a BERT; the defaults are BERT-large, uncased (Devlin et al. 2018)."""

    layers: int = 24
    hidden: int = 1024
    heads: int = 16
    vocabulary: int = 30522
    places: int = 512
    """Longest sequence, in tokens."""
    dropout: float = 0.1
    attention: Literal["eager", "sdpa"] = "eager"
    """Unfused, or torch's scaled_dot_product_attention, which keeps no seq x seq matrix."""


TINY_BERT = BertShape(layers=2, hidden=64, heads=4, vocabulary=512, places=64)


class Attention(nn.Module):
    """Multi-head self-attention without a mask, because all sequences are full."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.shape = shape
        self.query, self.key, self.value = (nn.Linear(shape.hidden, shape.hidden) for _ in range(3))
        self.out = nn.Linear(shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, hidden) to (batch, seq, hidden)."""
        projections, heads = (self.query, self.key, self.value), self.shape.heads
        q, k, v = (f(x).unflatten(2, (heads, -1)).transpose(1, 2) for f in projections)  # (batch, heads, seq, ...)
        dropout = self.shape.dropout if self.training else 0.0
        if self.shape.attention == "sdpa":
            seen = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        else:
            scores = torch.matmul(q, k.transpose(2, 3)) / q.shape[-1] ** 0.5  # (batch, heads, seq, seq)
            seen = torch.matmul(functional.dropout(functional.softmax(scores, -1), dropout), v)
        return self.out(seen.transpose(1, 2).flatten(2))


class BertLayer(nn.Module):
    """Attention and an MLP; each result is added to its input, then normalised (post-LN)."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.up, self.down = nn.Linear(shape.hidden, 4 * shape.hidden), nn.Linear(4 * shape.hidden, shape.hidden)
        self.norm1, self.norm2 = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, hidden) to (batch, seq, hidden)."""
        x = self.norm1(x + self.dropout(self.attention(x)))
        return self.norm2(x + self.dropout(self.down(functional.gelu(self.up(x)))))


class Bert(nn.Module):
    """BERT with its masked-language-model head, which shares the word embedding's matrix (weight tying)."""

    def __init__(self, shape: BertShape | None = None) -> None:
        super().__init__()
        self.shape = shape = shape or BertShape()
        self.words, self.places = (nn.Embedding(n, shape.hidden) for n in (shape.vocabulary, shape.places))
        self.segments = nn.Embedding(2, shape.hidden)
        self.norm, self.dropout = nn.LayerNorm(shape.hidden), nn.Dropout(shape.dropout)
        self.layers = nn.Sequential(*(BertLayer(shape) for _ in range(shape.layers)))
        self.transform, self.head_norm = nn.Linear(shape.hidden, shape.hidden), nn.LayerNorm(shape.hidden)
        self.head_bias = nn.Parameter(torch.zeros(shape.vocabulary))
        for table in (self.words, self.places, self.segments):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, seq) int64 to (batch, masked_places(seq), vocabulary) logits. All tokens are in segment 0."""
        seq = tokens.shape[1]
        x = self.words(tokens) + self.places(torch.arange(seq, device=tokens.device)) + self.segments.weight[0]
        x = self.layers(self.dropout(self.norm(x)))
        masked = torch.arange(masked_places(seq), device=tokens.device) * int(1 / MASKED)
        x = self.head_norm(functional.gelu(self.transform(x.index_select(1, masked))))
        return functional.linear(x, self.words.weight, self.head_bias)


def masked_places(seq: int) -> int:
    """Return how many tokens of a sequence BERT predicts; at least one."""
    return max(1, int(MASKED * seq))


def bert(shape: BertShape | None = None, seq: int = 128) -> Workload:
    """Build `shape` (default BERT-large) on random sequences of `seq` tokens; a row is one sequence."""
    shape = shape or BertShape()

    def make_batch(rows: int) -> tuple[Tensor, Tensor]:
        return torch.randint(shape.vocabulary, (rows, seq)), torch.randint(shape.vocabulary, (rows, masked_places(seq)))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())

    return Workload(Bert(shape), make_batch, loss)


def tiny_bert() -> Workload:
    """Build two layers of width 64 on 64 tokens: BERT's memory in miniature."""
    return bert(TINY_BERT, seq=64)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution with BatchNorm, added to the input; the 3x3 one may halve the image."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != 4 * width:
            conv = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, height, width) to (batch, 4 * width, height / stride, width / stride)."""
        y = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        y = functional.relu(self.bn2(self.conv2(y)), inplace=True)
        return functional.relu(self.bn3(self.conv3(y)) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """A bottleneck ResNet (He et al. 2015, arXiv 1512.03385); the defaults are ResNet-152 for 1000 classes."""

    def __init__(self, blocks: tuple[int, ...] = (3, 8, 36, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        stages, inputs = [], width
        for i, count in enumerate(blocks):
            layers, stage_width = [], width * 2**i
            for j in range(count):
                layers.append(Bottleneck(inputs, stage_width, stride=2 if i > 0 and j == 0 else 1))
                inputs = 4 * stage_width
            stages.append(nn.Sequential(*layers))
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 3, height, width) to (batch, classes) logits."""
        x = functional.max_pool2d(functional.relu(self.bn(self.conv(x)), inplace=True), 3, 2, 1)
        return self.head(self.stages(x).mean((2, 3)))


def resnet(blocks: tuple[int, ...] = (3, 8, 36, 3), width: int = 64, classes: int = 1000, side: int = 224) -> Workload:
    """Build a ResNet (default ResNet-152) on random square images; a row is one image."""

    def make_batch(rows: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, 3, side, side), torch.randint(classes, (rows,))

    return Workload(ResNet(blocks, width, classes), make_batch, functional.cross_entropy)


def tiny_resnet() -> Workload:
    """Build one bottleneck per stage, an eighth of the width, on 32 x 32 images."""
    return resnet((1, 1, 1, 1), width=8, classes=10, side=32)
