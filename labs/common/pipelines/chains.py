"""Models as chains of layers: what a pipeline can cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from labs.common import models
from labs.common.models import Workload
from labs.kit.errors import BadInput, require


@dataclass(frozen=True)
class Chain:
    """A model whose layers run one after the other, each on the single tensor that the one before returned.

    `make_batch(batch_size)` and `loss(output, target)` are as in labs.models.Workload: rows first, and the loss a mean
    over them. The tensors between layers must have the rows first, too: micro-batches cut them there.
    """

    name: str
    layers: list[nn.Module]
    make_batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]

    def module(self) -> nn.Sequential:
        """The whole model in one piece; it shares its layers with the stages."""
        return nn.Sequential(*self.layers)

    def workload(self) -> Workload:
        """The same as other labs take it."""
        return Workload(self.module(), self.make_batch, self.loss)


def chain(name: str, seed: int = 0) -> Chain:
    """The chain `name`: a key of CHAINS, or package.module:factory of a Workload whose module is an nn.Sequential.

    Parameters depend on `seed` only, so that every rank builds the same model. BadInput in one line otherwise.
    """
    if factory := CHAINS.get(name):
        torch.manual_seed(seed)
        return factory()
    if ":" not in name:
        raise BadInput(f"there is no chain {name!r}: take one of {', '.join(CHAINS)}, or package.module:factory")
    workload = models.build(name, seed)
    require(
        isinstance(workload.module, nn.Sequential),
        f"model {name!r} is a {type(workload.module).__name__}: a pipeline cuts an nn.Sequential, so put its layers in "
        "one, in the order in which they run",
    )
    return Chain(name, list(workload.module), workload.make_batch, workload.loss)


def split(model: Chain, cuts: Sequence[int]) -> list[nn.Sequential]:
    """The stages of `model`: a new one begins at each layer number in `cuts`. `[]` gives one stage, `[2, 5]` three.

    The stages hold the chain's own layers, not copies. BadInput for a cut that would leave a stage empty.
    """
    last = len(model.layers)
    for cut in cuts:
        require(
            0 < cut < last,
            f"there is no cut at {cut}: {model.name} has {last} layers, so cuts go from 1 to {last - 1}",
        )
    require(
        all(a < b for a, b in pairwise(cuts)),
        f"cuts must rise, so that every stage has a layer, not {list(cuts)}",
    )
    return [nn.Sequential(*model.layers[a:b]) for a, b in pairwise([0, *cuts, last])]


def even_cuts(model: Chain, stages: int) -> list[int]:
    """Cuts into `stages` stages of equally many layers, as far as that goes. BadInput for more stages than layers."""
    layers = len(model.layers)
    require(
        1 <= stages <= layers,
        f"{model.name} has {layers} layers, not enough for {stages} stages: use at most {layers} ranks",
    )
    return [round(i * layers / stages) for i in range(1, stages)]


def dense(inputs: int, outputs: int) -> nn.Sequential:
    """A linear layer and a ReLU, initialised so that a deep stack neither fades nor explodes (He et al. 2015)."""
    linear = nn.Linear(inputs, outputs)
    nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
    nn.init.zeros_(linear.bias)
    return nn.Sequential(linear, nn.ReLU())


@cache
def _fashion() -> tuple[Tensor, Tensor]:
    """Training images of Fashion-MNIST, pooled and flat (10000, 196), with their labels."""
    from labs.common.data.fashion import vectors

    x, y, *_ = vectors(10_000, torch.device("cpu"))
    return x, y


def _images(batch_size: int) -> tuple[Tensor, Tensor]:
    x, y = _fashion()
    rows = torch.randint(len(x), (batch_size,))
    return x[rows], y[rows]


def deep_mlp(width: int = 512, layers: int = 8) -> Chain:
    """`layers` equal dense layers between a small first one (196 inputs) and a small last one (10 classes).

    Real Fashion-MNIST images of 14 x 14 pixels. Cut in the middle, both halves do nearly the same work.
    """
    body = [dense(width, width) for _ in range(layers)]
    return Chain("deep_mlp", [dense(196, width), *body, nn.Linear(width, 10)], _images, functional.cross_entropy)


class Embed(nn.Module):
    """Tokens to vectors: an embedding of each token plus one of its place."""

    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length) int64 -> (batch, length, width)."""
        return self.tokens(x) + self.places.weight[: x.shape[1]]


def _head(width: int, vocabulary: int) -> nn.Sequential:
    """Vectors to logits. Not tied to the embedding, which may be on another rank: its gradient would have to travel."""
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))


def char_gpt(width: int = 128, blocks: int = 4) -> Chain:
    """The character GPT on Moby-Dick: embedding, `blocks` equal blocks, head. A row is 64 characters."""
    from labs.common.models import text_models

    book = text_models.char_gpt()
    size = len(text_models.vocabulary())
    body = [text_models.Block(width, heads=4) for _ in range(blocks)]
    return Chain(
        "char_gpt", [Embed(size, width, text_models.CONTEXT), *body, _head(width, size)], book.make_batch, book.loss
    )


CHAINS: dict[str, Callable[[], Chain]] = {
    "deep_mlp": deep_mlp,
    "char_gpt": char_gpt,
}
