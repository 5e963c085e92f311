"""Whether a pipeline computes the gradient that one process would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from labs.common.pipelines.chains import Chain, even_cuts
from labs.common.pipelines.engine import Pipeline, new_links
from labs.common.precision.rounding import rounding_error
from labs.kit.rank import Rank
from labs.pipeline_parallel import torch_schedules
from labs.pipeline_parallel.bench import actions


def reference(model: Chain, x: Tensor, y: Tensor) -> tuple[float, list[list[Tensor]]]:
    """Loss and gradients, layer by layer, of the whole batch in one process. The model's own gradients stay None."""
    module = model.module()
    loss = model.loss(module(x), y)
    flat = iter(torch.autograd.grad(loss, list(module.parameters())))
    return loss.item(), [[next(flat) for _ in layer.parameters()] for layer in model.layers]


def gradient_error(
    stages: Mapping[int, nn.Module], cuts: Sequence[int], expected: list[list[Tensor]], rank: Rank
) -> float:
    """||g - G|| / ||G|| over all stages of all ranks; `stages` are this rank's by number, `expected` of reference()."""
    bounds = list(pairwise([0, *cuts, len(expected)]))
    difference = total = 0.0
    for number, stage in stages.items():
        wanted = [g for layer in expected[slice(*bounds[number])] for g in layer]
        for p, g in zip(stage.parameters(), wanted, strict=True):
            own = torch.zeros_like(g) if p.grad is None else p.grad
            difference += (own - g).double().square().sum().item()
            total += g.double().square().sum().item()
    differences, totals = (sum(part) for part in zip(*rank.gather((difference, total)), strict=True))
    return (differences / totals) ** 0.5


def batch(model: Chain, rank: Rank) -> tuple[int, Tensor, Tensor]:
    """(micro-batches, input, target) of the comparison: two micro-batches per rank of two rows each."""
    m = 2 * rank.world_size
    model.module().to(rank.device)
    x, y = (t.to(rank.device) for t in model.make_batch(2 * m))
    return m, x, y


def rounding(model: Chain, rank: Rank) -> float:
    """How far rounding alone moves the gradient of such a batch: labs.common.precision.rounding."""
    _, x, y = batch(model, rank)
    return rank.slowest([rounding_error(model.module(), model.loss, x, y)])[0]


@dataclass(frozen=True)
class Parity:
    """Relative errors of one schedule's gradient and loss; `case` says of which."""

    case: dict[str, Any]
    gradient: float
    loss: float


def compare(model: Chain, cuts: list[int], rank: Rank, wait_s: float) -> Iterator[Parity]:
    """Every schedule against one process: cut at `cuts`, and as unevenly as can be; torch's cut evenly.

    Two micro-batches per rank: as many as torch's schedules with two stages per rank need.
    """
    m, x, y = batch(model, rank)
    loss, expected = reference(model, x, y)

    def judged(stages: dict[int, nn.Module], places: list[int], found: float | None, **case: Any) -> Parity:
        error = gradient_error(stages, places, expected, rank)
        found = next(f for f in rank.gather(found) if f is not None)
        return Parity(case, error, abs(found - loss) / abs(loss))

    links = new_links()
    uneven = list(range(1, rank.world_size))  # one layer each, and all the rest on the last rank
    for label, places in {"even": cuts, "uneven": uneven}.items():
        pipeline = Pipeline(model, places, rank, wait_s, links)
        for schedule, parts in (("naive", 1), ("gpipe", m), ("1f1b", m)):
            pipeline.module.zero_grad()
            found = pipeline.step(actions(schedule, parts, rank), x.chunk(parts), y.chunk(parts))
            case = {"schedule": schedule, "by": "hand", "micro_batches": parts, "cuts": label}
            yield judged({rank.rank: pipeline.module}, places, found, **case)
    for schedule in torch_schedules.possible(model, rank):
        step, stages = torch_schedules.make(schedule, model, m, rank)
        nn.ModuleList(stages.values()).zero_grad()
        places = even_cuts(model, torch_schedules.stages_in_all(schedule, rank.world_size))
        case = {"schedule": schedule, "by": "torch", "micro_batches": m, "cuts": "even"}
        yield judged(stages, places, step(x, y), **case)
