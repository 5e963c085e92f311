"""The same schedules by torch.distributed.pipelining, and those that only it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from labs.common.pipelines.chains import Chain, even_cuts, split
from labs.kit.errors import require
from labs.kit.rank import Rank

# Class and stages per rank. With two, a rank's second stage follows the last rank's first one, or mirrors it (V).
SCHEDULES: dict[str, tuple[str, int]] = {
    "gpipe": ("ScheduleGPipe", 1),
    "1f1b": ("Schedule1F1B", 1),
    "interleaved_1f1b": ("ScheduleInterleaved1F1B", 2),
    "interleaved_zero_bubble": ("ScheduleInterleavedZeroBubble", 2),
    "zero_bubble_v": ("ScheduleZBVZeroBubble", 2),
    "dual_pipe_v": ("ScheduleDualPipeV", 2),
}

Step = Callable[[Tensor, Tensor], float | None]


def own_stages(name: str, rank: int, ranks: int) -> list[int]:
    """Numbers of the stages that `rank` holds in schedule `name`, a key of SCHEDULES."""
    kind, each = SCHEDULES[name]
    if each == 1:
        return [rank]
    return [rank, 2 * ranks - 1 - rank if kind.endswith(("V", "ZBVZeroBubble")) else ranks + rank]


def stages_in_all(name: str, ranks: int) -> int:
    """Number of stages that schedule `name` needs on `ranks` ranks."""
    return SCHEDULES[name][1] * ranks


def possible(model: Chain, rank: Rank) -> list[str]:
    """The schedules for which `model` has layers enough; with one rank those of one stage only.

    None on a shared GPU: torch sends what is on the GPU, and gloo cannot.
    """
    if rank.device.type != "cpu" and "nccl" not in rank.backend:
        return []
    ranks, layers = rank.world_size, len(model.layers)
    return [n for n, (_, each) in SCHEDULES.items() if each * ranks <= layers and (each == 1 or ranks > 1)]


def refusal(name: str, model: Chain, micro_batches: int, rank: Rank) -> str:
    """What torch says, on one line, if schedule `name` does not take so few micro-batches; "" if it does."""
    try:
        make(name, model, micro_batches, rank)
    except ValueError as e:
        return " ".join(str(e).split())
    return ""


def make(
    name: str, model: Chain, micro_batches: int, rank: Rank, cuts: Sequence[int] | None = None
) -> tuple[Step, dict[int, nn.Module]]:
    """`step(inputs, targets)` of torch's schedule `name`, and this rank's stages by number, trained in place.

    The whole batch goes in on every rank; torch cuts it into micro-batches. The step returns the mean loss on the rank
    of the last stage, None elsewhere. BadInput for cuts that do not fit the number of stages.
    """
    from torch.distributed import pipelining  # a second or two, which a bad option need not wait for

    kind, each = SCHEDULES[name]
    total = stages_in_all(name, rank.world_size)
    cuts = even_cuts(model, total) if cuts is None else list(cuts)
    require(len(cuts) == total - 1, f"{name} on {rank.world_size} ranks has {total} stages: give {total - 1} cuts")
    modules = split(model, cuts)
    own = {s: modules[s].to(rank.device) for s in own_stages(name, rank.rank, rank.world_size)}
    stages = [pipelining.PipelineStage(m, s, total, rank.device) for s, m in own.items()]
    schedule = getattr(pipelining.schedules, kind)(
        stages if each > 1 else stages[0], micro_batches, loss_fn=model.loss, scale_grads=True
    )
    return _step(schedule, 0 in own, total - 1 in own), own


def _step(schedule: Any, first: bool, last: bool) -> Step:
    def step(inputs: Tensor, targets: Tensor) -> float | None:
        losses: list[Tensor] = []
        wanted = {"target": targets, "losses": losses} if last else {}
        schedule.step(*([inputs] if first else []), return_outputs=False, **wanted)
        return sum(x.item() for x in losses) / len(losses) if last else None

    return step
