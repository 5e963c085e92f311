"""What does a layer cost that two devices compute together?

    python -m labs.tensor_parallel                              # launches its own ranks
    torchrun --nproc-per-node 2 -m labs.tensor_parallel --widths 1024 --rows 128 4096

About 9 s on 2 CPU cores. The mechanism is in labs/common/sharding/tensor.py. Ways to train with the same batch:
  single     one rank has everything
  by hand    every rank has a part of each layer and sees the whole batch
  dtensor    the same through torch's parallelize_module
  dtensor, no prepared input   as one writes it first: the input of a half becomes a DTensor three times
  ddp        every rank has the whole model and a part of the batch
  pipeline   every rank has some whole layers, and the batch comes in micro-batches
"""

from __future__ import annotations

import logging
import math
import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from labs.common.communication.wire import in_turn
from labs.common.data_parallel.scaling import ring_all_reduce_bytes
from labs.common.data_parallel.wire import sent_by
from labs.common.memory import saved_tensors
from labs.common.models import Workload, gradient_bytes
from labs.common.precision.rounding import METRIC, beyond, rounding_error
from labs.common.sharding import blocks
from labs.common.sharding.blocks import Mlp, halves
from labs.common.sharding.link import all_reduce_link
from labs.common.sharding.tensor import by_hand, gradient_error, share, with_dtensor
from labs.common.sharding.traffic import Traffic
from labs.common.tensors import nbytes
from labs.common.timing.collectives import LatencyBandwidth
from labs.kit import measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.tensor_parallel.mlps import MICRO_BATCHES, layers, perceptrons, steps

WAYS = ("by hand", "dtensor", "dtensor, no prepared input")
SMOKE = {"models": ("mlp", "transformer"), "rows": (32,)}  # with --smoke in a shell


@dataclass(frozen=True)
class Config:
    """What is cut into parts, and which cells of the map are timed."""

    models: tuple[Literal["mlp", "transformer", "char_gpt"], ...] = ("mlp", "transformer", "char_gpt")
    """Tried for gradients, bytes and memory: half a block, a block, and the character GPT on Moby-Dick."""
    batch_size: int = 8
    """Rows of that batch, 32 vectors (char_gpt: 64 characters) each; all ranks see all of them."""
    widths: tuple[int, ...] = (256,)
    """Width of the perceptrons that are timed: width -> 4 width -> width, two of them, or one per rank."""
    rows: tuple[int, ...] = (32, 128, 512, 2048)
    """Vectors in the whole batch that is timed; DDP gives each rank its part. With some 4 x width rows, tensor parallel
    sends as much as DDP: the sweep goes past it."""
    seconds: float = 1.5
    """Time for all rounds, in s. A slower machine takes fewer rounds and has wider intervals."""
    rounds: int | None = None
    """Times that the ways take turns, per cell; by default as many as fit into `seconds`, at least 6."""
    seed: int = 0
    """Seed of models and data."""
    smoke: bool = False
    """One cell, two rounds."""

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, f"batch_size must be at least 1, not {self.batch_size}")
        require(len(self.widths) > 0 and min(self.widths) >= 1, "widths must hold positive numbers")
        require(len(self.rows) > 0 and min(self.rows) >= 1, "rows must hold positive numbers")
        measure.require_budget(self.seconds, self.rounds)


def check_layout(config: Config, world_size: int) -> None:
    """BadInput if there are too many ranks for a model's heads, or DDP cannot share out the rows."""
    for name in config.models:
        module = blocks.workload(name).module
        for half in (module.get_submodule(n) for n in halves(module)):
            share(half, 0, world_size)
    parts = math.lcm(world_size, MICRO_BATCHES)
    for rows in config.rows:
        require(
            rows % parts == 0,
            f"rows {rows} cannot be split over {world_size} ranks and into {MICRO_BATCHES} "
            f"micro-batches: take multiples of {parts}",
        )


