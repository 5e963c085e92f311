"""Models as chains of layers: what a pipeline can cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn

from labs.common import models
from labs.common.models import Workload
from labs.kit.errors import require


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
    """The chain `name`: what labs.common.models.build takes, if its module is an nn.Sequential.

    Parameters depend on `seed` only, so that every rank builds the same model. BadInput in one line otherwise.
    """
    workload = models.build(name, seed)
    require(
        isinstance(workload.module, nn.Sequential),
        f"model {name!r} is a {type(workload.module).__name__}: a pipeline cuts an nn.Sequential, so put its layers in "
        "one, in the order in which they run",
    )
    return Chain(name.rpartition(":")[2], list(workload.module), workload.make_batch, workload.loss)


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
