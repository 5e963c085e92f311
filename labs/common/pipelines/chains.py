"""Models as chains of layers, which a pipeline can split."""

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
    """A model whose layers run in sequence, each on the single tensor that the previous one returned.

    `make_batch(batch_size)` and `loss(output, target)` are as in labs.models.Workload: rows first, and the loss is a
    mean over them. Tensors between layers also need their rows first, because micro-batches split them there.
    """

    name: str
    layers: list[nn.Module]
    make_batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]

    def module(self) -> nn.Sequential:
        """Return the whole model in one piece; it shares its layers with the stages."""
        return nn.Sequential(*self.layers)

    def workload(self) -> Workload:
        """Return the model as a Workload for other labs."""
        return Workload(self.module(), self.make_batch, self.loss)


def chain(name: str, seed: int = 0) -> Chain:
    """Build the chain `name`: any model of labs.common.models.build whose module is an nn.Sequential.

    Parameters depend only on `seed`, so every rank builds the same model. BadInput in one line otherwise.
    """
    workload = models.build(name, seed)
    require(
        isinstance(workload.module, nn.Sequential),
        f"model {name!r} is a {type(workload.module).__name__}: a pipeline cuts an nn.Sequential, so put its layers in "
        "one, in the order in which they run",
    )
    return Chain(name.rpartition(":")[2], list(workload.module), workload.make_batch, workload.loss)


def split(model: Chain, cuts: Sequence[int]) -> list[nn.Sequential]:
    """Split `model` into stages; one starts at each layer number in `cuts`. `[]` gives one stage, `[2, 5]` three.

    The stages hold the chain's layers, not copies. BadInput for a cut that would leave a stage empty.
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
    """Return cuts into `stages` stages with nearly equal numbers of layers. BadInput for more stages than layers."""
    layers = len(model.layers)
    require(
        1 <= stages <= layers,
        f"{model.name} has {layers} layers, not enough for {stages} stages: use at most {layers} ranks",
    )
    return [round(i * layers / stages) for i in range(1, stages)]


class Embed(nn.Module):
    """Embeds tokens and adds an embedding of their positions."""

    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length) int64 to (batch, length, width)."""
        return self.tokens(x) + self.places.weight[: x.shape[1]]