def predict(half_blocks: int, vectors: int, width: int, ranks: int) -> dict[str, float]:
    """Collectives and bytes of one phase, forward or backward, by closed form; FP32.

    Each half of a block makes one all-reduce of a number for each of `vectors` x `width`: neither fewer ranks nor
    more change its size, and a ring sends 2 (n-1)/n of it from every rank.
    """
    size = half_blocks * 4 * vectors * width
    return {"all_reduces": half_blocks, "sent_bytes": ring_all_reduce_bytes(size, ranks)}


def predict_step_s(single_s: float, half_blocks: int, message: int, ranks: int, link: LatencyBandwidth) -> float:
    """t1 / n, plus an all-reduce of `message` bytes per half and phase that nothing hides."""
    return single_s / ranks + (2 * half_blocks * link.seconds(message) if ranks > 1 else 0.0)


def predict_activations(vectors: int, width: int, hidden: int) -> int:
    """Bytes that one perceptron with `hidden` features on this rank keeps for backward: input, GELU's in- and output.

    The input is whole on every rank: only the other two are shared out.
    """
    return 4 * vectors * (width + 2 * hidden)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Gradients and bytes of every model and way, sizes that do not divide, memory, and the map of step times."""
    mesh = init_device_mesh(rank.device.type, (rank.world_size,))
    for done, name in enumerate(config.models, start=1):
        for way, extra in [*((way, 0) for way in WAYS), *((way, 1) for way in WAYS[:2] if name != "char_gpt")]:
            yield from trial(name, way, extra, config, mesh, rank)
        yield from memory(name, config, mesh, rank)
        rank.progress(done, len(config.models) + 1, name)
    yield from times(config, mesh, rank)


def trial(name: str, way: str, extra: int, config: Config, mesh: DeviceMesh, rank: Rank) -> Iterator[Record]:
    """Does this way compute one process's gradient, with how many collectives and bytes? Or who refuses?"""
    case = {"model": name, "way": way, "split": "uneven" if extra else "even"}
    whole, ours, x, y = _pair(name, extra, config, rank)
    if way == WAYS[0] and not extra:
        floor = rounding_error(whole.module, whole.loss, x, y)
        yield rank.record(METRIC, "1", rank.slowest([floor]), model=name)
    whole.loss(whole.module(x), y).backward()
    logging.disable(logging.ERROR)  # DTensor logs what it then raises
    try:
        module = parted(ours.module, way, mesh)
        seen = _phases(module, ours.loss, x, y, rank)
    except RuntimeError as e:
        yield rank.record("refused", "1", 1.0, error=" ".join(str(e).split())[:160], **case)
        return
    finally:
        logging.disable(logging.NOTSET)
    yield rank.record("refused", "1", 0.0, error="none", **case)
    error = rank.slowest([gradient_error(module, whole.module, mesh.get_group())])
    yield rank.record("gradient_relative_error", "1", error, **case)
    yield from _bytes(seen, len(halves(whole.module)), _vectors(x, whole.module), case, rank)


def _pair(name: str, extra: int, config: Config, rank: Rank) -> tuple[Workload, Workload, Tensor, Tensor]:
    """The model twice, and one batch, on the device."""
    whole, ours = (blocks.workload(name, extra=extra, seed=config.seed) for _ in range(2))
    torch.manual_seed(config.seed + 1)
    x, y = (t.detach().to(rank.device) for t in whole.make_batch(config.batch_size))
    whole.module.to(rank.device), ours.module.to(rank.device)
    return whole, ours, x.requires_grad_(x.is_floating_point()), y


def parted(module: nn.Module, way: str, mesh: DeviceMesh) -> nn.Module:
    """This rank's part of `module`."""
    if way == "by hand":
        return by_hand(module, mesh.get_group())
    return with_dtensor(module, mesh, prepare=way == "dtensor")


def _phases(module: nn.Module, loss: Callable, x: Tensor, y: Tensor, rank: Rank) -> dict[str, tuple[Traffic, int]]:
    """What forward and backward started, as seen by Traffic and by CommDebugMode, and what TCP sent during both."""
    from torch.distributed.tensor.debug import CommDebugMode  # seconds, which a bad option need not wait for

    seen = {}

    def noted() -> None:
        with CommDebugMode() as counter, Traffic() as traffic:
            value = loss(module(x), y)
        seen["forward"] = traffic, counter.get_total_counts()
        with CommDebugMode() as counter, Traffic() as traffic, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CommDebugMode's hooks complain that characters have no gradient
            value.backward()
        seen["backward"] = traffic, counter.get_total_counts()

    seen["tcp"] = sent_by(noted, rank)
    return seen


def _bytes(seen: dict, half_blocks: int, numbers: tuple[int, int], case: dict, rank: Rank) -> Iterator[Record]:
    """Counted and by closed form, per phase."""
    expected = predict(half_blocks, *numbers, rank.world_size)
    for phase in ("forward", "backward"):
        traffic, calls = seen[phase]
        found = {"all_reduces": (calls, "1"), "sent_bytes": (traffic.sent().total(), "B")}
        for metric, (value, unit) in found.items():
            yield rank.record(metric, unit, value, phase=phase, **case)
            yield rank.record(metric, unit, expected[metric], kind="modelled", phase=phase, **case)
    if seen["tcp"] is not None and rank.device.type == "cpu":
        yield rank.record("tcp_sent_bytes", "B", max(seen["tcp"]), **case)


def _vectors(x: Tensor, module: nn.Module) -> tuple[int, int]:
    """(vectors, their width) that pass between the halves of `module`. Characters become a vector each."""
    half = module.get_submodule(halves(module)[0])
    return x.shape[0] * x.shape[1], getattr(half, half.ROW).out_features


def memory(name: str, config: Config, mesh: DeviceMesh, rank: Rank) -> Iterator[Record]:
    """Bytes on one rank: parameters, gradients, and what forward keeps for backward."""
    whole, ours, x, y = _pair(name, 0, config, rank)
    for mode, module in (("single", whole.module), ("tensor", parted(ours.module, "by hand", mesh))):
        case = {"model": name, "mode": mode}
        saved = saved_tensors.count(lambda m=module: m(x), list(module.parameters())).activations
        whole.loss(module(x), y).backward()
        held = {
            "parameters": nbytes(*module.parameters()),
            "gradients": nbytes(*(p.grad for p in module.parameters())),
            "activations": saved,
        }
        for what, size in held.items():
            yield rank.record("bytes_per_rank", "B", max(rank.gather(size)), what=what, **case)
        if isinstance(whole.module, Mlp):
            hidden = -(-whole.module.up.out_features // (rank.world_size if mode == "tensor" else 1))
            expected = predict_activations(*_vectors(x, whole.module), hidden)
            yield rank.record("bytes_per_rank", "B", expected, kind="modelled", what="activations", **case)


def times(config: Config, mesh: DeviceMesh, rank: Rank) -> Iterator[Record]:
    """Seconds of all-reduces by size, and of training steps in every cell, the ways in turn."""
    seconds, link = all_reduce_link(4 if config.smoke else 10, rank)
    for size, samples in seconds.items():
        yield rank.record("all_reduce_s", "s", samples, size=size)
    cells = [(width, rows) for width in config.widths for rows in config.rows][: 1 if config.smoke else None]
    for done, (width, rows) in enumerate(cells, start=1):
        ways = steps(width, rows, config.seed, mesh, rank)
        for step in ways.values():
            measure.time_steps(step, 3, rank.device)
        found = in_turn(ways, config, rank, 1 / len(cells))
        for mode, samples in found.items():
            yield rank.record("step_s", "s", samples, mode=mode, width=width, rows=rows)
        alone = statistics.median(found["single"])
        modelled = predict_step_s(alone, layers(rank), 4 * rows * width, rank.world_size, link)
        yield rank.record("step_s", "s", modelled, kind="modelled", mode="tensor", width=width, rows=rows)
        yield from _sizes(width, rows, rank)
        rank.progress(len(config.models) * len(cells) + done, (len(config.models) + 1) * len(cells), f"width {width}")


def bytes_cross_at(run: Records, width: int) -> float:
    """Rows with which tensor parallel sends as many bytes per step as DDP, by the closed forms."""
    sent = {m: run.where("sent_bytes_per_step", mode=m, width=width) for m in ("tensor", "ddp")}
    per_row = sent["tensor"][0].value / sent["tensor"][0].case["rows"]
    return sent["ddp"][0].value / per_row


def faster(run: Records, width: int) -> dict[int, measure.Estimate]:
    """{rows: time of DDP over that of tensor parallel}: above 1 tensor parallel is the faster one."""
    steps = {
        m: {r.case["rows"]: r for r in run.where("step_s", mode=m, width=width) if r.kind == "measured"}
        for m in ("tensor", "ddp")
    }
    return {n: measure.paired_ratio(steps["ddp"][n].samples, steps["tensor"][n].samples) for n in sorted(steps["ddp"])}


def times_cross_between(run: Records, width: int) -> tuple[int, int] | None:
    """(rows with which tensor parallel is shown to be faster, the next with which DDP is); None if no such pair is."""
    found = faster(run, width)
    wins = [n for n, e in found.items() if e.low > 1]
    loses = [n for n, e in found.items() if e.high < 1 and wins and n > max(wins)]
    return (max(wins), min(loses)) if wins and loses else None


def answer(run: Records) -> Iterator[str]:
    """Whether the gradients are right, what is sent, and with how many rows tensor parallel beats DDP."""
    n = run[0].layout["world_size"]
    wrong = beyond(run)
    count = len(run.where("gradient_relative_error"))
    yield (
        f"{count} gradients on {n} rank{'s' * (n > 1)}: "
        + (f"{len(wrong)} are WRONG." if wrong else "equal to one process's up to rounding.")
    )
    for width in sorted({r.case["width"] for r in run.where("sent_bytes_per_step")}) if n > 1 else ():
        rows = bytes_cross_at(run, width)
        yield f"Width {width}: tensor parallel sends less than DDP up to {rows:,.0f} rows (closed form)."
        said = "; ".join(f"{m:,} rows {e}" for m, e in faster(run, width).items())
        crossing = times_cross_between(run, width)
        between = (
            f"the order turns round between {crossing[0]:,} and {crossing[1]:,} rows"
            if crossing
            else "where the order turns round, this run cannot tell"
        )
        yield f"Time of DDP over that of tensor parallel: {said}: {between}."
    refused = [r for r in run.where("refused") if r.value]
    if refused:
        ways = ", ".join(dict.fromkeys(f"{r.case['way']} ({r.case['model']})" for r in refused))
        yield f"Sizes that {n} ranks cannot share equally are refused by {ways}; by hand they work."


def _sizes(width: int, rows: int, rank: Rank) -> Iterator[Record]:
    """Bytes that a rank sends per step: tensor parallel and the pipeline move vectors, DDP moves gradients."""
    tensor = 2 * predict(layers(rank), rows, width, rank.world_size)["sent_bytes"]
    ddp = ring_all_reduce_bytes(gradient_bytes(perceptrons(width, rank).module()), rank.world_size)
    pipeline = 4 * rows * width * (1 + (rank.world_size > 2))  # a stage in the middle has two neighbours
    for mode, size in (("tensor", tensor), ("ddp", ddp), ("pipeline", pipeline if rank.world_size > 1 else 0)):
        yield rank.record("sent_bytes_per_step", "B", size, kind="modelled", mode=mode, width=width, rows=rows)
